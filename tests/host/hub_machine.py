"""A machine beside the test's Hub: its home, folders and cache, and ./download.sh as a user would call it."""

import contextlib
import dataclasses
import io
import itertools
import multiprocessing
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import small_packs
from hub_server import HubServer
from huggingface_hub import constants

from launcher import __main__
from launcher.errors import Exit
from launcher.table import ROWS
from launcher.weights import command, packs, patience
from launcher.weights.packs import Pack

# Processes that begin with everything imported, so that many can be killed in little time.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["hub_machine"])


@dataclass(frozen=True)
class Done:
    code: int
    said: str  # on both streams


def point_at(patch: pytest.MonkeyPatch, table: tuple[Pack, ...], url: str, home: Path, cache: Path) -> None:
    """This process's launcher and huggingface_hub: at the test's Hub and cache, with the test's packs."""
    patch.setattr(packs, "PACKS", table)
    names = tuple(pack.id for pack in table if pack.kind == "model")
    patch.setitem(ROWS, "WEIGHTS_SOURCE", dataclasses.replace(ROWS["WEIGHTS_SOURCE"], choices=names))
    patch.setattr(patience, "FIRST_WAIT_S", 0.01)
    patch.setattr(patience, "GATE", patience.Gate())
    patch.setattr(command, "REPOSITORY", home)  # no env file of a developer's checkout takes part
    patch.setattr(constants, "ENDPOINT", url)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}")
    patch.setattr(constants, "HF_HUB_CACHE", str(cache))
    patch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    patch.setattr(constants, "HF_HUB_OFFLINE", False)  # other tests' vLLM is kept off the Hub by the environment


class Machine:
    """`SPEC_METHOD=none` unless a test wants the draft too."""

    def __init__(self, root: Path, monkeypatch):
        self.root, self.monkeypatch = root, monkeypatch
        self.hub = HubServer()
        self.home = root / "home"
        self.home.mkdir()
        self.model, self.draft, self.cache = root / "model", root / "draft", root / "cache"
        self.settings = {"MODEL_DIR": str(self.model), "DRAFT_DIR": str(self.draft), "SPEC_METHOD": "none",
                         "RUN_DIR": str(root / "run")}  # fmt: skip
        self.table: tuple[Pack, ...] = ()
        self.numbers = itertools.count()

    def publish(self, shards: int, filler: int = 0) -> dict[str, bytes]:
        """Puts packs onto the Hub; the files of the first two."""
        self.table = small_packs.packs(shards)
        point_at(self.monkeypatch, self.table, self.hub.url, self.home, self.cache)
        files = small_packs.model_files(shards, filler)
        small_packs.publish(self.hub, self.table, files)
        return files

    def call(self, *words: object, **settings: str) -> Done:
        """In this process."""
        output = io.StringIO()
        values = self.settings | settings
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            with self.monkeypatch.context() as patch:
                for name, value in values.items():
                    patch.setenv(name, value)
                code = __main__.main(["cluster", "download.sh", "weights", *map(str, words)])
        return Done(code, output.getvalue())

    def start(self, *words: object, before: Callable[[], None] | None = None, **settings: str) -> "Running":
        """As a process of its own, to be watched or killed. `before` is called in it first."""
        log = self.root / f"process-{next(self.numbers)}.log"
        arguments = (log, self.table, self.hub.url, self.home, self.cache, self.settings | settings, words, before)
        process = PROCESSES.Process(target=run, args=arguments)
        process.start()
        return Running(process, log)

    def must(self, *words: object, **settings: str) -> str:
        done = self.call(*words, **settings)
        assert done.code == Exit.OK, done.said
        return done.said


def run(log, table, url, home, cache, settings, words, before):
    """A process from its beginning to its end."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT, 0o666)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    if before:
        before()
    os.environ.update(settings)
    patch = pytest.MonkeyPatch()
    point_at(patch, table, url, home, cache)
    sys.exit(__main__.main(["cluster", "download.sh", "weights", *map(str, words)]))


@dataclass(frozen=True)
class Running:
    process: BaseProcess
    log: Path

    @property
    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def kill(self) -> None:
        """As the kernel does, without a word."""
        self.process.kill()
        self.process.join(20)

    def wait(self) -> Done:
        self.process.join(60)
        return Done(self.process.exitcode, self.said)
