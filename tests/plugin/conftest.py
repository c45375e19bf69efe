"""Starts to compile the kernels as soon as it is known that a test wants them.

That takes minutes of processor time, and the tests that run before mostly wait; at the lowest priority it costs
them nothing.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

OVERLAY = Path(__file__).parents[2] / "overlay"
BUILD = pytest.StashKey[subprocess.Popen]()


def pytest_collection_finish(session) -> None:
    if session.config.option.collectonly or not any(item.get_closest_marker("nvcc") for item in session.items):
        return
    command = ["nice", "-n", "19", sys.executable, OVERLAY / "build_kernels.py", "--out", OVERLAY / "build/test"]
    session.config.stash[BUILD] = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )  # fmt: skip


def pytest_unconfigure(config) -> None:
    build = config.stash.get(BUILD, None)
    if build and build.poll() is None:
        os.killpg(build.pid, signal.SIGTERM)


@pytest.fixture(scope="session")
def compiled_early(request) -> None:
    """Waits for the compiler. Whether it succeeded shows when the library is built from what it left."""
    if build := request.config.stash.get(BUILD, None):
        build.wait()
