"""The last net: what no part of the launcher has foreseen ends in one sentence, and in a log to report it with."""

from __future__ import annotations

import os
import platform
import re
import sys
import tempfile
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from launcher.settings import REPOSITORY

HIDDEN = "<hidden>"
# Names of variables whose value is nobody's business, in the environment and in the env files.
SECRET_NAME = re.compile(r"(?i)\w*(key|token|secret|passw(or)?d)\w*")
ASSIGNMENT = re.compile(r"(?m)^\s*(?:export\s+)?(\w+)\s*=\s*(.*?)\s*$")
# What keys and tokens made here look like.
MADE_HERE = re.compile(r"exl3-[\w-]{20,}|\b[0-9a-f]{32,}\b")
MOST_SHOWN = 200


def tell(error: BaseException, arguments: Sequence[str], ambient: Mapping[str, str], folder: Path | None) -> str:
    """Writes the log, to the folder of the run if that can be, and returns the sentence."""
    secrets = secrets_of(ambient, env_texts())
    text = hidden(report_of(error, arguments), secrets)
    what = " ".join(hidden(f"{type(error).__name__}: {error}", secrets).split())
    shown = "".join(sign if sign.isprintable() else "?" for sign in what)[:MOST_SHOWN]
    places = [place for place in (folder, Path(tempfile.gettempdir())) if place]
    path = next(filter(None, (write(place, text) for place in places)), None)
    if path is None:
        return f"The launcher broke ({shown}), its own fault, and could write no log; file an issue with this:\n{text}"
    return f"The launcher broke ({shown}), which is its own fault; file an issue with this log: {path}"


def report_of(error: BaseException, arguments: Sequence[str]) -> str:
    head = [f"launcher {' '.join(map(repr, arguments))}", f"Python {sys.version}", platform.platform()]
    return "\n".join([*head, "", *traceback.format_exception(type(error), error, error.__traceback__)])


def write(folder: Path, text: str) -> Path | None:
    """For the owner's eyes only. None where it cannot be."""
    try:
        descriptor, path = tempfile.mkstemp(prefix="launcher-fault-", suffix=".log", dir=folder)
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except (OSError, ValueError):
        return None
    return Path(path)


def env_texts() -> list[str]:
    texts = []
    for path in REPOSITORY.glob(".env*"):
        try:
            if path.is_file():
                texts.append(path.read_text(encoding="utf-8", errors="replace"))
        except OSError:
            continue
    return texts


def secrets_of(ambient: Mapping[str, str], texts: Iterable[str]) -> list[str]:
    """Longest first, so that none is left in part."""
    pairs = [*ambient.items(), *(pair for text in texts for pair in ASSIGNMENT.findall(text))]
    values = {value.strip("'\"") for name, value in pairs if SECRET_NAME.fullmatch(name)}
    return sorted((value for value in values if len(value) >= 4), key=len, reverse=True)


def hidden(text: str, secrets: Iterable[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return MADE_HERE.sub(HIDDEN, text)
