"""Another node while weights are put there: the small program on it, rsync to it, and the hashes that it finds."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launcher import framing, probe, remote
from launcher.errors import Exit, LauncherError
from launcher.remote import Node
from launcher.weights import hashing, record
from launcher.weights.record import FileEntry, FileStat, Manifest, Verified

WORKER = Path(__file__).with_name("worker.py")
HASHING = Path(hashing.__file__)
GIB = 1 << 30
LEAVE_S = 5
# bytes, per cent, rate, time; what the other side complains about can follow on the same line
PROGRESS = re.compile(rb"\s*(\d+)\s+\d+%\s+\S+\s+[\d:?]+\s*(?:\(xfr[^)]*\))?\s*")


def label(node: Node) -> str:
    return f"node {node.rank} ({node.address})"


def spoken(size_bytes: float) -> str:
    return f"{size_bytes / GIB:.1f} GiB" if size_bytes >= GIB / 10 else f"{size_bytes / (1 << 20):.1f} MiB"


def spoken_time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


@dataclass
class Step:
    """What happens on one node, for the line of progress."""

    doing: str = "looking"
    done: int = 0
    total: int = 0
    began: float = field(default_factory=time.monotonic)

    def enter(self, doing: str, total: int = 0) -> None:
        self.doing, self.done, self.total, self.began = doing, 0, total, time.monotonic()

    def __str__(self) -> str:
        if not self.total:
            return self.doing
        rate = self.done / max(time.monotonic() - self.began, 0.001)
        left = f", {spoken_time((self.total - self.done) / rate)} left" if rate else ""
        return f"{self.doing} {spoken(self.done)} of {spoken(self.total)}, {spoken(rate)}/s{left}"


@dataclass(frozen=True)
class Seen:
    """A folder on a node, as worker.py has looked at it."""

    folder: str
    record: Verified | None  # what it says is verified
    old: Verified | None  # the same, or what a sync that was broken off has begun to replace
    stats: Mapping[str, FileStat | None]  # of each file that was asked for
    folders: tuple[str, ...]  # names that should be files
    others: tuple[str, ...]
    missing_programs: tuple[str, ...]
    mount: tuple[str, str]  # kind and source of the file system

    def still_good(self, manifest: Manifest) -> dict[str, FileStat]:
        """Files of the manifest that were verified there and look as they did then."""
        known = self.old.manifest.by_name() if self.old else {}
        return {
            name: self.old.stats[name]
            for name, entry in manifest.by_name().items()
            if known.get(name) == entry and self.stats[name] == self.old.stats[name]
        }

    def of_right_size(self, entries: Sequence[FileEntry]) -> list[str]:
        return [one.name for one in entries if self.stats[one.name] and self.stats[one.name].bytes == one.bytes]


def seen_of(reply: Mapping) -> Seen:
    return Seen(
        folder=reply["folder"],
        record=read_record(reply["record"]),
        old=read_record(reply["record"]) or read_record(reply["before"]),
        stats={name: stat and FileStat(*stat) for name, stat in reply["stats"].items()},
        folders=tuple(reply["folders"]),
        others=tuple(name for name in reply["others"] if name not in probe.USERS_OWN),
        missing_programs=tuple(name for name, path in reply["programs"].items() if not path),
        mount=tuple(reply["mount"]),
    )


def read_record(text: str | None) -> Verified | None:
    """A record that cannot be read says nothing; it is written anew."""
    try:
        return Verified.from_json(json.loads(text)) if text else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


class Agent:
    """worker.py on a node, for as long as the block lasts. Its lock there ends with it."""

    def __init__(self, node: Node, folder: str) -> None:
        self.node = node
        self.talk = remote.Talk(node, ["python3", "-c", WORKER.read_text()], stdin=subprocess.PIPE)
        self.process, self.lines, self.asked = self.talk.process, self.talk.lines(), 0
        self.send({"folder": folder, "record": record.NAME})

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *_) -> None:
        """It ends with its input, and clears up after itself first."""
        try:
            self.process.communicate(timeout=LEAVE_S)
        except (OSError, ValueError, subprocess.TimeoutExpired):
            remote.kill(self.process)

    def send(self, request: Mapping) -> None:
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        except OSError:
            raise self.lost() from None

    def ask(self, what: str, **fields) -> dict:
        self.asked += 1
        self.send({"do": what, "number": self.asked, **fields})
        for reply in map(framing.object_in, self.lines):
            if reply and reply.get("number") == self.asked:  # else somebody else's line
                if "refused" in reply:
                    raise LauncherError(f"{label(self.node)}: {reply['refused']}.", Exit.SETUP)
                return reply
        raise self.lost()

    @property
    def noise(self) -> str:
        """What the node's login shell said of its own, in few words."""
        return framing.shown(self.talk.answer.noise)

    def look(self, names: Sequence[str]) -> Seen:
        return seen_of(self.ask("look", names=list(names)))

    def lost(self) -> LauncherError:
        said = self.talk.result().message
        return LauncherError(
            f"{label(self.node)}: the connection ended ({said}); see that `ssh {self.node.login} python3 --version` "
            f"answers, then run this again: what has arrived is kept.",
            Exit.SETUP,
        )


def start_here(argv: Sequence[str]) -> subprocess.Popen:
    return subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )


def rsync(node: Node, source: Path, folder: str, work: str) -> list[str]:
    """Reads names, each ended by a NUL, from its input. All are sent, whatever size and time say, as differences to
    what is there. The receiver holds the folder's lock, and whoever is killed here takes his rsync along.

    The folder of what was broken off is named from the target's: Debian's and Ubuntu's rsync 3.2.7, since its security
    fixes, opens nothing under another name, and then takes for damaged what it goes on with.
    """
    return [
        "setpriv", "--pdeathsig", "KILL", "--",
        "rsync", "--files-from=-", "--from0", "--copy-links", "--times", "--chmod=D755,F644", "--perms",
        "--ignore-times", f"--temp-dir={work}", f"--partial-dir={os.path.relpath(work, folder)}/partial",
        "--info=progress2", "--no-human-readable", "--outbuf=N",
        "-s",  # no shell reads the paths; its long name is another one in older versions
        f"--rsync-path={remote.quoted(['flock', '--shared', f'{work}/lock', 'rsync']).decode()}",
        *remote.rsync_transport(node), f"{source}/", remote.rsync_target(node, f"{folder}/"),
    ]  # fmt: skip


def pieces(stream) -> Iterator[bytes]:
    """Lines that end with a carriage return or a line feed."""
    rest = b""
    while block := os.read(stream.fileno(), 65536):
        *lines, rest = re.split(rb"[\r\n]", rest + block)
        yield from lines
    yield rest


