"""vLLM 0.33.0 with the plugin's CUDA kernels on one machine, against the plugin's PyTorch decoder and transformers.

    PYTHONPATH=/tmp/site:overlay:EXLLAMAV3_EXT:. python3 tests/gpu/engine/prove.py [--arms base] [--parallel 5]

Every arm is an engine in a process of its own; several share the GPU. One line for each verdict, PASS or FAIL, as it
comes. `tests/gpu/engine/README.md` has the calls that bring everything to a machine without a network.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[2]

# Prebuilt in vLLM's wheel for sm_90; FlashInfer's would be compiled at first use.
KV = {
    "auto": {"attention_backend": "FLASH_ATTN_MLA_SPARSE"},
    "fp8": {"attention_backend": "FLASHMLA_SPARSE", "kv_cache_dtype": "fp8_ds_mla"},
}
EAGER, GRAPHS = {"enforce_eager": True}, {"enforce_eager": False}


def mtp(tokens: int) -> dict:
    return {"speculative_config": {"method": "mtp", "num_speculative_tokens": tokens}}


def dflash2(folder: str, attention: str = "FLASH_ATTN") -> dict:
    """The draft must not inherit the target's KV dtype, which its attention may not know."""
    draft = {"method": "dflash", "model": folder, "num_speculative_tokens": 7}
    return {"speculative_config": draft | {"kv_cache_dtype": "auto", "attention_backend": attention}}


# A token that the oracle holds this close to its own choice may be chosen instead: logits are bf16. It is more where
# the oracle itself is further from transformers than that: bf16 layers above a random router amplify their rounding.
NEAR_TIE = 0.1
# Share of drafted tokens that a trained draft gets accepted: drafts that are always right or wrong prove nothing.
ACCEPTED = (0.3, 0.9)
# Of the acceptance, between two kinds of attention in the draft.
SAME_ACCEPTANCE = 0.01


@dataclass(frozen=True)
class Arm:
    model: str  # see Proof.folder
    mode: str
    kv: str
    options: dict = field(hash=False)
    oracle: str | None = None  # the arm that gives the PyTorch decoder's tokens; itself if it is its own
    has_tables: bool = False  # to be judged against transformers
    plain: str | None = None  # the arm without drafts that says the same; for a trained draft

    @property
    def name(self) -> str:
        return f"{self.model}-{self.mode}-{self.kv}"


PLAIN = "local-eager-auto"  # says the local model's own text without drafts


def trained(model: str, mode: str, speculation: dict) -> Arm:
    return Arm(model, mode, "auto", GRAPHS | KV["auto"] | speculation, oracle=PLAIN, plain=PLAIN)


def both_modes(model: str, kv: str) -> list[Arm]:
    judged = kv == "auto"  # transformers has no fp8 cache
    own = f"{model}-eager-{kv}"
    return [
        Arm(model, "eager", kv, EAGER | KV[kv], own, judged),
        Arm(model, "graphs", kv, GRAPHS | KV[kv], own, judged),
    ]


FLASH = trained("local", "flash", dflash2("local-dflash2"))
TRITON = trained("local", "triton", dflash2("local-dflash2", "TRITON_ATTN"))
ARMS = {
    "base": [*both_modes("random", "auto"), *both_modes("local", "auto"), *both_modes("random", "fp8"),
             *both_modes("local", "fp8")],
    "mtp": [Arm("random-mtp", "graphs", "auto", GRAPHS | KV["auto"] | mtp(3), "random-eager-auto")],
    "dflash": [both_modes("random", "auto")[0],
               Arm("random", "dflash", "auto", GRAPHS | KV["auto"] | dflash2("random-dflash2"), "random-eager-auto")],
    "dflash-fp8": [both_modes("random", "fp8")[0],
                   Arm("random", "dflash", "fp8", GRAPHS | KV["fp8"] | dflash2("random-dflash2"), "random-eager-fp8")],
    "drafts": [both_modes("local", "auto")[0], FLASH, TRITON,
               trained("local-mtp", "k1", mtp(1)), trained("local-mtp", "k3", mtp(3))],
    "tp2": [Arm("random", "tp2", "auto", GRAPHS | KV["auto"] | {"tensor_parallel_size": 2}, "random-eager-auto"),
            Arm("random", "ep2", "auto", GRAPHS | KV["auto"] | {"tensor_parallel_size": 2,
                "enable_expert_parallel": True}, "random-eager-auto"),
            Arm("local", "tp2", "auto", GRAPHS | KV["auto"] | {"tensor_parallel_size": 2}, "local-eager-auto")],
}  # fmt: skip


