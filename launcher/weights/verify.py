"""./download.sh verify: headers, hashes and record of a folder of weights; names what is bad, fetches nothing."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from launcher import console
from launcher.errors import LauncherError
from launcher.weights import cache, contents, download, hub, packs, place, record
from launcher.weights.download import Job, Options
from launcher.weights.hashing import digests_and_stats, usual_workers
from launcher.weights.hub import Gone, Wanted
from launcher.weights.meter import Meter, size, work
from launcher.weights.place import Bad, Filling
from launcher.weights.record import FileEntry, FileStat, Manifest, Verified

OWN = "own"  # the pack's name in the record of a checkpoint that is nobody's


def run(jobs: Sequence[Job], options: Options, *, full: bool, own: bool) -> None:
    """Raises LauncherError at the first folder that is not what it should be."""
    for job in jobs:
        if not job.folder.is_dir():
            raise LauncherError(
                f"{job.setting} {job.folder}: there is no such folder; ./download.sh makes and fills it."
            )
        with place.lock(job.folder), place.file_errors(job.folder):
            takes_own = own and not is_known(job)
            verified = verify_own(job) if takes_own else verify_one(job, options, full=full)
        console.say(f"{job.setting} {job.folder}: {len(verified.stats)} files of {verified.manifest.pack}, "
                    f"{size(verified.manifest.total_bytes)}, verified")  # fmt: skip


def is_known(job: Job) -> bool:
    """A folder that is verified as one of the table's packs stays that."""
    present = record.read(job.folder)
    return bool(present and packs.by_id(present.manifest.pack) and not record.changed(job.folder, present))


def verify_one(job: Job, options: Options, *, full: bool) -> Verified:
    """Hashes what is not known to be unchanged since it was last right; all of it with `full`.

    The record stays until something is found to be wrong, so that an interrupted look takes nothing away.
    """
    present = record.read(job.folder)
    name, revision, wanted = expected(job, present, options)
    state = place.look(job.folder, wanted)
    if full:
        state.unverified += [file for file in wanted if file.name in state.verified]
        state.verified = {}
    elif present and len(state.verified) == len(wanted):
        return present
    filling = Filling(job.folder, name, revision)
    filling.accept(state.verified)
    bad = [*state.bad, *(Bad(file.name, f"{file.bytes} bytes", "nothing") for file in state.missing)]
    if state.unverified:
        bad += filling.verify_in_place(f"{job.kind} hashes", state.unverified)
    if bad:
        record.remove(job.folder)
        shown = "".join(f"\n  {one}" for one in bad[:10]) + ("\n  ..." if len(bad) > 10 else "")
        raise LauncherError(
            f"{job.setting} {job.folder}: {len(bad)} of {len(wanted)} files are not those of {name}:{shown}\n"
            f"./download.sh fetches these alone again and keeps what is there now in {place.ASIDE}."
        )
    return filling.finish(contents.read(job.folder, job.kind))


def expected(job: Job, present: Verified | None, options: Options) -> tuple[str, str, Sequence[Wanted]]:
    """(pack, revision, files): by the record, else by the cache, else by the Hub."""
    known = present or record.read(job.folder / place.PARTIAL)
    pack = packs.by_id(known.manifest.pack if known else job.source) or packs.of_kind(job.kind)[0]
    if present:
        return present.manifest.pack, present.manifest.revision, download.wanted_of(present)
    snapshot = None if options.ignore_cache else cache.look(pack)
    if snapshot and not snapshot.missing:
        return pack.id, pack.revision, snapshot.wanted()
    try:
        wanted = hub.files_of(pack)
    except Gone as error:
        raise download.gone(pack, error) from error
    download.refuse_foreign(job, pack.id, wanted, place.look(job.folder, wanted))
    return pack.id, pack.revision, wanted


def verify_own(job: Job) -> Verified:
    """A checkpoint that no table knows: its headers are checked, and its bytes are the measure from now on."""
    found = contents.read(job.folder, job.kind)
    paths = files_below(job.folder)
    meter = Meter(sum(path.stat().st_size for path in paths))
    hashing = [lambda: digests_and_stats(paths, usual_workers(), meter.add)]
    (hashed,) = work(f"{job.kind} hashes", meter, hashing, 1, threading.Event())
    names = {path.relative_to(job.folder).as_posix(): hashed[path] for path in paths}
    files = tuple(FileEntry(name, stat.st_size, digest) for name, (digest, stat) in sorted(names.items()))
    revision = hashlib.sha256("".join(f"{file.name}\0{file.sha256}\n" for file in files).encode()).hexdigest()
    stats = {name: FileStat(stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, (_, stat) in names.items()}
    verified = Verified(Manifest(OWN, revision, files), stats)
    contents.keep(job.folder, found, verified)
    record.write(job.folder, verified)
    console.say("Note: nothing says what its author published; from now on a change of these bytes is noticed.")
    return verified


def files_below(folder: Path) -> list[Path]:
    """What would be served and copied: no hidden files, and no links, which a container cannot follow."""
    found = []
    for here, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for path in (Path(here, name) for name in sorted(names) if not name.startswith(".")):
            if path.is_symlink():
                raise LauncherError(f"{path}: is a link, which a container cannot follow; put the file itself there.")
            found.append(path)
    return found
