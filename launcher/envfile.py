"""Changes of the user's env file: a value set in place, and the import of an older recipe's file."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

from launcher import paths
from launcher.errors import Exit, LauncherError
from launcher.importing import import_text
from launcher.topology import Topology


def write_private(path: Path, text: str) -> None:
    """Whole or not at all, readable by its owner alone."""
    try:
        descriptor, partial = tempfile.mkstemp(prefix=path.name, dir=path.parent)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(partial, path)  # mkstemp makes files with mode 0600
        except BaseException:
            os.unlink(partial)
            raise
    except OSError as error:
        raise LauncherError(
            f"{path.name}: could not be written in {path.parent} ({error.strerror}), and is as it was; see that you "
            f"may write there and that the disk is not full.",
            Exit.USAGE,
        ) from error


def set_value(path: Path, name: str, value: str) -> None:
    """Replaces the setting's last active line, or adds one; every other line stays as it is."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    active = [i for i, line in enumerate(lines) if re.match(rf"\s*(export\s+)?{re.escape(name)}\s*=", line)]
    if active:
        lines[active[-1]] = f"{name}={value}\n"
    else:
        lines += ["" if not lines or lines[-1].endswith("\n") else "\n", f"{name}={value}\n"]
    write_private(path, "".join(lines))


def import_old(topology: Topology, old: Path, ours: Path) -> Exit:
    """Prints what becomes of each setting of the old file, and writes ours. Never over a file of the user's."""
    try:
        text = paths.text_of(old)
    except (OSError, UnicodeDecodeError) as error:
        raise LauncherError(
            f"{old}: not readable as text ({error}); name the old recipe's env file.", Exit.USAGE
        ) from error
    if os.path.lexists(ours):
        raise LauncherError(f"{ours.name}: is there already and would be lost; move it away first.", Exit.USAGE)
    result = import_text(topology, text, str(old))
    print("\n".join(result.report))
    write_private(ours, result.text)
    print(f"\nWritten: {ours.name}")
    return Exit.OK
