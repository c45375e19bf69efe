"""How arms get a judge's verdict from another process: files in one folder, whole as soon as they have their name."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import judge
from judge import Answer, Scored

POLL_S = 0.2
DONE = "done"  # the runner writes it when no arm is left


def write(path: Path, data: object) -> None:
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(data))
    os.replace(temporary, path)


def ask(work: Path, name: str, kv: str, is_plain: bool, answers: list[Answer], states: str | None = None,
        number: int = 0) -> dict:  # fmt: skip
    """The verdict of judge `number` on what an arm answered, and under "states" on the probes in the file so named.

    Raises RuntimeError with the judge's words where it can give none.
    """
    asked = len(list(work.glob(f"{name}.*.answers.json")))
    question = {"name": name, "kv": kv, "plain": is_plain, "answers": [asdict(answer) for answer in answers],
                "states": states, "judge": number}  # fmt: skip
    write(work / f"{name}.{asked}.answers.json", question)
    reply = work / f"{name}.{asked}.verdict.json"
    while not reply.is_file():
        if (work / DONE).exists():
            raise RuntimeError(f"{name}: the soak ended before the judge answered.")
        time.sleep(POLL_S)
    said = json.loads(reply.read_text())
    if "error" in said:
        raise RuntimeError(f"{name}: {said['error']}")
    return said


def serve(work: Path, kv: str, score: Callable[[list[Answer]], list[Scored]], floor: float | None = None,
          bench=None, number: int = 0) -> None:  # fmt: skip
    """Answer what arms with this KV cache ask judge `number` until the runner is done.

    Every judge reads the plain arm's answers, which give the floor; they may well come last.

    `bench`: a `state_judge.Bench`, where arms send probes of their states too.
    """
    seen: set[Path] = set()
    held: list[tuple] = []  # (question, scores, measured states or None) from before there was a floor
    wrong = None
    while not (work / DONE).exists():
        for path in sorted(set(work.glob("*.answers.json")) - seen):
            seen.add(path)
            question = json.loads(path.read_text())
            mine = question["judge"] == number
            if question["kv"] != kv or not (mine or question["plain"]):
                continue
            scored = score([Answer(**answer) for answer in question["answers"]])
            measured = bench.measure(work / question["states"]) if bench and question["states"] else None
            if question["plain"] and measured is not None and bench.limits is None:
                bench.take_floor(measured)
            if question["plain"] and floor is None:
                try:
                    floor = judge.floor(scored)
                except ValueError as error:
                    wrong = str(error)
            if mine:
                held.append((path, scored, measured))
        if floor is not None or wrong:
            for path, scored, measured in held:
                said = {"error": wrong} if wrong else judge.verdict(scored, judge.TIMES_THE_FLOOR * floor)
                if measured is not None:
                    said["states"] = bench.verdict(measured)
                write(path.with_name(path.name.replace(".answers.", ".verdict.")), said)
            held.clear()
        time.sleep(POLL_S)
