"""What the plugin's guards cost: engines with and without them take turns on one GPU.

    PYTHONPATH=overlay:. python3 bench/guards.py                  # as the product starts it: CUDA graphs, no drafts
    PYTHONPATH=overlay:. python3 bench/guards.py --mode eager --drafts dflash7

Three engines start side by side: with all guards, without any, and one more with all, which shows how much two equal
engines differ. Then one works while two wait, a fraction of a second each, in all orders. It needs what the engine
proof needs (tests/gpu/engine/README.md). Prints progress, a verdict for each measure and a table for RESULTS.md, and
writes JSON. Ends with 0 if every bar holds, 1 if one is missed, 2 for wrong usage, 3 if an engine failed or time was
too short.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path += [str(HERE), *(str(ROOT / folder) for folder in ("tests/soak", "tests/gpu/engine", "overlay", "."))]

import arms
import run as soak
from guards_engine import MEASURES, PARTS, Sizes
from paired import Comparison, table
from prove import Proof
from vllm_exl3 import guards

MISSED, USAGE, FAILED = 1, 2, 3
ENGINES = {"on": "", "off": ",".join(guards.NAMES), "again": ""}  # name -> EXL3_GUARDS_OFF
# Every order, so that each engine has every place and comes after each other one equally often.
ORDERS = list(itertools.permutations(ENGINES))
PROGRAM = [sys.executable, "-u", str(HERE / "guards_engine.py")]
PROGRESS_S = 15
END_S = 5  # of --seconds, for the report


class EngineFailed(RuntimeError):
    """One sentence, and the end of the engine's log."""


