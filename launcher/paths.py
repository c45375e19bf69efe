"""What can be told of a path on this machine before it is used, and files that are read only if they are plain ones."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from launcher.errors import Exit, LauncherError

# File systems of the kernel's own, in which nobody makes folders.
KERNELS_OWN = ("/proc", "/sys")
LONGEST_TEXT_BYTES = 1 << 20


def why_no_folder(path: Path) -> str:
    """Why no folder can be there that this user writes to; empty if one can, or is. Makes nothing."""
    above = str(path)
    while not os.path.lexists(above) and above != os.path.dirname(above):
        above = os.path.dirname(above)
    real = os.path.realpath(above)
    if any(real == own or real.startswith(f"{own}/") for own in KERNELS_OWN):
        return f"{real} belongs to the kernel"
    if not os.path.isdir(above):
        return f"{above} is there and is no folder"
    if not os.access(above, os.W_OK | os.X_OK):
        return f"{above} cannot be written by this user"
    return ""


@contextmanager
def used(folder: str) -> Iterator[None]:
    """Around what reads and writes in a folder that a setting names: an error of it or of its disk in words."""
    try:
        yield
    except OSError as error:
        raise LauncherError(
            f"{folder} cannot be used ({error.strerror}); name a folder of your own, and see that its disk is not full "
            f"and not read-only.",
            Exit.SETUP,
        ) from error


def text_of(path: Path, longest: int = LONGEST_TEXT_BYTES) -> str:
    """UTF-8 text of a plain file. Raises OSError or UnicodeDecodeError; never waits for a writer."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        kind = "folder" if stat.S_ISDIR(mode) else "pipe, a socket or a device"
        raise OSError(errno.EINVAL, f"it is a {kind} and no plain file")
    with open(path, "rb") as file:
        content = file.read(longest + 1)
    if len(content) > longest:
        raise OSError(errno.EFBIG, f"it is larger than {longest} bytes")
    return content.decode("utf-8")
