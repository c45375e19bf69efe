"""Puts the weights of the first node on every other one, and has each prove by its own hashes what it got."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from launcher import console, framing, probe, remote
from launcher.errors import Exit, LauncherError
from launcher.remote import Node
from launcher.weights import hashing, record
from launcher.weights.agent import (
    HASHING,
    PROGRESS,
    Agent,
    Seen,
    Step,
    label,
    pieces,
    rsync,
    spoken,
    start_here,
)
from launcher.weights.record import FileEntry, FileStat, Manifest, Verified

TICK_S = 0.25
LET_GO_S = 1
PROGRAMS = ("rsync", "setpriv")
CONFIG = "config.json"  # what tells one checkpoint from another
SMALL_BYTES = probe.SMALL_BYTES  # hashed whenever it is looked at, so it needs no record


@dataclass(frozen=True)
class Source:
    """A folder on this machine, and what it was verified to hold."""

    setting: str  # MODEL_DIR or DRAFT_DIR
    folder: Path
    manifest: Manifest


@dataclass(frozen=True)
class Outcome:
    node: Node
    source: Source
    word: str  # what became of it, as a sentence
    notes: tuple[str, ...] = ()


# What is to be copied


def folders_of(config) -> dict[str, Path]:
    """Setting -> folder on this machine of each checkpoint that the ranks read."""
    names = ["MODEL_DIR", *(["DRAFT_DIR"] if config["SPEC_METHOD"] == "dflash" else [])]
    return {name: Path(str(config[name])).expanduser() for name in names}


def source_of(setting: str, folder: Path) -> Source:
    """Raises LauncherError unless every byte of the folder is known to be right."""
    verified = record.read(folder) if os.path.isdir(folder) else None
    if verified is None:
        return Source(setting, folder, manifest_of_small(setting, folder))
    changed = record.changed(folder, verified)
    if changed:
        raise LauncherError(
            f"{setting} {folder}: {len(changed)} of {len(verified.stats)} files are not as they were when they were "
            f"verified, first {changed[0]} ({looks_of(folder / changed[0])}); `./download.sh verify` checks them and "
            f"`./download.sh` gets bad ones again."
        )
    return Source(setting, folder, verified.manifest)


def looks_of(path: Path) -> str:
    """What is wrong with a file, for people."""
    try:
        return f"{path.stat().st_size} bytes, written {time.strftime('%F %T', time.localtime(path.stat().st_mtime))}"
    except FileNotFoundError:
        return f"a link to {os.readlink(path)}, which is not there" if path.is_symlink() else "missing"
    except OSError as error:
        return str(error.strerror)


def manifest_of_small(setting: str, folder: Path) -> Manifest:
    """Of a checkpoint that nobody verified and that is small enough to be hashed in passing."""
    if not os.path.isdir(folder):
        raise LauncherError(f"{setting} {folder}: there is no such folder; `./download.sh` fills it.")
    paths = sorted(path for path in folder.iterdir() if not path.name.startswith(".") and not path.is_dir())
    for path in paths:
        if not path.is_file():
            raise LauncherError(f"{setting} {path}: {looks_of(path)}; remove it, or get the weights again.")
    if not paths or sum(path.stat().st_size for path in paths) > SMALL_BYTES:
        raise LauncherError(f"{setting} {folder}: nobody has verified it; run `./download.sh verify`, then this again.")
    digests = hashing.hash_files(paths, hashing.usual_workers())
    entries = tuple(FileEntry(path.name, path.stat().st_size, digests[path]) for path in paths)
    return Manifest(folder.name, "as it is here", entries)


# One node


@dataclass
class Job:
    """One folder on its way to one node."""

    node: Node
    source: Source
    target: str  # as the setting says, ~ and all
    full: bool
    step: Step = field(default_factory=Step)
    ended: threading.Event = field(default_factory=threading.Event)
    running: list[subprocess.Popen] = field(default_factory=list)

    @property
    def manifest(self) -> Manifest:
        return self.source.manifest

    @property
    def wanted(self) -> dict[str, FileEntry]:
        return self.manifest.by_name()

    def bytes_of(self, names: Iterable[str]) -> int:
        return sum(self.wanted[name].bytes for name in names)

    def started(self, process: subprocess.Popen) -> None:
        self.running.append(process)
        if self.ended.is_set():
            self.end()

    def end(self) -> None:
        """Also from another thread: what runs for this job, or is about to, ends."""
        self.ended.set()
        for process in list(self.running):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)

    def run(self) -> Outcome:
        with Agent(self.node, self.target) as agent:
            self.started(agent.process)
            seen = agent.look(self.wanted)
            if word := self.is_done(seen):
                return self.outcome(word, seen)
            nonce = f"nonce-{secrets.token_hex(8)}"
            work = agent.ask("open", nonce=nonce)["work"]
            if (self.source.folder / Path(work).name / nonce).exists():
                agent.ask("close")
                return self.shared(seen)
            return self.bring(agent, work)

    def is_done(self, seen: Seen) -> str:
        """What there is to say when nothing is to be written, so that the folder may be read-only; else nothing."""
        if seen.record is None or seen.record.manifest != self.manifest:
            return ""
        if len(seen.still_good(self.manifest)) < len(self.wanted):
            return ""
        if not self.full:
            return "was there and verified already"
        good, _ = self.hash_there(seen.folder, list(self.wanted))
        return "was hashed again and is right" if good == seen.record.stats else ""

    def bring(self, agent: Agent, work: str) -> Outcome:
        seen = agent.look(self.wanted)  # again: another sync may have come before
        good = {} if self.full else seen.still_good(self.manifest)
        unknown = [name for name in seen.of_right_size(self.manifest.files) if name not in good]
        found, bad = self.hash_there(seen.folder, unknown)
        good |= found
        missing = [name for name in self.wanted if name not in good]
        if missing:
            self.refuse_what_is_in_the_way(missing, seen, agent.ask("room"))
            agent.ask("forget")
            good |= self.copy_and_hash(agent, missing, seen.folder, work)
        stale = sorted(set(seen.old.stats if seen.old else ()) - set(self.wanted))
        agent.ask("remove", names=stale)
        agent.ask("keep", text=Verified(self.manifest, good).to_bytes().decode())
        agent.ask("close")
        return self.told(seen, bad, missing, stale)

    # Telling

    def outcome(self, word: str, seen: Seen, notes: Sequence[str] = ()) -> Outcome:
        self.step.enter("done")
        known = set(seen.old.stats if seen.old else ())
        foreign = [f"{seen.folder}/{name} is not one of the weights; it was left alone"
                   for name in seen.others if name not in known]  # fmt: skip
        return Outcome(self.node, self.source, word, (*notes, *foreign))

    def told(self, seen: Seen, bad: Sequence[str], missing: Sequence[str], stale: Sequence[str]) -> Outcome:
        copied = f"{len(missing)} of {len(self.wanted)} files copied ({spoken(self.bytes_of(missing))})"
        notes = [f"{seen.folder}/{name} was another one than its size said, and was replaced" for name in bad]
        if seen.old and seen.old.manifest.revision != self.manifest.revision:
            notes.append(f"revision {seen.old.manifest.revision} was there, {self.manifest.revision} is now")
        notes += [f"{seen.folder}/{name} belonged to what was there before, and was removed" for name in stale]
        return self.outcome(f"{copied}, all hashed there and right", seen, notes)

    def shared(self, seen: Seen) -> Outcome:
        """The node sees this machine's own folder. What was verified here is verified there, if it looks the same."""
        kind, mounted = seen.mount
        for name in self.wanted:
            if seen.stats[name] != FileStat.of(self.source.folder / name):
                raise self.error(
                    f"{seen.folder} is this machine's own folder over {kind}, but {name} has another inode or time "
                    f"there than here, so that a change could not be noticed; mount it by NFS "
                    f"(`{console.program()} share`)."
                )
        return self.outcome(f"is this machine's own folder ({kind} from {mounted}); nothing to copy", seen)

    def error(self, text: str) -> LauncherError:
        return LauncherError(f"{label(self.node)}: {text}", Exit.SETUP)

    def refuse_what_is_in_the_way(self, missing: Sequence[str], seen: Seen, room: Mapping[str, int]) -> None:
        here = [name for name in PROGRAMS if not shutil.which(name)]
        for names, where in ((here, "on this machine"), (seen.missing_programs, "there")):
            if names:
                raise self.error(
                    f"{' and '.join(names)} not installed {where}; sudo apt-get install rsync util-linux {where}, then "
                    f"run this again."
                )
        if seen.folders:
            raise self.error(f"{seen.folder}/{seen.folders[0]} is a folder and should be a file; move it away.")
        if seen.old is None and CONFIG in missing and seen.stats[CONFIG]:
            raise self.error(
                f"{seen.folder} holds another checkpoint, which no sync has put there: its {CONFIG} is not that of "
                f"{self.manifest.pack}; move it away, or set {self.source.setting}, then run this again."
            )
        # Of a file that is there only what it grows counts; but the new one lies beside it until it is whole.
        old = [seen.stats[name].bytes for name in missing if seen.stats[name]]
        needed = self.bytes_of(missing) - sum(old) + max(old, default=0) - room["partial_bytes"]
        if needed > room["free_bytes"]:
            raise self.error(
                f"{seen.folder} needs {spoken(needed)} more and its disk has {spoken(room['free_bytes'])} free; free "
                f"{spoken(needed - room['free_bytes'])} there, or move {self.source.setting} to another disk."
            )

    # The two that take long

    def copy_and_hash(self, agent: Agent, names: Sequence[str], folder: str, work: str) -> dict[str, FileStat]:
        """What does not arrive whole is sent once more, alone; what is wrong then is wrong for another reason."""
        good: dict[str, FileStat] = {}
        bad = list(names)
        for _ in range(2):
            self.copy(agent, bad, folder, work)
            found, bad = self.hash_there(folder, bad)
            good |= found
            if not bad:
                return good
        entry = self.wanted[bad[0]]
        raise self.error(
            f"{folder}/{bad[0]} arrived with another SHA-256 than {entry.sha256[:16]}... twice; "
            f"`./download.sh verify --full` tells whether this machine's file is right, else suspect the memory or "
            f"the disk of that node."
        )

    def copy(self, agent: Agent, names: Sequence[str], folder: str, work: str) -> None:
        self.step.enter("copying", self.bytes_of(names))
        process = start_here(rsync(self.node, self.source.folder, folder, work))
        self.started(process)
        try:
            process.stdin.write("".join(f"{name}\0" for name in names).encode("utf-8", "surrogateescape"))
            process.stdin.close()
            said = self.follow(process, agent, names)
            process.wait()
        finally:
            if process.poll() is None:
                remote.kill(process)
            hashing.drop_pages(self.source.folder / name for name in names)
        if process.returncode:
            why, free = remote.Result(process.returncode, said, b"").message, agent.ask("room")["free_bytes"]
            raise self.error(
                f"rsync to {folder} ended with {process.returncode} ({why}), its disk has {spoken(free)} free; run "
                f"this again when that is mended: what has arrived is kept."
            )

    def follow(self, process: subprocess.Popen, agent: Agent, names: Sequence[str]) -> bytes:
        """Until rsync ends; the last that it said beside its progress. Keeps both page caches small meanwhile."""
        said: list[bytes] = []
        let_go = time.monotonic()
        for line in pieces(process.stdout):
            if found := PROGRESS.match(line):
                self.step.done = min(int(found[1]), self.step.total)
            said = [*said[-5:], line[found.end() if found else 0 :]]
            if time.monotonic() - let_go >= LET_GO_S:
                hashing.drop_pages(self.source.folder / name for name in names)
                agent.ask("let_go", names=list(names))
                let_go = time.monotonic()
        return b"\n".join(said)

    def hash_there(self, folder: str, names: Sequence[str]) -> tuple[dict[str, FileStat], list[str]]:
        """(those that are right, as they looked; the names of the others)"""
        if not names:
            return {}, []
        self.step.enter("hashing", self.bytes_of(names))
        request = json.dumps({"folder": folder, "names": list(names)})
        talk = remote.Talk(self.node, ["python3", "-c", HASHING.read_text(), request])
        self.started(talk.process)
        found = self.read_hashes(talk)
        good = {name: FileStat(one["bytes"], one["mtime_ns"], one["inode"]) for name, one in found.items()
                if one.get("sha256") == self.wanted[name].sha256}  # fmt: skip
        return good, [name for name in names if name not in good]

    def read_hashes(self, talk: remote.Talk) -> dict[str, dict]:
        found = None
        for said in filter(None, map(framing.object_in, talk.lines())):
            self.step.done = said.get("read", self.step.done)
            found = said.get("files", found)
        result = talk.result()
        if not result.ok or found is None:
            raise self.error(f"the files could not be hashed ({result.message}); run this again.")
        return found


