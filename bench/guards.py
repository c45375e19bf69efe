"""What the plugin's guards cost: one engine, in which they are switched off and on again all the time.

    PYTHONPATH=overlay:. python3 bench/guards.py                  # as the product starts it: CUDA graphs, no drafts
    PYTHONPATH=overlay:. python3 bench/guards.py --mode eager
    PYTHONPATH=overlay:. python3 bench/guards.py --drafts dflash7

The ways "on", "off" and "again", which is "on" once more and shows how much two equal ways differ, alternate at each
step that decodes and at each prompt, in all orders. Only the guards differ: each way has CUDA graphs of its own, while
weights, caches and what decodes are the same. Not switched are block-sizes, which works at the start only, and
decode-rows, which changes nothing on SM90 and SM12x with the drafts to choose from. It needs what the engine proof
needs (tests/gpu/engine/README.md). Prints progress, a verdict for each measure and a table for RESULTS.md, and writes
JSON. Ends with 0 if every bar holds, 1 if one is missed, 2 for wrong usage, 3 if the engine failed, time was too short,
or two equal ways differ by more than a bar.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path += [str(HERE), *(str(ROOT / folder) for folder in ("tests/soak", "tests/gpu/engine", "overlay", "."))]

import arms
import run as soak
from guard_switch import WAYS
from guards_engine import MEASURES, Sizes
from paired import Comparison, table
from prove import Proof
from report_file import report_file

MISSED, USAGE, FAILED = 1, 2, 3
DRAFTS = ("none", "dflash7")  # with others decode-rows would work, which cannot be switched
PROGRAM = [sys.executable, "-u", str(HERE / "guards_engine.py")]
PROGRESS_S = 15
END_S = 5  # of --seconds, for the report
LAST_LINES = 40  # of the log, where the engine failed: a traceback


class EngineFailed(RuntimeError):
    """One sentence, and the end of the engine's log."""


