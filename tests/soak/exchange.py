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


def ask(work: Path, name: str, kv: str, is_plain: bool, answers: list[Answer]) -> dict:
    """The verdict on what an arm answered. Raises RuntimeError with the judge's words where it can give none."""
    number = len(list(work.glob(f"{name}.*.answers.json")))
    question = {"name": name, "kv": kv, "plain": is_plain, "answers": [asdict(answer) for answer in answers]}
    write(work / f"{name}.{number}.answers.json", question)
    reply = work / f"{name}.{number}.verdict.json"
    while not reply.is_file():
        if (work / DONE).exists():
            raise RuntimeError(f"{name}: the soak ended before the judge answered.")
        time.sleep(POLL_S)
    said = json.loads(reply.read_text())
    if "error" in said:
        raise RuntimeError(f"{name}: {said['error']}")
    return said


def serve(work: Path, kv: str, score: Callable[[list[Answer]], list[Scored]], floor: float | None = None) -> None:
    """Answer what arms with this KV cache ask until the runner is done; the plain arm's answers give the floor."""
    seen: set[Path] = set()
    held: list[tuple[Path, list[Scored]]] = []  # scored before there was a floor
    wrong = None
    while not (work / DONE).exists():
        for path in sorted(set(work.glob("*.answers.json")) - seen):
            seen.add(path)
            question = json.loads(path.read_text())
            if question["kv"] != kv:
                continue
            scored = score([Answer(**answer) for answer in question["answers"]])
            if question["plain"] and floor is None:
                try:
                    floor = judge.floor(scored)
                except ValueError as error:
                    wrong = str(error)
            held.append((path, scored))
        if floor is not None or wrong:
            for path, scored in held:
                said = {"error": wrong} if wrong else judge.verdict(scored, judge.TIMES_THE_FLOOR * floor)
                write(path.with_name(path.name.replace(".answers.", ".verdict.")), said)
            held.clear()
        time.sleep(POLL_S)
