"""A machine beside the test's Hub: its home, folders and cache, and ./download.sh as a user would call it."""

import contextlib
import dataclasses
import io
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import small_packs
from hub_server import HubServer
from huggingface_hub import constants

from launcher import __main__
from launcher.errors import Exit
from launcher.settings import REPOSITORY
from launcher.weights import command, hub, packs

RUNNER = Path(__file__).with_name("run_weights.py")


@dataclass(frozen=True)
class Done:
    code: int
    said: str  # on both streams


class Machine:
    """`SPEC_METHOD=none` unless a test wants the draft too."""

    def __init__(self, root: Path, monkeypatch):
        self.root, self.monkeypatch = root, monkeypatch
        self.hub = HubServer()
        self.home = root / "home"
        self.home.mkdir()
        self.model, self.draft, self.cache = root / "model", root / "draft", root / "cache"
        self.settings = {"MODEL_DIR": str(self.model), "DRAFT_DIR": str(self.draft), "SPEC_METHOD": "none"}
        monkeypatch.setattr(hub, "FIRST_WAIT_S", 0.01)
        monkeypatch.setattr(command, "REPOSITORY", self.home)
        monkeypatch.setattr(constants, "ENDPOINT", self.hub.url)
        template = f"{self.hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(self.cache))

    def publish(self, shards: int, filler: int = 0) -> dict[str, bytes]:
        """Puts packs onto the Hub; the files of the first two."""
        self.table = small_packs.packs(shards)
        self.monkeypatch.setattr(packs, "PACKS", self.table)
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

    def start(self, *words: object, prefix: tuple[str, ...] = (), **settings: str) -> subprocess.Popen:
        """As a process of its own, to be watched or killed."""
        table = self.root / "packs.json"
        table.write_text(json.dumps([dataclasses.asdict(pack) for pack in self.table]))
        environment = {
            "PATH": os.environ["PATH"], "HOME": str(self.home), "PYTHONPATH": str(REPOSITORY),
            "HF_ENDPOINT": self.hub.url, "HF_HUB_CACHE": str(self.cache), **self.settings, **settings,
        }  # fmt: skip
        return subprocess.Popen([*prefix, sys.executable, RUNNER, table, *map(str, words)], env=environment,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # fmt: skip

    def must(self, *words: object, **settings: str) -> str:
        done = self.call(*words, **settings)
        assert done.code == Exit.OK, done.said
        return done.said