class Proof:
    def __init__(self, work: Path, drafts: Path, deadline: float, gpus: int = 1) -> None:
        self.work, self.drafts, self.deadline, self.gpus = work, drafts, deadline, gpus
        self.failed: list[str] = []

    def verdict(self, passed: bool, text: str) -> None:
        print(f"{'PASS' if passed else 'FAIL'} {text}", flush=True)
        if not passed:
            self.failed.append(text)

    def run(self, name: str, command: list[str], prefixes: tuple[str, ...], **environment: str) -> bool:
        """Run a command with its log in the work folder; pass on lines that start with one of `prefixes`."""
        left = self.deadline - time.monotonic()
        if left < 30:
            self.verdict(False, f"{name}: not started, the time is over")
            return False
        with (self.work / f"{name}.log").open("w") as log:
            try:
                done = subprocess.run(
                    [sys.executable, "-u", *command], stdout=log, stderr=subprocess.STDOUT, timeout=left,
                    env=self.environment() | environment, cwd=REPOSITORY,
                ).returncode  # fmt: skip
            except subprocess.TimeoutExpired:
                done = "the end of the time"
        lines = (self.work / f"{name}.log").read_text(errors="replace").splitlines()
        print("\n".join(line for line in lines if line.startswith(prefixes)), flush=True)
        if done != 0:
            tail = "\n  ".join(line[:400] for line in lines[-25:])
            print(f"{name}: ended with {done}; the end of its log:\n  {tail}", flush=True)
        return done == 0

    def environment(self) -> dict[str, str]:
        """vLLM finds the plugin by its entry point, which a folder on the path has only with its metadata."""
        metadata = self.work / "plugin" / "vllm_exl3-0.1.0.dist-info"
        metadata.mkdir(parents=True, exist_ok=True)
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-exl3\nVersion: 0.1.0\n")
        (metadata / "entry_points.txt").write_text("[vllm.general_plugins]\nexl3 = vllm_exl3:register\n")
        path = os.pathsep.join([str(metadata.parent), os.environ.get("PYTHONPATH", ""), str(REPOSITORY), str(HERE)])
        return os.environ | {"PYTHONPATH": path}

    def folder(self, name: str) -> Path:
        """The local model, the DFlash2 draft trained on it, or what `models.py` made in the work folder."""
        named = {"local": REPOSITORY / "models" / "local", "local-dflash2": self.drafts / "dflash2"}
        return named.get(name, self.work / "models" / name)

    def join_mtp(self) -> None:
        from tools.local_model import draft_files

        draft_files.join(self.folder("local-mtp"), self.folder("local"), self.drafts / "mtp")

    def start(self, arm: Arm, number: int) -> None:
        options = arm.options | {"kv_cache_memory_bytes": 2 << 30}
        draft = options.get("speculative_config", {})
        if "model" in draft:
            options["speculative_config"] = draft | {"model": str(self.folder(draft["model"]))}
        order = {
            "name": arm.name, "model": str(self.folder(arm.model)), "out": str(self.work), "options": options,
            "oracle": arm.oracle == arm.name, "tables": arm.has_tables,
            "own_text": arm.name == PLAIN or arm.plain is not None,
        }  # fmt: skip
        place = {} if "tensor_parallel_size" in arm.options else {"CUDA_VISIBLE_DEVICES": str(number % self.gpus)}
        self.run(arm.name, [str(HERE / "arm.py"), json.dumps(order)], (f"{arm.name}: ",), **place)

    # Verdicts

    def judge(self, arm: Arm) -> None:
        own, oracle = (self._read(name) for name in (arm.name, arm.oracle))
        if own is None or oracle is None or "oracle" not in oracle:
            missing = arm.name if own is None else arm.oracle
            self.verdict(False, f"{arm.name}: no answers of {missing}")
            return
        ties, wrong, total = compare(own["kernels"], oracle["oracle"], self.near_tie(arm))
        for line in [*ties, *wrong]:
            print(f"  {arm.name}: {line}")
        good = not wrong and len(ties) <= total // 2
        self.verdict(good, f"{arm.name} against the PyTorch decoder: {total} requests, {len(ties)} near-ties, "
                           f"{len(wrong)} wrong (near is {self.near_tie(arm):.2f})")  # fmt: skip
        again = f"other answers for {own['repeats']} at once" if own["repeats"] else "bit-equal"
        self.verdict(not own["repeats"], f"{arm.name} again: {again}")
        if "acceptance" in own:
            print(f"  {arm.name}: {accepted_text(own['acceptance'])}", flush=True)
        if arm.plain:
            self._judge_draft(arm, own)

    def _judge_draft(self, arm: Arm, own: dict) -> None:
        plain = self._read(arm.plain)
        if plain is None:
            self.verdict(False, f"{arm.name}: no answers of {arm.plain}")
            return
        ties, wrong, total = compare({"all": own["own_text"]}, {"all": plain["own_text"]}, self.near_tie(arm))
        for line in [*ties, *wrong]:
            print(f"  {arm.name}: {line}")
        good = not wrong and len(ties) <= total // 4
        text = f"{arm.name} against {arm.plain}: {total} answers, {len(ties)} near-ties, {len(wrong)} wrong"
        self.verdict(good, text)
        share, (least, most) = accepted_share(own["acceptance"]), ACCEPTED
        self.verdict(least <= share <= most, f"{arm.name}: {share:.1%} accepted, expected {least:.0%} to {most:.0%}")

    def judge_attention(self, first: Arm, second: Arm) -> None:
        """Whether the draft foresees as much with the second kind of attention."""
        said = [self._read(arm.name) for arm in (first, second)]
        if None in said:
            self.verdict(False, f"acceptance of {first.name} and {second.name}: not both answered")
            return
        one, other = (accepted_share(own["acceptance"]) for own in said)
        text = f"acceptance: {first.name} {one:.2%}, {second.name} {other:.2%}"
        self.verdict(abs(one - other) <= SAME_ACCEPTANCE, f"{text}, bar {SAME_ACCEPTANCE:.0%}")

    def near_tie(self, arm: Arm) -> float:
        floor = self.work / f"{arm.model.removesuffix('-mtp')}.floor.json"
        return max(NEAR_TIE, json.loads(floor.read_text())) if floor.is_file() else NEAR_TIE

    def _read(self, name: str) -> dict | None:
        file = self.work / f"{name}.json"
        return json.loads(file.read_text()) if file.is_file() else None

    def judge_tables(self, model: Path, arms: list[Arm]) -> None:
        command = [str(HERE / "transformers_side.py"), str(model), str(self.work), *(arm.name for arm in arms)]
        if not self.run(f"transformers-{model.name}", command, ("PASS", "FAIL", "NOTE")):
            self.failed.append(f"transformers on {model.name}")


