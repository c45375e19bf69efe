"""Puts what the soak shares with other tests on the path."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
for folder in (ROOT / "tests" / "plugin", ROOT / "tests" / "gpu" / "engine", ROOT):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
