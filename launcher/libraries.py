"""What libraries say goes to a log. The screen has the launcher's own sentences, and the name of that log."""

from __future__ import annotations

import logging
import os
import re
from logging.handlers import MemoryHandler, RotatingFileHandler
from pathlib import Path

NAME = "libraries.log"
LARGEST_BYTES = 1_000_000
# For the process: both are read when the library is loaded.
SILENT = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"}


class LibraryLog(RotatingFileHandler):
    """Begins with the first message."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, maxBytes=LARGEST_BYTES, backupCount=1, encoding="utf-8", delay=True)
        self.setFormatter(WithoutQueries("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self.path = path

    def _open(self):
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return super()._open()


REPLACED = (logging.StreamHandler, MemoryHandler, LibraryLog)


class WithoutQueries(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return without_queries(super().format(record))


def without_queries(text: str) -> str:
    """Addresses lose what storage services put their signatures into."""
    return re.sub(r"\?\S+", "?...", text)


def hold_back() -> None:
    """Before anything is imported that may speak at once: what it says is kept for the log, which a setting places."""
    os.environ.update(SILENT)
    logging.captureWarnings(True)
    logging.getLogger().addHandler(MemoryHandler(capacity=0))


def log_to(folder: Path) -> None:
    """From here on no logger and no warning of a library writes to the screen. A log that cannot be written is done
    without: what matters to the user is said by the launcher itself."""
    logging.raiseExceptions = False
    logging.captureWarnings(True)
    root = logging.getLogger()
    log, kept = LibraryLog(folder / NAME), []
    known = [one for one in root.manager.loggerDict.values() if isinstance(one, logging.Logger)]
    for logger in (root, *known):
        for handler in [one for one in logger.handlers if type(one) in REPLACED]:
            logger.removeHandler(handler)
            kept += getattr(handler, "buffer", ())
            handler.close()
    root.addHandler(log)
    for record in kept:
        log.handle(record)
