"""What transformers says, with the decoded weights in fp32, to the tokens that engines were scored on.

python transformers_side.py MODEL OUT ARM...     reads OUT/ARM.tables.pt, prints PASS or FAIL for each
"""

import sys
from pathlib import Path

import torch

from tools.local_model import reference

# Mean KL; largest difference of a log-probability where the probability is at least PROBABLE.
MEAN_KL, LARGEST, PROBABLE = 1e-3, 0.05, 0.01
# A lead of the last chosen expert's score that rounding may overturn; such positions are counted, not judged.
NEAR_TIE = 0.01
MOST_NEAR_TIES = 0.04


class Transformers:
    def __init__(self, model: Path) -> None:
        self.model, head = reference.load_reference(model)
        self.model, self.head = self.model.cuda(), head.cuda()
        self.leads: list[torch.Tensor] = []
        routers = [m for m in self.model.modules() if type(m).__name__ == "Glm5NextTextTopkRouter"]
        assert routers, "no router was found; transformers renamed its class"
        for router in routers:
            router.register_forward_hook(self._record)

    def _record(self, router, _inputs, outputs) -> None:
        scores = outputs[0].sigmoid() + router.e_score_correction_bias
        ordered = scores.sort(-1, descending=True).values
        self.leads.append(ordered[:, router.top_k - 1] - ordered[:, router.top_k])

    @torch.inference_mode()
    def __call__(self, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities [positions, vocabulary], and each position's smallest lead of an expert; on the CPU."""
        self.leads.clear()
        hidden = self.model(input_ids=torch.tensor([tokens], device="cuda"), use_cache=False).last_hidden_state
        table = self.head(hidden)[0].log_softmax(-1)
        return table.cpu(), torch.stack(self.leads).amin(0).cpu()


def judge(side: Transformers, scored: list[dict]) -> tuple[bool, str]:
    parts = []
    for one in scored:
        want, lead = (x[: len(one["table"])] for x in side(one["tokens"]))
        parts.append((want, one["table"], lead >= NEAR_TIE))
    want, got, decided = map(torch.cat, zip(*parts, strict=True))
    kl = (want.exp() * (want - got)).sum(-1)
    difference = ((want - got).abs() * (want.exp() >= PROBABLE)).amax(-1)
    ties = float((~decided).float().mean())
    mean, largest = float(kl[decided].mean()), float(difference[decided].max())
    text = (
        f"{len(got)} positions, mean KL {mean:.1e}, largest difference {largest:.3f}, {ties:.1%} near-ties of experts"
    )
    return mean <= MEAN_KL and largest <= LARGEST and ties <= MOST_NEAR_TIES, text


def main() -> int:
    model, out, arms = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    present = [arm for arm in arms if (out / f"{arm}.tables.pt").is_file()]
    side = Transformers(model)
    passed = len(present) == len(arms)
    for arm in present:
        is_good, text = judge(side, torch.load(out / f"{arm}.tables.pt"))
        passed &= is_good
        print(f"{'PASS' if is_good else 'FAIL'} {arm} against transformers: {text}", flush=True)
    for arm in set(arms) - set(present):
        print(f"FAIL {arm} against transformers: it left no tables", flush=True)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
