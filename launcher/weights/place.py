"""Fills a folder with exactly the wanted files. A file has its name there only when its hash was right.

What is on its way lies in `.partial` beside the files, so that it moves there by a rename; what was found to be wrong
is kept in `.aside`. Killed at any moment, the next run goes on: parts from their end, verified files by their stats.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from launcher.errors import Exit, LauncherError
from launcher.weights import contents, hub, record
from launcher.weights.contents import Contents
from launcher.weights.hashing import digests_and_stats, drop_pages, usual_workers
from launcher.weights.hub import Stopped, Wanted
from launcher.weights.meter import Meter, work
from launcher.weights.record import FileEntry, FileStat, Manifest, Verified

PARTIAL, ASIDE, LOCK = ".partial", ".aside", ".download.lock"
COPY_BYTES = 4 << 20
# Why a link cannot be made where a copy can.
NO_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS)


@dataclass(frozen=True)
class Bad:
    """A file that is not what it should be."""

    name: str
    expected: str
    found: str

    @property
    def is_other_content(self) -> bool:
        """A file with bytes of its own, by size or hash; not a link or a folder in its place."""
        return self.found.isdigit() or "SHA-" in self.found

    def __str__(self) -> str:
        return f"{self.name}: expected {self.expected}, found {self.found}"


@dataclass
class State:
    """What of the wanted files a folder has. `verified`: right, and unchanged since; `unverified`: of the right size;
    `bad`: certainly wrong."""

    verified: dict[str, tuple[FileEntry, FileStat]] = field(default_factory=dict)
    unverified: list[Wanted] = field(default_factory=list)
    bad: list[Bad] = field(default_factory=list)
    missing: list[Wanted] = field(default_factory=list)
    links: dict[str, Path] = field(default_factory=dict)  # among the bad: where a link leads that has to be a file


# A source puts a file's bytes into a part and says of each gain. False: it had nothing to read, so that the hashing
# that follows is what takes the time, and tells of it.
Source = Callable[[Wanted, Path, Callable[[int], None], threading.Event], bool]


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """One download into a folder at a time. Dies with its process."""
    path = folder / LOCK
    with file_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        stream = path.open("a+")
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stream.seek(0)
            raise LauncherError(
                f"{folder}: another download or verification works there (process {stream.read().strip() or '?'}); "
                f"wait for it, or press Ctrl-C where it runs.",
                Exit.BUSY,
            ) from None
        with file_errors(folder):
            stream.truncate(0)
            stream.write(f"{os.getpid()}\n")
            stream.flush()
        yield


@contextmanager
def file_errors(folder: Path) -> Iterator[None]:
    """What a disk refuses, in a sentence."""
    try:
        yield
    except (OSError, LauncherError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        if isinstance(cause, OSError) and hub.is_full(cause):
            raise LauncherError(
                f"{cause.filename or folder}: the disk is full; what has arrived is kept. Free some room (df -h "
                f"{folder}) and run the same command again."
            ) from error
        if cause is not error:
            raise
        fix = f"make {folder} a folder on a healthy disk that this user can write to, or set another one"
        if error.filename and not Path(error.filename).is_relative_to(folder):
            fix = "see that this user may read it (made by root?) and that its disk is healthy"
        raise LauncherError(f"{error.filename or folder}: {error.strerror or error}; {fix}.") from error


# What is there


def look(folder: Path, wanted: Sequence[Wanted]) -> State:
    """By the records and stats; reads small files at most. Raises LauncherError for an unreadable record."""
    known = {}
    for one in (record.read(folder), record.read(folder / PARTIAL)):
        if one:
            changed = set(record.changed(folder, one))
            entries = one.manifest.by_name()
            known |= {name: (entries[name], stat) for name, stat in one.stats.items() if name not in changed}
    state = State()
    for file in wanted:
        path = folder / file.name
        if path.is_symlink() and path.is_file():
            # The folder is mounted into a container, where what a link leads to is not.
            state.links[file.name] = path.resolve()
            state.bad.append(
                Bad(file.name, "a file, since a container cannot follow links", f"a link to {path.resolve()}")
            )
        elif file.name in known and is_same(known[file.name][0], file, path):
            state.verified[file.name] = known[file.name]
        elif not os.path.lexists(path):
            state.missing.append(file)
        else:
            sort_in(state, file, path)
    for name in sorted(set(known) - {file.name for file in wanted}):
        state.bad.append(Bad(name, "nothing", "a file of an earlier revision"))
    return state


def sort_in(state: State, file: Wanted, path: Path) -> None:
    try:
        size = path.stat().st_size if path.is_file() else None
    except OSError:  # a circle of links
        size = None
    if size is None:
        state.bad.append(Bad(file.name, f"a file of {file.bytes} bytes", what_lies_at(path)))
    elif size != file.bytes:
        state.bad.append(Bad(file.name, f"{file.bytes} bytes", f"{size}"))
    else:
        state.unverified.append(file)


def what_lies_at(path: Path) -> str:
    if path.is_symlink():
        return f"a link that leads nowhere ({os.readlink(path)})"
    return "a folder" if path.is_dir() else "something that is no file"


def is_same(entry: FileEntry, file: Wanted, path: Path) -> bool:
    """Whether a verified file is the wanted one. Where only git's hash is known, which small files have, it is read."""
    if entry.bytes != file.bytes:
        return False
    return entry.sha256 == file.sha256 if file.sha256 else git_sha1(path) == file.git_sha1


