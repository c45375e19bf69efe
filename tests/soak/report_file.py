"""A report's place, asked before a run of minutes and not after it."""

from __future__ import annotations

import argparse
import os
from pathlib import Path


def report_file(text: str) -> Path:
    """For argparse's `type`: a file that can be written, or ArgumentTypeError, which says why not."""
    path = Path(text)
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written; name a file in a folder that is there and yours.")
    return path
