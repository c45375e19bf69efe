"""One use of start-local.sh in a test."""

import os
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

from launcher import settings

SCRIPT = settings.REPOSITORY / "start-local.sh"
MODEL = settings.REPOSITORY / "models/local"
START_TIMEOUT_S = 600


@dataclass(frozen=True)
class Launch:
    """One use of start-local.sh: its own port and its own folder for state and logs."""

    port: int
    run_dir: Path
    flags: tuple[str, ...] = ()

    def argv(self, command: str, *flags: str) -> list[str]:
        start = ("--port", str(self.port), *self.flags) if command == "start" else ()
        return [str(SCRIPT), command, "--run-dir", str(self.run_dir), *start, *flags]

    def run(self, command: str, *flags: str, **environment: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            self.argv(command, *flags),
            capture_output=True,
            text=True,
            timeout=START_TIMEOUT_S,
            env={**os.environ, **environment},
        )

    def processes(self) -> list[str]:
        """Whatever still runs of the server: all of it works in the run folder."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and os.readlink(entry / "cwd") == str(self.run_dir):
                    found.append(f"{entry.name} {(entry / 'comm').read_text().strip()}")
            except OSError:
                continue
        return found

    def leaves_nothing(self) -> bool:
        return self.processes() == [] and not (self.run_dir / "local.json").exists()


def new_launch(run_dir: Path, caches: Path, *flags: str) -> Launch:
    """With caches that outlive it: vLLM inspects a model's class in a process of its own, once for all tests."""
    run_dir.mkdir()
    (run_dir / "cache").symlink_to(caches)
    return Launch(free_port(), run_dir, flags)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]