class Engine:
    """A process that works when it is told to; see guards_engine.py."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str], log: Path) -> None:
        self.name, self.log = name, log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True, cwd=ROOT,
                env=environment,
            )  # fmt: skip

    def read(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise EngineFailed(f"{self.name}: ended with {self.process.wait()}; {self.log} ends with:\n  "
                               + "\n  ".join(self.last_lines(20)))  # fmt: skip
        return json.loads(line)

    def play(self, **turn) -> dict:
        try:
            self.process.stdin.write(json.dumps(turn) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # `read` says why
        return self.read()

    def last_lines(self, count: int) -> list[str]:
        return [line[:300] for line in self.log.read_text(errors="replace").splitlines()[-count:]]

    def last_line(self) -> str:
        return next(iter(self.last_lines(1)), "no line yet")[:100]

    def kill(self) -> None:
        self.process.kill()


# Turns


def wait_until_up(engines: list[Engine], say: Callable[[str], None]) -> dict[str, dict]:
    """Name -> what the engine says of itself. Raises EngineFailed as soon as one ends, and ends the others."""
    about = {}
    with ThreadPoolExecutor(len(engines)) as pool:
        waiting = {pool.submit(engine.read): engine for engine in engines}
        try:
            while waiting:
                done, _ = wait(waiting, PROGRESS_S, FIRST_COMPLETED)
                for future in done:
                    engine = waiting.pop(future)
                    about[engine.name] = future.result()
                    say(f"{engine.name} is up: {about[engine.name]}")
                if not done:
                    say("waiting for " + "; ".join(f"{one.name}: {one.last_line()}" for one in waiting.values()))
        except BaseException:
            for engine in engines:
                engine.kill()
            raise
    return about


def check_engines(about: dict[str, dict]) -> None:
    """Raise EngineFailed if the engines do not differ by what they should, and by nothing else."""
    for name, off in ENGINES.items():
        if ",".join(about[name]["guards_off"]) != off:
            raise EngineFailed(f"{name}: is without the guards {about[name]['guards_off']}, expected {off or 'none'}.")
    schedulers = {name: said["scheduler"] for name, said in about.items()}
    if schedulers["on"] != schedulers["again"] or schedulers["on"] == schedulers["off"]:
        raise EngineFailed(f"schedulers are {schedulers}: on and again must have the guarded one, off vLLM's own.")
    cpus = {name: said["cpus"] for name, said in about.items()}
    if any(one != cpus["on"] for one in cpus.values()):
        raise EngineFailed(f"engines run on the CPUs {cpus}: all must run on the same ones, or distances are measured.")


def take_turns(
    engines: list[Engine], pairs: list[dict], rounds: int, seconds_left: Callable[[], float], say: Callable[[str], None]
) -> None:
    """Append to `pairs` one dict for each part of a measure, {"measure", "round", "part", engine: {"tokens", "seconds",
    "steps"}}, until the rounds are done or no other measure fits into the time."""
    named, orders, longest = {one.name: one for one in engines}, itertools.cycle(ORDERS), 0.0
    for round in range(rounds):
        for measure in MEASURES:
            before = seconds_left()
            if before < longest:
                return
            for part in range(PARTS):
                turn = {"measure": measure, "round": round, "part": part}
                pairs.append(turn | {name: named[name].play(**turn) for name in next(orders)})
            longest = max(longest, before - seconds_left())
        last = {pair["measure"]: rate(pair["on"]) for pair in pairs}
        say(f"round {round + 1}, tokens/s: " + ", ".join(f"{name} {value:.0f}" for name, value in last.items()))


def rate(timed: dict) -> float:
    return timed["tokens"] / timed["seconds"]


# Telling


def compare(pairs: list[dict]) -> list[Comparison]:
    return [
        Comparison(name, measure.bar, *([rate(pair[engine]) for pair in pairs if pair["measure"] == name]
                                        for engine in ENGINES))
        for name, measure in MEASURES.items()
    ]  # fmt: skip


def tokens_per_step(pairs: list[dict]) -> dict[str, dict[str, float]]:
    """By measure and engine. Where drafts are accepted differently, throughput differs for another reason than work."""

    def of(measure: str, engine: str) -> float:
        timed = [pair[engine] for pair in pairs if pair["measure"] == measure]
        return sum(one["tokens"] for one in timed) / max(1, sum(one["steps"] for one in timed))

    return {measure: {engine: of(measure, engine) for engine in ENGINES} for measure in MEASURES}


def conclude(comparisons: list[Comparison]) -> int:
    if not all(one.is_enough for one in comparisons):
        return FAILED
    return 0 if all(one.holds for one in comparisons) else MISSED


def device() -> str:
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError):
        return "the CPU"


# The command


def start_engines(args: argparse.Namespace, program: list[str]) -> list[Engine]:
    environment = Proof(args.work, args.draft_models, 0).environment()
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    arm = arms.Arm("cache", args.drafts, "sync", args.mode, "triton", "auto")
    sizes = Sizes(args.prompt_tokens, args.new_tokens)
    models = make_models(args, sizes.longest)
    order = {"arm": arm.name, "models": str(models), "platform": asdict(soak.gpu_platform()),
             "sizes": asdict(sizes), "pool_mib": args.pool_mib}  # fmt: skip
    command = [*program, json.dumps(order)]
    return [Engine(name, command, environment | {"CUDA_VISIBLE_DEVICES": gpu, "EXL3_GUARDS_OFF": off},
                   args.work / f"{name}.log") for name, off in ENGINES.items()]  # fmt: skip


def make_models(args: argparse.Namespace, longest: int) -> Path:
    """The folder with the local model for contexts of `longest` tokens, and with drafts where they are asked for."""
    models = args.work / "models"
    if args.drafts == "nodrafts":
        soak.long_copy(models / "local", ROOT / "models" / "local", longest)
    else:
        soak.make_models(models, longest, args.draft_models)
    return models


def time_engines(args: argparse.Namespace, program: list[str]) -> tuple[list[dict], dict[str, dict]]:
    """(the pairs of take_turns, what the engines say of themselves). Raises EngineFailed."""
    begin, pairs, about = time.monotonic(), [], {}

    def say(line: str) -> None:
        print(f"{time.monotonic() - begin:6.1f} s  {line}", flush=True)

    def left() -> float:
        return args.seconds - (time.monotonic() - begin)

    engines = start_engines(args, program)
    say(f"started {', '.join(ENGINES)}; their logs are in {args.work}")
    timer = threading.Timer(args.seconds, lambda: [engine.kill() for engine in engines])
    timer.start()
    try:
        about = wait_until_up(engines, say)
        check_engines(about)
        take_turns(engines, pairs, args.rounds, lambda: left() - END_S, say)
    except EngineFailed as error:
        if left() > 0:
            raise
        if not pairs:
            raise EngineFailed(f"the time is over (--seconds {args.seconds:g}); {error}") from error
        say("the time is over within a turn; what was timed before it counts")
    finally:
        timer.cancel()
        for engine in engines:
            engine.kill()
            engine.process.wait()
    return pairs, about


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=arms.AXES["mode"], default="graphs")
    parser.add_argument("--drafts", choices=["none", *arms.AXES["drafts"][1:]], default="none")
    parser.add_argument("--seconds", type=float, default=240, help="for all of it, the engines' start included")
    parser.add_argument("--rounds", type=int, default=1000, help="ends after so many, too")
    parser.add_argument("--prompt-tokens", type=int, default=Sizes.prompt, help="of each timed prompt")
    parser.add_argument("--new-tokens", type=int, default=Sizes.new, help="timed of each answer in a round")
    parser.add_argument("--pool-mib", type=int, default=2048, help="each engine's cache")
    parser.add_argument("--work", type=Path, default=Path("/tmp/guards-bench"), help="models and logs")
    parser.add_argument("--draft-models", type=Path, default=ROOT / "models" / "local-drafts")
    parser.add_argument("--commit", help="where git is not there to say it")
    parser.add_argument("--json", type=Path, default=Path("guards.json"), help="all numbers")
    args = parser.parse_args(argv)
    args.drafts = args.drafts.replace("none", "nodrafts")
    if args.drafts != "nodrafts" and not args.draft_models.is_dir():
        parser.error(f"--draft-models {args.draft_models}: no such folder; models/local-drafts is what ships.")
    args.work.mkdir(parents=True, exist_ok=True)
    args.command = shlex.join(["python3", "bench/guards.py", *(sys.argv[1:] if argv is None else argv)])
    return args


def main(argv: list[str] | None = None, program: list[str] = PROGRAM) -> int:
    args = arguments(argv)
    versions = soak.versions() | ({"commit": args.commit} if args.commit else {})
    try:
        pairs, about = time_engines(args, program)
    except EngineFailed as error:
        print(error, file=sys.stderr)
        return FAILED
    comparisons = compare(pairs)
    code = conclude(comparisons)
    args.json.write_text(json.dumps({
        "command": args.command, "device": device(), "versions": versions, "engines": about, "exit_code": code,
        "measures": [one.numbers() for one in comparisons if one.is_enough],
        "tokens_per_step": tokens_per_step(pairs), "turns": pairs,
    }, indent=1) + "\n")  # fmt: skip
    print(*(one.verdict() for one in comparisons), "", sep="\n")
    print(f"`{args.command}`, {device()}, {', '.join(f'{name} {value}' for name, value in versions.items())}\n")
    print(*table(comparisons), "", f"all numbers are in {args.json}", sep="\n", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