class Engine:
    """A process that works when it is told to; see guards_engine.py."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        self.log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True, cwd=ROOT,
                env=environment,
            )  # fmt: skip

    def read(self) -> dict:
        line = self.process.stdout.readline()
        if not line.endswith("\n"):  # nothing, or what was written when it was killed
            raise EngineFailed(f"the engine ended with {self.process.wait()}; {self.log} ends with:\n  "
                               + "\n  ".join(self.last_lines(LAST_LINES)))  # fmt: skip
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


def wait_until_up(engine: Engine, say: Callable[[str], None]) -> dict:
    """What the engine says of itself. Raises EngineFailed."""
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(engine.read)
        try:
            while not wait([waiting], PROGRESS_S).done:
                say(f"waiting for the engine: {engine.last_line()}")
        except BaseException:
            engine.kill()  # ends the thread, too
            raise
    say(f"the engine is up: {waiting.result()}")
    return waiting.result()


def take_turns(
    engine: Engine, pairs: list[dict], rounds: int, seconds_left: Callable[[], float], say: Callable[[str], None]
) -> None:
    """Append to `pairs` one dict for each group of a measure, {"measure", way: {"tokens", "seconds", "steps"}}, until
    the rounds are done or no other turn fits into the time."""
    longest = 0.0
    for round in range(rounds):
        for measure in MEASURES:
            before = seconds_left()
            if before < longest:
                return
            pairs += [{"measure": measure} | group for group in engine.play(measure=measure, round=round)]
            longest = max(longest, before - seconds_left())
        if is_power_of_two(round + 1):
            say(f"round {round + 1}: " + "; ".join(one.brief() for one in compare(pairs)))


def is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


# Telling


def compare(pairs: list[dict]) -> list[Comparison]:
    return [
        Comparison(name, measure.bar, *(rates(pairs, name, way) for way in WAYS)) for name, measure in MEASURES.items()
    ]


def rates(pairs: list[dict], measure: str, way: str) -> list[float]:
    """In tokens/s. A step counts as many tokens as one does on average, for all ways alike: how many drafts happen to
    be accepted in it is nothing that guards cost."""
    groups = [pair for pair in pairs if pair["measure"] == measure]
    timed = [group[one] for group in groups for one in WAYS]
    each = sum(one["tokens"] for one in timed) / max(1, sum(one["steps"] for one in timed))
    if MEASURES[measure].reads:
        return [group[way]["tokens"] / group[way]["seconds"] for group in groups]
    return [each * group[way]["steps"] / group[way]["seconds"] for group in groups]


def tokens_per_step(pairs: list[dict]) -> dict[str, dict[str, float]]:
    """By measure and way. Where ways differ, they accept drafts differently."""

    def of(measure: str, way: str) -> float:
        timed = [pair[way] for pair in pairs if pair["measure"] == measure]
        return sum(one["tokens"] for one in timed) / max(1, sum(one["steps"] for one in timed))

    return {measure: {way: of(measure, way) for way in WAYS} for measure in MEASURES}


def conclude(comparisons: list[Comparison]) -> int:
    words = {one.word for one in comparisons}
    return FAILED if "NONE" in words else MISSED if "FAIL" in words else 0


def device() -> str:
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError):
        return "the CPU"


# The command


def start_engine(args: argparse.Namespace, program: list[str]) -> Engine:
    arm = arms.Arm("cache", args.drafts, "sync", args.mode, "triton", "auto")
    sizes = Sizes(args.prompt_tokens)
    order = {"arm": arm.name, "models": str(make_models(args, sizes.longest)), "pool_mib": args.pool_mib,
             "platform": asdict(args.platform), "sizes": asdict(sizes), "planted_us": args.planted}  # fmt: skip
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    environment = Proof(args.work, args.draft_models, 0).environment() | {"CUDA_VISIBLE_DEVICES": gpu}
    return Engine([*program, json.dumps(order)], environment, args.work / "engine.log")


def make_models(args: argparse.Namespace, longest: int) -> Path:
    """The folder with the local model for contexts of `longest` tokens, and with drafts where they are asked for."""
    models = args.work / "models"
    if args.drafts == "nodrafts":
        soak.long_copy(models / "local", ROOT / "models" / "local", longest)
    else:
        soak.make_models(models, longest, args.draft_models)
    return models


def time_engine(args: argparse.Namespace, program: list[str]) -> tuple[list[dict], dict]:
    """(the pairs of take_turns, what the engine says of itself). Raises EngineFailed."""
    begin, pairs, about = time.monotonic(), [], {}

    def say(line: str) -> None:
        print(f"{time.monotonic() - begin:6.1f} s  {line}", flush=True)

    def left() -> float:
        return args.seconds - (time.monotonic() - begin)

    engine = start_engine(args, program)
    say(f"started; the engine's log is {engine.log}")
    timer = threading.Timer(args.seconds, engine.kill)
    timer.start()
    try:
        about = wait_until_up(engine, say)
        take_turns(engine, pairs, args.rounds, lambda: left() - END_S, say)
    except EngineFailed as error:
        if left() > 0:
            raise
        if not pairs:
            raise EngineFailed(f"the time is over (--seconds {args.seconds:g}); {error}") from error
        say("the time is over within a turn; what was timed before it counts")
    finally:
        timer.cancel()
        engine.kill()
        engine.process.wait()
    return pairs, about


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=arms.AXES["mode"], default="graphs")
    parser.add_argument("--drafts", choices=DRAFTS, default="none")
    parser.add_argument("--seconds", type=float, default=240, help="for all of it, the engine's start included")
    parser.add_argument("--rounds", type=int, default=1000, help="ends after so many, too")
    parser.add_argument("--prompt-tokens", type=int, default=Sizes.prompt, help="of each timed prompt")
    parser.add_argument("--pool-mib", type=int, default=2048, help="the engine's cache")
    parser.add_argument("--planted", type=float, default=0, metavar="US", help="microseconds to add to guarded steps")
    parser.add_argument("--work", type=Path, default=Path("/tmp/guards-bench"), help="models and the log")
    parser.add_argument("--draft-models", type=Path, default=ROOT / "models" / "local-drafts")
    parser.add_argument("--commit", help="where git is not there to say it")
    parser.add_argument("--json", type=report_file, default="guards.json", help="all numbers")
    args = parser.parse_args(argv)
    args.drafts = args.drafts.replace("none", "nodrafts")
    if args.drafts != "nodrafts" and not args.draft_models.is_dir():
        parser.error(f"--draft-models {args.draft_models}: no such folder; models/local-drafts is what ships.")
    if off := os.environ.get("EXL3_GUARDS_OFF", "").strip(" ,"):
        parser.error(f"EXL3_GUARDS_OFF is {off}: the engine must start with all guards to switch them; unset it.")
    try:
        args.platform = soak.gpu_platform()
    except ValueError as error:
        parser.error(str(error))
    args.work.mkdir(parents=True, exist_ok=True)
    args.command = shlex.join(["python3", "bench/guards.py", *(sys.argv[1:] if argv is None else argv)])
    return args


def main(argv: list[str] | None = None, program: list[str] = PROGRAM) -> int:
    args = arguments(argv)
    versions = soak.versions() | ({"commit": args.commit} if args.commit else {})
    try:
        pairs, about = time_engine(args, program)
    except EngineFailed as error:
        print(error, file=sys.stderr)
        return FAILED
    comparisons = compare(pairs)
    code = conclude(comparisons)
    args.json.write_text(json.dumps({
        "command": args.command, "device": device(), "versions": versions, "engine": about, "exit_code": code,
        "measures": [one.numbers() for one in comparisons if one.is_enough],
        "tokens_per_step": tokens_per_step(pairs),
    }, indent=1) + "\n")  # fmt: skip
    print(*(one.verdict() for one in comparisons), "", sep="\n")
    print(f"`{args.command}`, {device()}, {', '.join(f'{name} {value}' for name, value in versions.items())}\n")
    print(*table(comparisons), "", f"all numbers are in {args.json}", sep="\n", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