# Hashes


def verify(paths: Mapping[str, Path], wanted: Sequence[Wanted], on_bytes, workers: int = 0):
    """({name: (entry, stat)} of those that are right, [Bad] of the others), hashed in parallel."""
    found = digests_and_stats([paths[file.name] for file in wanted], workers or usual_workers(), on_bytes)
    good, bad = {}, []
    for file in wanted:
        digest, stat = found[paths[file.name]]
        expected, seen = hashes(file, paths[file.name], digest)
        if stat.st_size != file.bytes or expected != seen:
            wrong = (f"{file.bytes} bytes", f"{stat.st_size}") if stat.st_size != file.bytes else (expected, seen)
            bad.append(Bad(file.name, *wrong))
        else:
            entry = FileEntry(file.name, file.bytes, digest)
            good[file.name] = (entry, FileStat(stat.st_size, stat.st_mtime_ns, stat.st_ino))
    return good, bad


def hashes(file: Wanted, path: Path, digest: str) -> tuple[str, str]:
    """(expected, found), of the kind that the source knows."""
    if file.sha256:
        return f"SHA-256 {file.sha256}", f"SHA-256 {digest}"
    return f"git's SHA-1 {file.git_sha1}", f"git's SHA-1 {git_sha1(path)}"


def git_sha1(path: Path) -> str:
    """As git names a blob: its size takes part."""
    digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as stream:
        while piece := stream.read(COPY_BYTES):
            digest.update(piece)
    return digest.hexdigest()


# Filling


