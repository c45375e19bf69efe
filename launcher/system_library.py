"""The one system library that vLLM's CPU build needs and that no Python package brings."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Sequence

from launcher import console
from launcher.errors import Exit, LauncherError

LIBRARY, PACKAGE = "libnuma.so.1", "libnuma1"
BY_HAND = f"sudo apt-get install {PACKAGE}"


def is_there() -> bool:
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return True


def bring() -> None:
    """Installs it where root needs no password, after saying so. Raises LauncherError where it stays away."""
    if is_there():
        return
    root = way_to_root()
    if root is not None and shutil.which("apt-get"):
        console.say(f"Installing the system package {PACKAGE}, which vLLM's CPU build needs")
        for words in (["update"], ["install", "-y", "--no-install-recommends", PACKAGE]):
            run([*root, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-qq", *words])
    if not is_there():
        raise LauncherError(
            f"system: {LIBRARY}, which vLLM's CPU build needs, is not on this machine; install it, on Debian or Ubuntu "
            f"with: {BY_HAND}",
            Exit.REFUSED,
        )


def way_to_root() -> list[str] | None:
    """What a command is put behind to run as root; None where that needs a password."""
    if os.geteuid() == 0:
        return []
    sudo = ["sudo", "-n"]
    return sudo if shutil.which("sudo") and run([*sudo, "true"]) == 0 else None


def run(command: Sequence[str]) -> int:
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ).returncode  # fmt: skip
