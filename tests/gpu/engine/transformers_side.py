"""What transformers says, with the decoded weights in fp32, to the tokens that engines were scored on.

python transformers_side.py MODEL OUT ARM...     reads OUT/ARM.tables.pt, prints PASS, FAIL or NOTE
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from tools.local_model import reference

# Mean KL; largest difference of a log-probability where the probability is at least PROBABLE.
MEAN_KL, LARGEST, PROBABLE = 1e-3, 0.05, 0.01
# A lead of the last chosen expert's score that rounding may overturn; such positions are counted, not judged. A trained
# router leaves few, a random one most.
NEAR_TIE = 0.01
MOST_NEAR_TIES = {"trained": 0.04, "random": 0.7}
# The engine's own bf16 layers move log-probabilities too. The kernels may add little to what the PyTorch decoder, in
# fp32 in the same engine, is off by.
AS_FAR = 1.5


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


@dataclass(frozen=True)
class Distance:
    positions: int
    mean_kl: float
    largest: float  # difference of a log-probability where the probability is at least PROBABLE
    beyond: int  # positions where it is above LARGEST
    near_ties: float  # share of positions at which rounding may choose another expert; they are left out

    def is_within(self, most_near_ties: float) -> bool:
        return self.mean_kl <= MEAN_KL and self.largest <= LARGEST and self.near_ties <= most_near_ties

    def __str__(self) -> str:
        return (
            f"{self.positions} positions, mean KL {self.mean_kl:.1e}, largest difference {self.largest:.3f}, "
            f"{self.beyond} beyond {LARGEST}, "
            f"{self.near_ties:.1%} near-ties of experts"
        )


def judge(side: Transformers, scored: list[dict]) -> Distance:
    parts = []
    for one in scored:
        want, lead = (x[: len(one["table"])] for x in side(one["tokens"]))
        parts.append((want, one["table"], lead >= NEAR_TIE))
    want, got, decided = map(torch.cat, zip(*parts, strict=True))
    kl = (want.exp() * (want - got)).sum(-1)
    difference = ((want - got).abs() * (want.exp() >= PROBABLE)).amax(-1)
    ties = float((~decided).float().mean())
    difference = difference[decided]
    beyond = int((difference > LARGEST).sum())
    return Distance(len(got), float(kl[decided].mean()), float(difference.max()), beyond, ties)


def main() -> int:
    model, out, arms = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    side, passed = Transformers(model), True
    most = MOST_NEAR_TIES["trained" if (model / "tokenizer.json").is_file() else "random"]

    def verdict(is_good: bool, text: str) -> None:
        nonlocal passed
        passed &= is_good
        print(f"{'PASS' if is_good else 'FAIL'} {text}", flush=True)

    floor = None
    for file in sorted(out.glob(f"{model.name}-*.oracle.tables.pt")):
        floor = judge(side, torch.load(file))
        engine = file.name.removesuffix(".oracle.tables.pt")
        print(f"NOTE the PyTorch decoder in {engine}'s engine against transformers: {floor}", flush=True)
        # Engines of this model may part from each other where they are closer than they are to exact arithmetic.
        (out / f"{model.name}.floor.json").write_text(json.dumps(floor.largest))
    for arm in arms:
        file = out / f"{arm}.tables.pt"
        if not file.is_file():
            verdict(False, f"{arm} against transformers: it left no tables")
            continue
        found = judge(side, torch.load(file))
        verdict(found.is_within(most), f"{arm} against transformers: {found}")
        if floor is not None:
            ratio = found.mean_kl / floor.mean_kl
            verdict(ratio <= AS_FAR, f"{arm}'s mean KL is {ratio:.2f} times that of the PyTorch decoder in the same "
                                     f"engine (at most {AS_FAR})")  # fmt: skip
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