class Filling:
    """One run over one folder: knows what is verified, and writes it down after each file."""

    def __init__(self, folder: Path, pack: str, revision: str):
        self.folder = folder
        self.partial = folder / PARTIAL
        self.pack, self.revision = pack, revision
        self.on_bytes: Callable[[int], None] = lambda count: None
        self.verified: dict[str, tuple[FileEntry, FileStat]] = {}
        self.mutex = threading.Lock()
        self.stop = threading.Event()
        part_of(folder, "x").parent.mkdir(parents=True, exist_ok=True)

    def accept(self, good: Mapping[str, tuple[FileEntry, FileStat]]) -> None:
        with self.mutex:
            self.verified |= good
            record.write(self.partial, self.as_verified())

    def as_verified(self) -> Verified:
        pairs = sorted(self.verified.items())
        manifest = Manifest(self.pack, self.revision, tuple(entry for _, (entry, _) in pairs))
        return Verified(manifest, {name: stat for name, (_, stat) in pairs})

    def verify_in_place(self, title: str, files: Sequence[Wanted]) -> list[Bad]:
        """Hashes files that have their names already, and remembers the right ones."""
        meter = Meter(sum(file.bytes for file in files))
        paths = {file.name: self.folder / file.name for file in files}
        ((good, bad),) = work(title, meter, [lambda: verify(paths, files, meter.add)], 1, self.stop)
        self.accept(good)
        return bad

    def put_aside(self, bad: Sequence[Bad]) -> list[Path]:
        """Out of the way, never away."""
        kept = []
        for one in bad:
            source = self.folder / one.name
            target = free_name(self.folder / ASIDE / one.name)
            target.parent.mkdir(parents=True, exist_ok=True)
            source.rename(target)
            kept.append(target)
        return kept

    def bring(self, file: Wanted, source: Source) -> Bad | None:
        """One file from its source to its name, or what is wrong with it; the wrong bytes are put aside."""
        part = part_of(self.folder, file.name)
        was_told = source(file, part, self.on_bytes, self.stop)
        good, bad = verify({file.name: part}, [file], (lambda count: None) if was_told else self.on_bytes, 1)
        if good:
            self.settle(file, part, good)
            return None
        kept = free_name(self.folder / ASIDE / file.name)
        kept.parent.mkdir(parents=True, exist_ok=True)
        part.rename(kept)
        self.on_bytes(-file.bytes)
        return Bad(bad[0].name, bad[0].expected, f"{bad[0].found}; kept as {kept}")

    def settle(self, file: Wanted, part: Path, good) -> None:
        target = self.folder / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(part, target)
        self.accept(good)

    def finish(self, found: Contents) -> Verified:
        """The record, which is what makes the folder servable; then what was on its way is nothing any more."""
        verified = self.as_verified()
        contents.keep(self.folder, found, verified)
        record.write(self.folder, verified)
        shutil.rmtree(self.partial)
        return verified


def part_of(folder: Path, name: str) -> Path:
    """Where a file is while it is on its way."""
    return folder / PARTIAL / "files" / name.replace("/", "%2F")


def free_name(path: Path) -> Path:
    number, free = 0, path
    while os.path.lexists(free):
        number += 1
        free = path.with_name(f"{path.name}.{number}")
    return free


# Sources on this machine


def from_files(paths: Mapping[str, Path]) -> Source:
    """Hard links where the disk allows it, else copies. Parts of an interrupted copy go on."""

    def bring(file: Wanted, part: Path, on_bytes, stop: threading.Event) -> bool:
        source = paths[file.name]
        if hub.size_of(part) == 0:
            part.unlink(missing_ok=True)
            try:
                os.link(source, part)
                return False
            except OSError as error:
                if error.errno not in NO_LINK:
                    raise
        copy(source, part, file, on_bytes, stop)
        return True

    return bring


def copy(source: Path, part: Path, file: Wanted, on_bytes, stop: threading.Event) -> None:
    offset = hub.size_of(part)
    with source.open("rb", buffering=0) as reader, part.open("ab") as writer:
        if offset > file.bytes:
            writer.truncate(0)
            offset = 0
        reader.seek(offset)
        while piece := reader.read(COPY_BYTES):
            if stop.is_set():
                raise Stopped
            writer.write(piece)
            on_bytes(len(piece))
            os.posix_fadvise(reader.fileno(), 0, reader.tell(), os.POSIX_FADV_DONTNEED)
    drop_pages([part])


def can_link(source: Path, folder: Path) -> bool:
    """Whether a hard link will be allowed: on the same file system, of a file that is this user's to write."""
    found = source.stat()
    is_own = os.geteuid() in (0, found.st_uid) or os.access(source, os.W_OK)
    return is_own and found.st_dev == nearest(folder).stat().st_dev


def nearest(path: Path) -> Path:
    """The folder itself, or the one in which it would be made."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path
