"""The record of what was verified in a folder of weights: the manifest, and how each file looked when it was hashed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from launcher import paths
from launcher.errors import Exit, LauncherError

NAME = ".exl3-verified.json"
LONGEST_RECORD_BYTES = 64 << 20
FORMAT = 1


@dataclass(frozen=True)
class FileEntry:
    """A file as it has to be."""

    name: str  # below the folder, with / between parts
    bytes: int
    sha256: str  # 64 hex digits, lower case


@dataclass(frozen=True)
class Manifest:
    pack: str  # repository on the Hub, or another name of what this is
    revision: str
    files: tuple[FileEntry, ...]

    @property
    def total_bytes(self) -> int:
        return sum(entry.bytes for entry in self.files)

    def by_name(self) -> dict[str, FileEntry]:
        return {entry.name: entry for entry in self.files}

    def to_json(self) -> dict:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping) -> Manifest:
        """Raises KeyError, TypeError or ValueError when it is not a manifest."""
        files = tuple(FileEntry(checked_name(one["name"]), int(one["bytes"]), checked_digest(one["sha256"]))
                      for one in raw["files"])  # fmt: skip
        if len({entry.name for entry in files}) != len(files):
            raise ValueError("a file is listed twice")
        return cls(str(raw["pack"]), str(raw["revision"]), files)


def checked_name(name: object) -> str:
    """Only what lies below the folder: a name goes into paths and into rsync's list of files."""
    parts = name.split("/") if isinstance(name, str) else [""]
    if any(part in ("", ".", "..") for part in parts) or any(sign in name for sign in "\0\n\r"):
        raise ValueError(f"{name!r} is no name of a file below the folder")
    return name


def checked_digest(digest: object) -> str:
    if not isinstance(digest, str) or len(digest) != 64 or set(digest) - set("0123456789abcdef"):
        raise ValueError(f"{digest!r} is no SHA-256")
    return digest


@dataclass(frozen=True)
class FileStat:
    """What is cheap to ask of a file, and changes with its content unless someone sees to it that it does not."""

    bytes: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, path: str | os.PathLike) -> FileStat:
        """Of the file that a link leads to."""
        found = os.stat(path)
        return cls(found.st_size, found.st_mtime_ns, found.st_ino)


@dataclass(frozen=True)
class Verified:
    """`manifest`, and each of its files as it looked before its hash was found right."""

    manifest: Manifest
    stats: Mapping[str, FileStat]

    def to_json(self) -> dict:
        stats = {name: asdict(stat) for name, stat in sorted(self.stats.items())}
        return {"format": FORMAT, "manifest": self.manifest.to_json(), "stats": stats}

    def to_bytes(self) -> bytes:
        return (json.dumps(self.to_json(), indent=1) + "\n").encode()

    @classmethod
    def from_json(cls, raw: Mapping) -> Verified:
        """Raises KeyError, TypeError or ValueError when it is not a record."""
        if raw["format"] != FORMAT:
            raise ValueError(f"format {raw['format']!r}, this launcher writes {FORMAT}")
        manifest = Manifest.from_json(raw["manifest"])
        stats = {name: FileStat(**{key: int(value) for key, value in stat.items()})
                 for name, stat in raw["stats"].items()}  # fmt: skip
        if set(stats) != set(manifest.by_name()):
            raise ValueError("its manifest and its stats name different files")
        return cls(manifest, stats)


def read(folder: str | os.PathLike) -> Verified | None:
    """The record in a folder; None without one. Raises LauncherError when there is one that cannot be read."""
    path = Path(folder) / NAME
    try:
        return Verified.from_json(json.loads(paths.text_of(path, LONGEST_RECORD_BYTES)))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        raise LauncherError(
            f"{path}: not readable as a record of verified weights ({reason}); remove the file, then run "
            f"`./download.sh verify`."
        ) from error


def write(folder: str | os.PathLike, verified: Verified) -> None:
    """Whole or not at all, also when the power fails. Raises LauncherError where it cannot be written."""
    path = Path(folder) / NAME
    partial = path.with_name(f"{NAME}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as stream:
            stream.write(verified.to_bytes())
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise LauncherError(
            f"{path}: the record of verified weights could not be written ({error.strerror}); make the folder "
            f"writable for this user and see that its disk is not full.",
            Exit.SETUP,
        ) from error
    finally:
        if partial.is_file():
            partial.unlink()


def remove(folder: str | os.PathLike) -> None:
    """Before anything in the folder is changed: what is being changed is not verified."""
    (Path(folder) / NAME).unlink(missing_ok=True)


def changed(folder: str | os.PathLike, verified: Verified) -> list[str]:
    """Names of the files that no longer look as they did when they were verified, or are gone. Reads no content."""
    return sorted(name for name, stat in verified.stats.items() if stat_or_none(Path(folder) / name) != stat)


def stat_or_none(path: Path) -> FileStat | None:
    try:
        return FileStat.of(path)
    except OSError:  # gone, a dangling link, a loop of links
        return None
