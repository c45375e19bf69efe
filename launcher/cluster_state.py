"""What a cluster start leaves on the head: the state of the run that is up, and the record of the last one."""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from launcher import paths
from launcher.cluster_plan import Plan
from launcher.commands import REPOSITORY, Unit
from launcher.config import shortened
from launcher.errors import Exit, LauncherError
from launcher.remote import Node
from launcher.runner import read_environment
from launcher.service import TOKEN_NAME
from launcher.state import Process, this_process


@dataclass(frozen=True)
class StartedUnit:
    """One thing that runs on a node, with the commands that deal with it there. No secret is in them."""

    node: Node
    unit: Unit

    @property
    def label(self) -> str:
        return f"node {self.node.rank} ({self.node.address}): {self.unit.name}"


@dataclass(frozen=True)
class ClusterState:
    phase: str
    launcher: Process
    url: str
    since: float = field(default_factory=time.time)  # wall clock, for the uptime
    ready: bool = False
    units: tuple[StartedUnit, ...] = ()
    shells: tuple[tuple[str, ...], ...] = ()  # by rank: a shell where it runs
    list_gpus: tuple[tuple[str, ...], ...] = ()  # by rank: fails where its container has lost the GPU; may be empty
    env_file: str = ""  # of rank 0, on this machine: the token for the server's own routes is in it
    process: Process | None = None  # of a soak, which runs as a session of this machine

    @property
    def is_broken_off(self) -> bool:
        """A start, a stop or a soak whose launcher ended before it was over."""
        return not self.ready and self.launcher.is_gone

    @property
    def token(self) -> str:
        """For the server's own routes, and for all that the API key opens; empty where none is on record."""
        try:
            return read_environment(self.env_file).get(TOKEN_NAME, "")
        except (OSError, ValueError):
            return ""

    def entered(self, phase: str, *, ready: bool = False) -> ClusterState:
        return replace(self, phase=phase, ready=ready, since=time.time() if ready else self.since)

    def stopping(self) -> ClusterState:
        return replace(self.entered("stop"), launcher=this_process(), since=time.time())

    def with_unit(self, started: StartedUnit) -> ClusterState:
        return replace(self, units=(*self.units, started))


def new_state(plan: Plan) -> ClusterState:
    shells, list_gpus = (tuple(getattr(rank, name) for rank in plan.ranks) for name in ("shell", "list_gpus"))
    env_file = plan.ranks[0].env_file
    return ClusterState("containers", this_process(), plan.url, shells=shells, list_gpus=list_gpus, env_file=env_file)


def from_json(raw: Mapping) -> ClusterState:
    units = tuple(
        StartedUnit(Node(**entry["node"]), Unit(**{name: freeze(value) for name, value in entry["unit"].items()}))
        for entry in raw["units"]
    )
    by_rank = {name: freeze(raw.get(name, [])) for name in ("shells", "list_gpus")}
    found = {name: Process(**raw[name]) for name in ("launcher", "process") if raw.get(name)}
    return ClusterState(**{**raw, "units": units, **by_rank, **found})


def freeze(value):
    """Lists of JSON as the tuples that they were."""
    return tuple(map(freeze, value)) if isinstance(value, list) else value


def files_of(config) -> Files:
    folder = Path(str(config["RUN_DIR"])).expanduser()
    whole = folder if folder.is_absolute() else REPOSITORY / folder
    return Files(whole, config.topology.name, config.sources["RUN_DIR"])


class Files:
    """The folder of one topology's runs. Every file is written whole or not at all."""

    def __init__(self, folder: Path, topology: str, source: str = "RUN_DIR") -> None:
        self.folder, self.topology, self.source = folder, topology, source
        self.state_path = folder / f"{topology}.json"
        self.record_path = folder / f"{topology}-run.json"
        self.logs = folder / f"{topology}-logs"

    def write_state(self, state: ClusterState) -> ClusterState:
        self._write(self.state_path, asdict(state))
        return state

    def read_state(self) -> ClusterState | None:
        raw = self._read(self.state_path)
        try:
            return from_json(raw) if raw else None
        except (TypeError, KeyError, AttributeError) as error:
            raise LauncherError(
                f"{self.state_path}: is not the state of a run ({error}); stop what it started by hand "
                f"(`docker ps` on every node), then remove the file."
            ) from error

    def forget_state(self) -> None:
        with self.usable():
            self.state_path.unlink(missing_ok=True)

    def usable(self):
        return paths.used(f"{self.source}: RUN_DIR {shortened(str(self.folder))}")

    def write_record(self, record: Mapping) -> None:
        self._write(self.record_path, record)

    def read_record(self) -> dict | None:
        return self._read(self.record_path)

    def _write(self, path: Path, content: Mapping) -> None:
        with self.usable():
            self.folder.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(path.name + ".partial")
            partial.write_text(json.dumps(content, indent=1) + "\n")
            partial.replace(path)

    def _read(self, path: Path) -> dict | None:
        try:
            return json.loads(paths.text_of(path))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, RecursionError) as error:
            raise LauncherError(f"{path}: not readable as JSON ({error}); remove it if nothing runs.") from error

    @contextmanager
    def lock(self):
        """One command that changes the cluster at a time. Dies with its process."""
        with self.usable():
            self.folder.mkdir(parents=True, exist_ok=True)
            file = (self.folder / f"{self.topology}.lock").open("w")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                state = self.read_state()
                doing = f" (process {state.launcher.pid}, phase {state.phase})" if state else ""
                raise LauncherError(
                    f"Another start, restart, stop, sync or soak of {self.topology} is under way{doing}; wait for it, "
                    f"or press Ctrl-C where it runs.",
                    Exit.BUSY,
                ) from None
            yield
