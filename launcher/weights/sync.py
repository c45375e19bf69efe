"""Puts the weights of the first node on every other one, and has each prove by its own hashes what it got."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from launcher import console, remote
from launcher.errors import Exit, LauncherError
from launcher.remote import Node
from launcher.weights import hashing, record
from launcher.weights.record import FileEntry, FileStat, Manifest, Verified

WORKER = Path(__file__).with_name("worker.py")
HASHING = Path(hashing.__file__)
TICK_S = 0.25
# Smaller checkpoints are hashed whenever they are looked at, and need no record: that takes no longer than a look.
SMALL_BYTES = 256 << 20
GIB = 1 << 30
PROGRESS = re.compile(rb"\s*(\d+)\s+\d+%")
NO_SPACE = 11


@dataclass(frozen=True)
class Source:
    """A folder on this machine, and what it was verified to hold."""

    setting: str  # MODEL_DIR or DRAFT_DIR
    folder: Path
    manifest: Manifest

    @property
    def paths(self) -> list[Path]:
        return [self.folder / entry.name for entry in self.manifest.files]


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
        left = f", {spoken_time((self.total - self.done) / rate)} left" if self.done else ""
        return f"{self.doing} {spoken(self.done)} of {spoken(self.total)}, {spoken(rate)}/s{left}"


def spoken(size_bytes: float) -> str:
    return f"{size_bytes / GIB:.1f} GiB" if size_bytes >= GIB / 10 else f"{size_bytes / (1 << 20):.1f} MiB"


def spoken_time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


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
    verified = record.read(folder) if folder.is_dir() else None
    if verified is None:
        return Source(setting, folder, manifest_of_small(setting, folder))
    changed = record.unchanged(folder, verified)
    if changed:
        raise LauncherError(
            f"{setting} {folder}: {len(changed)} of {len(verified.stats)} files are not as they were when they were "
            f"verified, first {changed[0]} ({seen_of(folder / changed[0])}); `./download.sh verify` checks them and "
            f"`./download.sh` gets bad ones again."
        )
    return Source(setting, folder, verified.manifest)


def seen_of(path: Path) -> str:
    """What is wrong with a file, for people."""
    try:
        return f"{path.stat().st_size} bytes, written {time.strftime('%F %T', time.localtime(path.stat().st_mtime))}"
    except FileNotFoundError:
        return f"a link to {os.readlink(path)}, which is not there" if path.is_symlink() else "missing"
    except OSError as error:
        return str(error.strerror)


def manifest_of_small(setting: str, folder: Path) -> Manifest:
    """Of a checkpoint that nobody verified and that is small enough to be hashed in passing."""
    if not folder.is_dir():
        raise LauncherError(f"{setting} {folder}: there is no such folder; `./download.sh` fills it.")
    paths = sorted(path for path in folder.iterdir() if not path.name.startswith(".") and not path.is_dir())
    for path in paths:
        if not path.is_file():
            raise LauncherError(f"{setting} {path}: {seen_of(path)}; remove it, or get the weights again.")
    if not paths or sum(path.stat().st_size for path in paths) > SMALL_BYTES:
        raise LauncherError(f"{setting} {folder}: nobody has verified it; run `./download.sh verify`, then this again.")
    digests = hashing.hash_files(paths, hashing.usual_workers())
    entries = tuple(FileEntry(path.name, path.stat().st_size, digests[path]) for path in paths)
    return Manifest(folder.name, "as it is here", entries)


# Another node


class Agent:
    """worker.py on a node, for as long as the block lasts. Its lock there ends with it."""

    def __init__(self, node: Node, folder: str) -> None:
        self.node = node
        argv = ["python3", "-c", WORKER.read_text()]
        self.process = start(node, argv, stdin=subprocess.PIPE)
        self.send({"folder": folder, "record": record.NAME})

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *_) -> None:
        remote.kill(self.process)

    def send(self, request: Mapping) -> None:
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        except OSError:
            raise self.lost() from None

    def ask(self, what: str, **fields) -> dict:
        self.send({"do": what, **fields})
        for line in self.process.stdout:
            if line.startswith(b"{"):  # some login shells greet first
                reply = json.loads(line)
                if "refused" in reply:
                    raise LauncherError(f"{label(self.node)}: {reply['refused']}.", Exit.SETUP)
                return reply
        raise self.lost()

    def lost(self) -> LauncherError:
        self.process.wait()
        said = remote.Result(self.process.returncode, b"", self.process.stderr.read()).message
        return LauncherError(
            f"{label(self.node)}: the connection ended ({said}); see that `ssh {self.node.login} python3 --version` "
            f"answers, then run this again: what has arrived is kept.",
            Exit.SETUP,
        )


def label(node: Node) -> str:
    return f"node {node.rank} ({node.address})"


def start(node: Node, argv: Sequence[str], stdin: int = subprocess.DEVNULL) -> subprocess.Popen:
    return subprocess.Popen(
        remote.command_for(node, argv), stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip


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
    def wanted(self) -> dict[str, FileEntry]:
        return self.source.manifest.by_name()

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
            seen = agent.ask("look", names=list(self.wanted))
            old = read_record(seen["record"])
            good = {} if self.full else still_good(self.source.manifest, old, seen["stats"])
            if len(good) == len(self.wanted) and old.manifest == self.source.manifest:
                return self.outcome("was there and verified already", seen)
            return self.bring(agent, seen, old, good)

    def outcome(self, word: str, seen: Mapping) -> Outcome:
        others = [name for name in seen["others"] if name != "canary.json"]
        notes = [f"{seen['folder']}/{name} is not one of the weights; it was left alone" for name in others]
        return Outcome(self.node, self.source, word, tuple(notes))

    def bring(self, agent: Agent, seen: Mapping, old: Verified | None, good: dict[str, FileStat]) -> Outcome:
        same_size = [name for name, entry in self.wanted.items()
                     if name not in good and (seen["stats"][name] or [None])[0] == entry.bytes]  # fmt: skip
        if self.full and old and len(same_size) == len(self.wanted) and old.manifest == self.source.manifest:
            found, bad = self.hash_there(seen["folder"], same_size)
            if not bad and found == old.stats:  # nothing is to be written, so the folder may be read-only
                return self.outcome("was hashed again and is right", seen)
        nonce = f"nonce-{secrets.token_hex(8)}"
        room = agent.ask("open", nonce=nonce)
        if (self.source.folder / ".exl3-sync" / nonce).exists():
            agent.ask("close")
            return self.shared(seen)
        found, bad = self.hash_there(seen["folder"], same_size)
        good |= found
        missing = [name for name in self.wanted if name not in good]
        if missing:
            self.refuse_missing_programs(seen)
            self.refuse_full_disk(missing, room, seen)
            agent.ask("forget")
            good |= self.copy_and_hash(missing, seen["folder"], room["work"])
        stale = sorted(set(old.stats if old else ()) - set(self.wanted))
        agent.ask("remove", names=stale)
        agent.ask("keep", text=Verified(self.source.manifest, good).to_bytes().decode())
        agent.ask("close")
        return self.told(seen, old, bad, missing, stale)

    def told(self, seen: Mapping, old: Verified | None, bad: Sequence[str], missing: Sequence[str],
             stale: Sequence[str]) -> Outcome:  # fmt: skip
        copied = sum(self.wanted[name].bytes for name in missing)
        word = f"{len(missing)} of {len(self.wanted)} files copied ({spoken(copied)}), all hashed there and right"
        outcome = self.outcome(word, {**seen, "others": set(seen["others"]) - set(stale)})
        notes = [f"{seen['folder']}/{name} was another one than its size said, and was replaced" for name in bad]
        if old and old.manifest.revision != self.source.manifest.revision:
            notes.append(f"revision {old.manifest.revision} was there, {self.source.manifest.revision} is now")
        notes += [f"{seen['folder']}/{name} belonged to what was there before, and was removed" for name in stale]
        return Outcome(self.node, self.source, word, (*notes, *outcome.notes))

    def shared(self, seen: Mapping) -> Outcome:
        """The node sees this machine's own folder. What was verified here is verified there, if it looks the same."""
        kind, mounted = seen["mount"]
        for entry in self.source.manifest.files:
            here = FileStat.of(self.source.folder / entry.name)
            if seen["stats"][entry.name] != [here.bytes, here.mtime_ns, here.inode]:
                raise LauncherError(
                    f"{label(self.node)}: {seen['folder']} is this machine's own folder over {kind}, but "
                    f"{entry.name} has another inode or time there than here, so a change could not be noticed; "
                    f"mount it by NFS (`{console.program()} share`).",
                    Exit.SETUP,
                )
        return self.outcome(f"is this machine's own folder ({kind} from {mounted}); nothing to copy", seen)

    def refuse_missing_programs(self, seen: Mapping) -> None:
        missing = [name for name, path in seen["programs"].items() if not path]
        if missing:
            raise LauncherError(
                f"{label(self.node)}: {' and '.join(missing)} not installed there; sudo apt-get install rsync "
                f"util-linux on that node, then run this again.",
                Exit.SETUP,
            )

    def refuse_full_disk(self, missing: Sequence[str], room: Mapping, seen: Mapping) -> None:
        """Of a file that is there only what it grows counts; but the new one lies beside it until it is whole."""
        old = [seen["stats"][name][0] for name in missing if seen["stats"][name]]
        total = sum(self.wanted[name].bytes for name in missing)
        needed = total - sum(old) + max(old, default=0) - room["partial_bytes"]
        if needed > room["free_bytes"]:
            raise LauncherError(
                f"{label(self.node)}: {seen['folder']} needs {spoken(needed)} more and its disk has "
                f"{spoken(room['free_bytes'])} free; free {spoken(needed - room['free_bytes'])} there, or move "
                f"{self.source.setting} to another disk.",
                Exit.SETUP,
            )

    def copy_and_hash(self, names: Sequence[str], folder: str, work: str) -> dict[str, FileStat]:
        """What does not arrive whole is sent once more, alone; what is wrong then is wrong for another reason."""
        good: dict[str, FileStat] = {}
        bad = list(names)
        for _ in range(2):
            self.copy(bad, folder, work)
            found, bad = self.hash_there(folder, bad)
            good |= found
            if not bad:
                return good
        entry = self.wanted[bad[0]]
        raise LauncherError(
            f"{label(self.node)}: {folder}/{bad[0]} arrived with another SHA-256 than {entry.sha256[:16]}... twice; "
            f"`./download.sh verify --full` tells whether this machine's file is right, else suspect the memory or "
            f"the disk of that node.",
            Exit.SETUP,
        )

    # The two that take long

    def copy(self, names: Sequence[str], folder: str, work: str) -> None:
        self.step.enter("copying", sum(self.wanted[name].bytes for name in names))
        argv = rsync(self.node, self.source.folder, folder, work)
        process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )  # fmt: skip
        self.started(process)
        process.stdin.write("".join(f"{name}\0" for name in names).encode("utf-8", "surrogateescape"))
        process.stdin.close()
        said = []
        for line in pieces(process.stdout):
            if found := PROGRESS.match(line):
                self.step.done = min(int(found[1]), self.step.total)
            else:
                said = [*said[-5:], line]
        code = process.wait()
        hashing.drop_pages(self.source.folder / name for name in names)
        if code:
            raise self.copy_failed(code, remote.Result(code, b"\n".join(said), b"").message, folder)

    def copy_failed(self, code: int, said: str, folder: str) -> LauncherError:
        fix = "run this again: what has arrived is kept"
        if "No space left" in said:
            fix = f"free room on that disk, or move {self.source.setting} to another one; {fix}"
        return LauncherError(
            f"{label(self.node)}: rsync to {folder} ended with {code} ({said}); {fix}.", Exit.SETUP
        )  # fmt: skip

    def hash_there(self, folder: str, names: Sequence[str]) -> tuple[dict[str, FileStat], list[str]]:
        """(those that are right, as they looked; the names of the others)"""
        if not names:
            return {}, []
        self.step.enter("hashing", sum(self.wanted[name].bytes for name in names))
        request = json.dumps({"folder": folder, "names": list(names)})
        process = start(self.node, ["python3", "-c", HASHING.read_text(), request])
        self.started(process)
        found = self.read_hashes(process)
        good = {name: FileStat(one["bytes"], one["mtime_ns"], one["inode"]) for name, one in found.items()
                if one.get("sha256") == self.wanted[name].sha256}  # fmt: skip
        return good, [name for name in names if name not in good]

    def read_hashes(self, process: subprocess.Popen) -> dict[str, dict]:
        found = None
        for line in process.stdout:
            if line.startswith(b"{"):
                said = json.loads(line)
                self.step.done = said.get("read", self.step.done)
                found = said.get("files", found)
        said = process.stderr.read()
        if process.wait() or found is None:
            message = remote.Result(process.returncode, b"", said).message
            raise LauncherError(f"{label(self.node)}: the files could not be hashed ({message}); run this again.",
                                Exit.SETUP)  # fmt: skip
        return found