def accepted_share(counts: dict) -> float:
    return counts["accepted"] / max(1, counts["drafted"])


def accepted_text(counts: dict) -> str:
    """A row of numbers: by position the share of all steps with drafts that accepted at least so many."""
    positions = ", ".join(f"{count / max(1, counts['drafts']):.1%}" for count in counts["by_position"])
    return (
        f"{counts['drafted']} tokens drafted in {counts['drafts']} steps, {counts['accepted']} accepted, "
        f"{accepted_share(counts):.1%}; by position {positions}"
    )


def compare(got: dict, want: dict, near_tie: float) -> tuple[list[str], list[str], int]:
    """(near-ties, wrong tokens, requests). After the first other token a request says nothing more."""
    ties, wrong, total = [], [], 0
    for count, requests in want.items():
        for number, (one, oracle) in enumerate(zip(got[count], requests, strict=True)):
            total += 1
            step = next((i for i, pair in enumerate(zip(one["tokens"], oracle["tokens"], strict=False))
                         if pair[0] != pair[1]), None)  # fmt: skip
            if step is None:
                continue
            mine, its = one["tokens"][step], oracle["tokens"][step]
            row = oracle["logprobs"][step]
            margin = row[str(its)] - row.get(str(mine), float("-inf"))
            line = (
                f"{count} at once, request {number}, token {step}: {mine} where the oracle has {its}, by {margin:.4f}"
            )
            (ties if margin <= near_tie else wrong).append(line)
    return ties, wrong, total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arms", default="base,mtp", help=f"of {', '.join(ARMS)}; or names of single arms")
    parser.add_argument("--parallel", type=int, default=5, help="engines at the same time")
    parser.add_argument("--work", type=Path, default=Path("/tmp/proof"))
    parser.add_argument("--drafts", type=Path, default=REPOSITORY / "models" / "local-drafts", help="the trained ones")
    parser.add_argument("--logs", type=Path, help="pack the logs into this file")
    parser.add_argument("--seconds", type=int, default=540, help="after so long what is left counts as failed")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    wanted = args.arms.split(",")
    named = [arm for group, members in ARMS.items() for arm in members if group in wanted or arm.name in wanted]
    arms = list(dict.fromkeys(named))
    if not arms:
        parser.error(f"--arms {args.arms}: names no arm; groups are {', '.join(ARMS)}")
    if any(arm.plain for arm in arms) and not args.drafts.is_dir():
        parser.error(f"--drafts {args.drafts}: no such folder; python -m tools.local_model.train_drafts writes it")
    gpus = subprocess.run(["nvidia-smi", "-L"], stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    proof = Proof(args.work, args.drafts, time.monotonic() + args.seconds, len(gpus))
    if any(arm.model.startswith("random") for arm in arms) and not proof.folder("random").is_dir():
        proof.run("models", [str(HERE / "models.py"), str(args.work / "models")], ("{",))
    if any(arm.plain for arm in arms):
        proof.join_mtp()
    with ThreadPoolExecutor(args.parallel) as pool:
        list(pool.map(proof.start, arms, range(len(arms))))
    scored = {proof.folder(arm.model): [other for other in arms if other.model == arm.model and other.has_tables]
              for arm in arms if arm.has_tables}  # fmt: skip
    with ThreadPoolExecutor(max(1, len(scored))) as pool:
        list(pool.map(proof.judge_tables, scored, scored.values()))
    for arm in arms:
        proof.judge(arm)
    if {arm.name for arm in arms} >= {FLASH.name, TRITON.name}:
        proof.judge_attention(FLASH, TRITON)
    if args.logs:
        with tarfile.open(args.logs, "w:gz") as tar:
            for log in sorted(args.work.glob("*.log")):
                tar.add(log, log.name)
    print(f"{len(proof.failed)} failed: {proof.failed}" if proof.failed else "all passed", flush=True)
    return 1 if proof.failed else 0


if __name__ == "__main__":
    sys.exit(main())
