"""The Hub's cache on this machine: which packs are there, whole or in part, under which hashes."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants

from launcher.checkpoint import INDEX, SINGLE
from launcher.errors import LauncherError
from launcher.weights.hub import Wanted
from launcher.weights.packs import Pack


@dataclass(frozen=True)
class Snapshot:
    """A pack's revision as the cache has it."""

    folder: Path
    files: Mapping[str, Path]  # name -> the blob that it leads to, for those whose blob is there
    broken: tuple[str, ...]  # names that lead nowhere
    missing: tuple[str, ...]  # shards, by the index

    def wanted(self) -> list[Wanted]:
        """The blobs' names are their hashes, however they were transferred. Raises LauncherError for another name."""
        return [wanted_of(name, blob) for name, blob in sorted(self.files.items())]


def folder_of(pack: Pack) -> Path:
    return Path(constants.HF_HUB_CACHE) / f"models--{pack.id.replace('/', '--')}"


def look(pack: Pack) -> Snapshot | None:
    """The pack's own revision, never another one beside it. Raises LauncherError where it may not be read."""
    folder = folder_of(pack) / "snapshots" / pack.revision
    files, broken = {}, []
    try:
        if not folder.is_dir():
            return None
        for path in sorted(below(folder)):
            name = path.relative_to(folder).as_posix()
            blob = target_of(path)
            if blob is None:
                broken.append(name)
            else:
                files[name] = blob
        return Snapshot(folder, files, tuple(broken), tuple(missing_shards(files, pack)))
    except PermissionError as error:
        raise LauncherError(
            f"{error.filename}: the Hub's cache has {pack.id} there and this user may not read it (made by root?); "
            f"`sudo chown -R $USER {folder_of(pack)}`, or leave it out with --ignore-cache."
        ) from error


def below(folder: Path):
    """Files and links; raises what os.walk would swallow."""

    def fail(error: OSError):
        raise error

    for here, folders, names in os.walk(folder, onerror=fail):
        links = [name for name in folders if Path(here, name).is_symlink()]
        yield from (Path(here, name) for name in (*names, *links))


def target_of(path: Path) -> Path | None:
    """Where a link leads, None for nowhere: dangling, or in a circle."""
    try:
        real = Path(os.path.realpath(path, strict=True))
        with real.open("rb"):
            return real
    except OSError as error:
        if error.errno == errno.EACCES:
            raise
        return None


def missing_shards(files: Mapping[str, Path], pack: Pack) -> list[str]:
    """What a whole pack has and this has not; by its index, and by the number of shards that the pack is known for."""
    needed = ("config.json", "tokenizer.json") if pack.kind == "model" else ("config.json",)
    missing = [name for name in needed if name not in files]
    if INDEX not in files:
        return missing if pack.shards == 1 and SINGLE in files else [*missing, INDEX if pack.shards > 1 else SINGLE]
    try:
        named = set(json.loads(files[INDEX].read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        return [*missing, INDEX]
    if len(named) != pack.shards:
        return [*missing, f"{abs(pack.shards - len(named))} of {pack.shards} shards"]
    return [*missing, *sorted(named - set(files))]


def wanted_of(name: str, blob: Path) -> Wanted:
    size = blob.stat().st_size
    if re.fullmatch(r"[0-9a-f]{64}", blob.name):
        return Wanted(name, size, sha256=blob.name)
    if re.fullmatch(r"[0-9a-f]{40}", blob.name):
        return Wanted(name, size, git_sha1=blob.name)
    raise LauncherError(
        f"{blob}: the cache's files are named by their hashes and this one is not, so nothing says what {name} should "
        f"be; leave the cache out with --ignore-cache."
    )


def blobs_of(packs: list[Pack]) -> dict[str, Path]:
    """Hash -> whole blob, of every revision of these packs; a stale revision shares most of its files."""
    found = {}
    for pack in packs:
        try:
            for path in (folder_of(pack) / "blobs").iterdir():
                if re.fullmatch(r"[0-9a-f]{40}([0-9a-f]{24})?", path.name) and os.access(path, os.R_OK):
                    found[path.name] = path
        except OSError:
            continue  # not in the cache, or not for this user; then it is fetched
    return found