# All nodes


def sync(config, *, full: bool = False, ranks: Sequence[int] | None = None) -> list[Outcome]:
    """Every folder to every other node, at once. Raises LauncherError naming each node that is not complete."""
    nodes = [node for node in remote.nodes_of(config) if not node.is_here and (ranks is None or node.rank in ranks)]
    sources = [source_of(setting, folder) for setting, folder in folders_of(config).items()]
    outcomes = []
    for source in sources:
        console.say(f"{source.setting}: {len(source.manifest.files)} files, {spoken(source.manifest.total_bytes)}, "
                    f"{source.manifest.pack} at {source.manifest.revision}")  # fmt: skip
        outcomes += run_jobs([Job(node, source, str(config[source.setting]), full) for node in nodes])
    return outcomes


def run_jobs(jobs: Sequence[Job]) -> list[Outcome]:
    if not jobs:
        return []
    with console.phase("sync") as progress, ThreadPoolExecutor(len(jobs)) as pool:
        futures = [pool.submit(job.run) for job in jobs]
        try:
            while wait(futures, TICK_S).not_done:
                progress.tick("; ".join(f"node {job.node.rank}: {job.step}" for job in jobs))
        except BaseException:  # Ctrl-C: what has arrived is kept, what runs ends
            for job in jobs:
                job.end()
            raise
        errors = [future.exception() for future in futures if future.exception()]
        if errors:
            raise one_of(errors)
    return [future.result() for future in futures]


def one_of(errors: Sequence[BaseException]) -> BaseException:
    """Each node's own sentence; what is no sentence is a fault of the launcher and comes first."""
    for error in errors:
        if not isinstance(error, LauncherError):
            return error
    return LauncherError("\n".join(map(str, errors)), errors[0].code)


def tell(outcomes: Sequence[Outcome], say: Callable[[str], None] = print) -> None:
    for outcome in outcomes:
        say(f"{label(outcome.node)}: {outcome.source.setting} {outcome.word}.")
        for note in outcome.notes:
            say(f"  Note: {note}.")
