"""Folders of Python environments: made aside, complete from their stamp on, removed once nobody runs in them.

An environment is made under the name that it keeps, since its scripts hold that name. Its stamp is written last. Who
runs in it holds a shared lock on a file in it, which ends with its process. Standard library only, Python 3.8.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import sys
from pathlib import Path

STAMP = "complete.json"
IN_USE = "in-use.lock"


def new_folder(store, kind):
    """A name that no other environment has."""
    return store / "{}-py{}.{}-{}".format(kind, *sys.version_info[:2], os.urandom(4).hex())


def read_stamp(folder):
    """None where the environment is not complete."""
    try:
        return json.loads((folder / STAMP).read_text())
    except (OSError, ValueError):
        return None


def write_stamp(folder, stamp):
    """Whole or not at all: half a stamp would cost the environment."""
    (folder / IN_USE).touch()
    partial = folder / (STAMP + ".partial")
    partial.write_text(json.dumps(stamp, indent=1) + "\n")
    partial.replace(folder / STAMP)


@contextlib.contextmanager
def locked(path, waiting=None):
    """One at a time. Without `waiting`, which is called before a wait, BlockingIOError where another is at work."""
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waiting is None:
                raise
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def hold(folder):
    """A descriptor for the processes that run in the environment; None where it has just been removed.

    -1 where the folder belongs to somebody else: then nobody removes it under us.
    """
    try:
        descriptor = os.open(folder / IN_USE, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError:
        return -1 if (folder / STAMP).exists() else None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    if (folder / STAMP).exists():
        return descriptor
    os.close(descriptor)
    return None


def tidy(folders):
    """Removes half-made environments and those in which nobody runs. The caller holds the lock of those who make."""
    for folder in folders:
        with contextlib.suppress(OSError):
            remove_unused(folder)


def remove_unused(folder):
    if (folder / IN_USE).exists():
        with (folder / IN_USE).open("r+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            # First, so that who comes now, or after a kill in between, does not take it for complete.
            with contextlib.suppress(FileNotFoundError):
                (folder / STAMP).unlink()
            shutil.rmtree(folder)
        return
    with contextlib.suppress(FileNotFoundError):
        (folder / STAMP).unlink()
    shutil.rmtree(folder)


def folders(store, kind):
    return sorted(path for path in Path(store).glob(kind + "-*") if path.is_dir())
