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
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 3}}
# A token that the oracle holds this close to its own choice may be chosen instead: logits are bf16. It is more where
# the oracle itself is further from transformers than that: bf16 layers above a random router amplify their rounding.
NEAR_TIE = 0.1


@dataclass(frozen=True)
class Arm:
    model: str  # folder below the work folder, or `local`
    mode: str
    kv: str
    options: dict = field(hash=False)
    oracle: str | None = None  # the arm that gives the PyTorch decoder's tokens; itself if it is its own
    has_tables: bool = False  # to be judged against transformers

    @property
    def name(self) -> str:
        return f"{self.model}-{self.mode}-{self.kv}"


def both_modes(model: str, kv: str) -> list[Arm]:
    judged = kv == "auto"  # transformers has no fp8 cache
    own = f"{model}-eager-{kv}"
    return [
        Arm(model, "eager", kv, EAGER | KV[kv], own, judged),
        Arm(model, "graphs", kv, GRAPHS | KV[kv], own, judged),
    ]


ARMS = {
    "base": [*both_modes("random", "auto"), *both_modes("local", "auto"), *both_modes("random", "fp8"),
             *both_modes("local", "fp8")],
    "mtp": [Arm("random-mtp", "graphs", "auto", GRAPHS | KV["auto"] | MTP, "random-eager-auto")],
    "tp2": [Arm("random", "tp2", "auto", GRAPHS | KV["auto"] | {"tensor_parallel_size": 2}, "random-eager-auto"),
            Arm("random", "ep2", "auto", GRAPHS | KV["auto"] | {"tensor_parallel_size": 2,
                "enable_expert_parallel": True}, "random-eager-auto"),
            Arm("local", "tp2", "auto", GRAPHS | KV["auto"] | {"tensor_parallel_size": 2}, "local-eager-auto")],
}  # fmt: skip


class Proof:
    def __init__(self, work: Path, deadline: float) -> None:
        self.work, self.deadline = work, deadline
        self.gpus = len(subprocess.run(["nvidia-smi", "-L"], stdout=subprocess.PIPE, check=True).stdout.splitlines())
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

    def model(self, arm: Arm) -> Path:
        return REPOSITORY / "models" / "local" if arm.model == "local" else self.work / "models" / arm.model

    def start(self, arm: Arm, number: int) -> None:
        order = {
            "name": arm.name, "model": str(self.model(arm)), "out": str(self.work), "oracle": arm.oracle == arm.name,
            "tables": arm.has_tables, "options": arm.options | {"kv_cache_memory_bytes": 2 << 30},
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


def compare(got: dict, want: dict, near_tie: float) -> tuple[list[str], list[str], int]:
    """(near-ties, wrong tokens, requests). After the first other token a request says nothing more."""
    ties, wrong, total = [], [], 0
    for count, requests in want.items():
        for number, (one, oracle) in enumerate(zip(got[count], requests, strict=True)):
            total += 1
            step = next((i for i, pair in enumerate(zip(one["tokens"], oracle["tokens"], strict=True))
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
    parser.add_argument("--logs", type=Path, help="pack the logs into this file")
    parser.add_argument("--seconds", type=int, default=540, help="after so long what is left counts as failed")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    wanted = args.arms.split(",")
    arms = [arm for group, members in ARMS.items() for arm in members if group in wanted or arm.name in wanted]
    if not arms:
        parser.error(f"--arms {args.arms}: names no arm; groups are {', '.join(ARMS)}")
    proof = Proof(args.work, time.monotonic() + args.seconds)
    if any(arm.model != "local" for arm in arms) and not (args.work / "models").is_dir():
        proof.run("models", [str(HERE / "models.py"), str(args.work / "models")], ("{",))
    with ThreadPoolExecutor(args.parallel) as pool:
        list(pool.map(proof.start, arms, range(len(arms))))
    scored = {proof.model(arm): [other for other in arms if other.model == arm.model and other.has_tables]
              for arm in arms if arm.has_tables}  # fmt: skip
    with ThreadPoolExecutor(max(1, len(scored))) as pool:
        list(pool.map(proof.judge_tables, scored, scored.values()))
    for arm in arms:
        proof.judge(arm)
    if args.logs:
        with tarfile.open(args.logs, "w:gz") as tar:
            for log in sorted(args.work.glob("*.log")):
                tar.add(log, log.name)
    print(f"{len(proof.failed)} failed: {proof.failed}" if proof.failed else "all passed", flush=True)
    return 1 if proof.failed else 0


if __name__ == "__main__":
    sys.exit(main())
