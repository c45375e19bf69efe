"""./download.sh: decides where each pack comes from (its folder, the Hub's cache, a disk, the Hub), and fetches it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from launcher import console
from launcher.checkpoint import INDEX
from launcher.errors import LauncherError
from launcher.weights import cache, contents, headers, hub, packs, patience, place, record
from launcher.weights.hashing import usual_workers
from launcher.weights.hub import Gone, Wanted
from launcher.weights.meter import Meter, size, work
from launcher.weights.packs import Pack
from launcher.weights.place import Bad, Filling, State
from launcher.weights.record import Verified

SPARE_PART = 100  # of what is needed, a hundredth more has to be free: metadata, the launcher's own files


@dataclass(frozen=True)
class Options:
    yes: bool = False
    dry_run: bool = False
    ignore_cache: bool = False
    streams: int = 4


@dataclass(frozen=True)
class Job:
    """A folder that is to hold a pack."""

    kind: str  # model or draft
    folder: Path
    source: str = ""  # of the pack, where the user says

    @property
    def setting(self) -> str:
        return {"model": "MODEL_DIR", "draft": "DRAFT_DIR"}[self.kind]


@dataclass
class Plan:
    """Where everything comes from. `local`: files on this machine, by name; the rest of what is missing is fetched."""

    job: Job
    name: str  # of the pack
    revision: str
    wanted: Sequence[Wanted]
    state: State
    pack: Pack | None = None  # None: there is nothing to fetch it from
    local: Mapping[str, Path] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return len(self.state.verified) == len(self.wanted)

    @property
    def absent(self) -> list[Wanted]:
        """What has to be brought, also in the place of what is bad."""
        bad = {one.name for one in self.state.bad}
        return [*self.state.missing, *(file for file in self.wanted if file.name in bad)]

    @property
    def fetched(self) -> list[Wanted]:
        return [file for file in self.absent if file.name not in self.local]

    def part_bytes(self, file: Wanted) -> int:
        return min(file.bytes, hub.size_of(place.part_of(self.job.folder, file.name)))

    @property
    def linked(self) -> list[Wanted]:
        """What needs no room."""
        return [file for file in self.absent if file.name in self.local
                and place.can_link(self.local[file.name], self.job.folder)]  # fmt: skip

    @property
    def needed_bytes(self) -> int:
        """More room than is taken already."""
        return sum(file.bytes - self.part_bytes(file) for file in set(self.absent) - set(self.linked))


# Planning


def plan(job: Job, options: Options) -> Plan:
    """Asks the Hub only when the folder and the cache do not have everything."""
    present = record.read(job.folder)
    if present and fits(job, present) and of_record(job, present).is_complete:
        return of_record(job, present)
    candidates = candidates_of(job)
    if not options.ignore_cache:
        for pack in candidates:
            snapshot = cache.look(pack)
            if snapshot and not snapshot.missing:
                return of_snapshot(job, pack, snapshot)
            if snapshot and snapshot.broken:
                console.say(f"Note: the Hub's cache has {pack.id} with {len(snapshot.broken)} links that lead nowhere, "
                            f"first {snapshot.broken[0]}; what is whole there is used.")  # fmt: skip
    pack, wanted = ask_hub(candidates[0], options)
    return of_hub(job, pack, wanted, options)


def fits(job: Job, present: Verified) -> bool:
    """Whether what is there may stay: any pack where none is asked for, and the same bytes under another name; but not
    what the table has at another revision by now."""
    asked, known = packs.by_id(job.source), packs.by_id(present.manifest.pack)
    if known and known.revision != present.manifest.revision:
        return False
    return asked is None or present.manifest.pack in {asked.id, *(twin.id for twin in packs.twins(asked))}


def candidates_of(job: Job) -> list[Pack]:
    """In the order in which they are looked for; a folder that was begun goes on with the same bytes."""
    known = packs.of_kind(job.kind)
    asked = packs.by_id(job.source)
    begun = record.read(job.folder / place.PARTIAL) or record.read(job.folder)
    was = packs.by_id(begun.manifest.pack) if begun else None
    if begun and asked and begun.manifest.pack not in {asked.id, *(twin.id for twin in packs.twins(asked))}:
        raise LauncherError(
            f"{job.folder}: holds {begun.manifest.pack}, and WEIGHTS_SOURCE asks for {asked.id}; set {job.setting} to "
            f"another folder, or move this one away. Nothing was changed."
        )
    if asked:
        return [asked, *packs.twins(asked)]
    if was:
        family = {was.id, *(twin.id for twin in packs.twins(was))}
        return [pack for pack in known if pack.id in family]
    return known


def of_record(job: Job, present: Verified) -> Plan:
    wanted = wanted_of(present)
    return Plan(job, present.manifest.pack, present.manifest.revision, wanted, place.look(job.folder, wanted))


def wanted_of(verified: Verified) -> list[Wanted]:
    return [Wanted(entry.name, entry.bytes, sha256=entry.sha256) for entry in verified.manifest.files]


def of_snapshot(job: Job, pack: Pack, snapshot: cache.Snapshot) -> Plan:
    wanted = snapshot.wanted()
    state = place.look(job.folder, wanted)
    made = Plan(job, pack.id, pack.revision, wanted, state, pack, snapshot.files)
    refuse_other(made)
    made.notes.append(f"{pack.id} is whole in the Hub's cache ({snapshot.folder}) and is taken from there")
    if pack is not packs.of_kind(job.kind)[0] and pack.id != job.source:
        first = packs.by_id(job.source) or packs.of_kind(job.kind)[0]
        how = "the same bytes as" if first in packs.twins(pack) else "another conversion than the default"
        made.notes.append(f"{pack.id} holds {how} {first.id}; licence {pack.licence}. "
                          f"To have the other: WEIGHTS_SOURCE={first.id} ./download.sh --ignore-cache")  # fmt: skip
    return made


def ask_hub(pack: Pack, options: Options) -> tuple[Pack, list[Wanted]]:
    """The pack, or its twin where it is gone and the user agrees."""
    try:
        return pack, hub.files_of(pack)
    except Gone as error:
        twin = next(iter(packs.twins(pack)), None)
        if twin is None or not options.yes:
            raise gone(pack, error) from error
        console.say(f"{pack.id} is gone ({error}). --yes: {twin.id} is taken, which holds the same bytes.")
    try:
        return twin, hub.files_of(twin)
    except Gone as error:
        raise gone(twin, error) from error


def gone(pack: Pack, error: Gone) -> LauncherError:
    seen = f"{pack.id} at {pack.revision[:12]} is not to be had from {hub.endpoint()} ({error})"
    token = "; if HF_TOKEN or a Hub login is set, see that it is valid" if "401" in str(error) else ""
    if "Gated" in str(error):
        token = f"; {pack.page} tells how to get access, HF_TOKEN then carries it"
    others = [*packs.twins(pack), *(other for other in packs.of_kind(pack.kind)
                                    if other not in (pack, *packs.twins(pack)))]  # fmt: skip
    if not others:
        return LauncherError(f"{seen}{token}. There is no other source of it; bring it from a disk: --from DIR.")
    offers = [offer(pack, other) for other in others]
    return LauncherError(f"{seen}{token}. Others, none of which is taken unasked:\n  " + "\n  ".join(offers))


def offer(pack: Pack, other: Pack) -> str:
    twins = packs.twins(pack)
    what = "the same bytes" if other in twins else "another conversion"
    terms = f": {other.restricts}" if other.restricts else ""
    shorter = ", or ./download.sh --yes" if other in twins[:1] else ""
    return f"{other.id} ({what}, licence {other.licence}{terms}): WEIGHTS_SOURCE={other.id} ./download.sh{shorter}"


def of_hub(job: Job, pack: Pack, wanted: list[Wanted], options: Options) -> Plan:
    state = place.look(job.folder, wanted)
    refuse_foreign(job, pack.id, wanted, state)
    blobs = {} if options.ignore_cache else cache.blobs_of([pack, *packs.twins(pack)])
    local = {file.name: blobs[key] for file in wanted for key in (file.sha256 or file.git_sha1,)
             if key in blobs and blobs[key].stat().st_size == file.bytes}  # fmt: skip
    return Plan(job, pack.id, pack.revision, wanted, state, pack, {**local, **state.links})


def refuse_other(made: Plan) -> None:
    refuse_foreign(made.job, made.name, made.wanted, made.state)


def refuse_foreign(job: Job, pack: str, wanted: Sequence[Wanted], state: State) -> None:
    """Another checkpoint is not a damaged one: nothing of it is moved. By sizes, and what hashes have shown so far."""
    shards = {file.name for file in wanted if file.name.endswith(".safetensors")}
    bad = [one for one in state.bad if one.name in shards and one.is_other_content]
    right = shards & {*state.verified, *(file.name for file in state.unverified)}
    if len(bad) > max(1, len(right)) or has_other_shards(job.folder, shards):
        seen = f"{len(bad)} of its shards differ, first {bad[0]}" if bad else f"{INDEX} names other shards"
        raise LauncherError(
            f"{job.folder}: holds another checkpoint than {pack} ({seen}); set {job.setting} to another folder or move "
            f"this one away. To serve it as it is: ./download.sh verify --own."
        )


def has_other_shards(folder: Path, shards: set[str]) -> bool:
    """Whether the index there, if it can be read, names other files."""
    if not shards or not (folder / INDEX).is_file():
        return False
    try:
        return not set(headers.read_weight_map(folder / INDEX).values()) <= shards
    except LauncherError:
        return False  # damaged, which is another matter


# Saying


def describe(made: Plan) -> Iterator[str]:
    state, job = made.state, made.job
    if made.is_complete:
        yield f"{job.setting} {job.folder}: {made.name} is there, {len(made.wanted)} files verified; nothing to do"
        return
    total = sum(file.bytes for file in made.wanted)
    yield f"{job.setting} {job.folder}: {made.name} at {made.revision[:12]}, {len(made.wanted)} files, {size(total)}"
    parts = {
        "verified": [file for file in made.wanted if file.name in state.verified],
        "there, to be hashed": state.unverified,
        "to be linked from this machine": made.linked,
        "to be copied from this machine": [
            file for file in made.absent if file.name in made.local and file not in made.linked
        ],
        "to be fetched": made.fetched,
    }
    for word, files in parts.items():
        if files:
            begun = sum(made.part_bytes(file) for file in files) if word == "to be fetched" else 0
            arrived = f", {size(begun)} of it have arrived" if begun else ""
            yield f"  {word}: {len(files)} files, {size(sum(file.bytes for file in files))}{arrived}"
    for one in state.bad:
        yield f"  bad, will be moved to {place.ASIDE}: {one}"
    for note in made.notes:
        yield f"  Note: {note}"


def licence(made: Plan) -> str:
    """What has to be said once, before the first byte: empty where the licence restricts nothing, or it was said."""
    pack = made.pack
    if not pack or not pack.restricts or made.is_complete or (made.job.folder / place.PARTIAL).exists():
        return ""
    return f"Licence of {pack.id}: {pack.licence} ({pack.page}): {pack.restricts}."


def check_room(plans: Sequence[Plan]) -> None:
    """By file system: two folders on one disk need the sum."""
    needs: dict[int, list[Plan]] = {}
    for made in plans:
        needs.setdefault(place.nearest(made.job.folder).stat().st_dev, []).append(made)
    for group in needs.values():
        needed = sum(made.needed_bytes for made in group)
        needed += needed // SPARE_PART
        where = place.nearest(group[0].job.folder)
        disk = os.statvfs(where)
        free = disk.f_bavail * disk.f_frsize
        if needed > free:
            what = " and ".join(f"{made.job.setting} {made.job.folder}" for made in group)
            raise LauncherError(
                f"{what}: {size(needed)} more are needed on that disk and {size(free)} are free; what is there "
                f"already is counted. Free {size(needed - free)} (df -h {where}), or set another folder."
            )


# Doing


def run(jobs: Sequence[Job], options: Options) -> list[Plan]:
    """Plans everything, then does it. Raises LauncherError, with what has arrived kept."""
    plans = []
    for job in jobs:
        with place.file_errors(job.folder):
            plans.append(plan(job, options))
    carry_out(plans, options)
    return plans


def carry_out(plans: Sequence[Plan], options: Options) -> None:
    for made in plans:
        console.say("\n".join(describe(made)))
    check_room(plans)
    if options.dry_run:
        for made in plans:
            print("".join(f"{file.bytes:>14}  {file.name}  ({made.name})\n" for file in made.fetched), end="")
        return
    for made in plans:
        if licence(made):
            console.say(licence(made))
    for made in plans:
        fill(made, options)


def fill(made: Plan, options: Options) -> Verified:
    folder = made.job.folder
    if made.is_complete and record.read(folder):
        return record.read(folder)
    with place.lock(folder), place.file_errors(folder):
        made.state = place.look(folder, made.wanted)  # again: until now another download may have worked here
        filling = Filling(folder, made.name, made.revision)
        filling.accept(made.state.verified)
        record.remove(folder)  # the folder is about to change
        try:
            check_unverified(made, filling)
            bring_local(made, filling)
            bring_fetched(made, filling, options)
        except Gone as error:
            raise gone(made.pack, error) from error
        verified = filling.finish(contents.read(folder, made.job.kind))
    console.say(f"{made.job.setting} {folder}: {len(verified.stats)} files of {made.name}, every one verified")
    return verified


def check_unverified(made: Plan, filling: Filling) -> None:
    """Files of the right size that nobody has hashed yet."""
    state = made.state
    if state.unverified:
        state.bad += filling.verify_in_place(f"{made.job.kind} hashes", state.unverified)
        state.verified, state.unverified = dict(filling.verified), []
        refuse_other(made)
    for kept in filling.put_aside(state.bad):
        console.say(f"  moved aside: {kept}")


def bring_local(made: Plan, filling: Filling) -> None:
    files = [file for file in made.absent if file.name in made.local]
    bad = bring_twice(made, filling, files, place.from_files(made.local), usual_workers())
    if bad:
        console.say("\n".join(f"  not used: {one}" for one in bad))
        if made.pack is None or hub.is_offline():
            raise LauncherError(f"{made.local[bad[0].name]}: {bad[0]}; this copy of the weights is damaged, and there "
                                f"is no other here. Get that file again, then run the same command.")  # fmt: skip
        made.local = {name: path for name, path in made.local.items() if name not in {one.name for one in bad}}


def bring_fetched(made: Plan, filling: Filling, options: Options) -> None:
    files = [file for file in made.fetched if file.name not in filling.verified]
    if files and made.pack is None:
        raise LauncherError(f"{made.job.folder}: {files[0].name} is not in the source; it is incomplete.")
    bad = bring_twice(made, filling, files, partial(hub.fetch, made.pack), options.streams)
    if bad:
        raise LauncherError(
            f"{bad[0]}. {hub.endpoint()} sent wrong bytes twice; what is right is kept. Try another endpoint "
            f"(HF_ENDPOINT), another source (WEIGHTS_SOURCE), or later."
        )


def bring_twice(made: Plan, filling: Filling, files: Sequence[Wanted], source, workers: int) -> list[Bad]:
    """What is wrong even the second time: the first may have gone on from a part that a loss of power damaged."""
    bad = bring_all(made, filling, files, source, workers)
    if not bad:
        return []
    console.say("\n".join(f"  wrong bytes, once more from the beginning: {one}" for one in bad))
    names = {one.name for one in bad}
    return bring_all(made, filling, [file for file in files if file.name in names], source, workers)


def bring_all(made: Plan, filling: Filling, files: Sequence[Wanted], source, workers: int) -> list[Bad]:
    """Brings and verifies; what is wrong is returned."""
    if not files:
        return []
    total = sum(file.bytes for file in files)
    meter = Meter(total, sum(made.part_bytes(file) for file in files))
    meter.note = patience.GATE.text
    filling.on_bytes = meter.add
    filling.stop.clear()
    jobs = [partial(filling.bring, file, source) for file in sorted(files, key=lambda file: file.bytes)]
    return [one for one in work(made.job.kind, meter, jobs, workers, filling.stop) if one]