def read_record(text: str | None) -> Verified | None:
    """A record that cannot be read says nothing; it is written anew."""
    try:
        return Verified.from_json(json.loads(text)) if text else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def still_good(manifest: Manifest, old: Verified | None, stats: Mapping[str, list | None]) -> dict[str, FileStat]:
    """Files of the manifest that were verified there and look as they did then."""
    known = old.manifest.by_name() if old else {}
    return {
        name: old.stats[name]
        for name, entry in manifest.by_name().items()
        if known.get(name) == entry and stats[name] and FileStat(*stats[name]) == old.stats[name]
    }


def rsync(node: Node, source: Path, folder: str, work: str) -> list[str]:
    """Reads names, each ended by a NUL, from its input. All are sent, whatever size and time say, as differences to
    what is there. The receiver holds the folder's lock, and whoever is killed here takes his rsync along."""
    return [
        "setpriv", "--pdeathsig", "KILL", "--",
        "rsync", "--files-from=-", "--from0", "--copy-links", "--times", "--chmod=D755,F644", "--perms",
        "--ignore-times", f"--temp-dir={work}", f"--partial-dir={work}/partial",
        "--info=progress2", "--no-human-readable", "--outbuf=N", "--secluded-args",
        f"--rsync-path={remote.quoted(['flock', '--shared', f'{work}/lock', 'rsync']).decode()}",
        *remote.rsync_transport(node), f"{source}/", remote.rsync_target(node, f"{folder}/"),
    ]  # fmt: skip


def pieces(stream):
    """Lines that end with a carriage return or a line feed."""
    rest = b""
    while block := os.read(stream.fileno(), 65536):
        *lines, rest = re.split(rb"[\r\n]", rest + block)
        yield from lines
    yield rest


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
