"""Weights, draft, their records and the launcher's own packages on a disk, for a head without a network."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from launcher import console, pip_output
from launcher.errors import Exit, LauncherError
from launcher.settings import REPOSITORY
from launcher.weights import download, place, record
from launcher.weights.download import Job, Options, Plan
from launcher.weights.record import Verified

LOCK = REPOSITORY / "requirements" / "launcher.txt"
NAME, WHEELS, IMAGE = "bundle.json", "wheels", "image.tar"
# What a Spark's head has (DGX OS); the machine that makes the bundle comes on top.
TARGETS = (("3.12", "manylinux_2_31_aarch64"), ("3.12", "manylinux_2_28_aarch64"), ("3.12", "manylinux_2_17_aarch64"))


def make(jobs: Sequence[Job], target: Path) -> None:
    """Only what is verified goes in, and it is verified again where it arrives."""
    plans = []
    for job in jobs:
        present = record.read(job.folder)
        if present is None or record.changed(job.folder, present):
            raise LauncherError(f"{job.setting} {job.folder}: is not verified; run `./download.sh` first.")
        plans.append(of_folder(Job(job.kind, target / job.kind), job.folder, present))
    for made in plans:
        console.say("\n".join(download.describe(made)))
    download.check_room(plans)
    for made in plans:
        download.fill(made, Options())
    collect_wheels(target / WHEELS)
    write_contents(jobs, plans, target)
    console.say(f"{target}: complete. On the other head: ./download.sh --from {target}")


def of_folder(job: Job, source: Path, verified: Verified) -> Plan:
    """Everything from a folder whose record says what it should be."""
    wanted = download.wanted_of(verified)
    local = {file.name: source / file.name for file in wanted}
    gone = [path for path in local.values() if not path.is_file()]
    if gone:
        raise LauncherError(f"{gone[0]}: is missing ({len(gone)} of {len(local)} files); copy it again, or make the "
                            f"bundle again: ./download.sh bundle DIR.")  # fmt: skip
    manifest = verified.manifest
    return Plan(job, manifest.pack, manifest.revision, wanted, place.look(job.folder, wanted), None, local)


def write_contents(jobs: Sequence[Job], plans: Sequence[Plan], target: Path) -> None:
    contents = {
        "packs": {made.job.kind: {"pack": made.name, "revision": made.revision} for made in plans},
        "wheels": WHEELS,
        "image": IMAGE if (target / IMAGE).exists() else None,
    }
    (target / NAME).write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")


def collect_wheels(folder: Path) -> None:
    """What the launcher's own environment is made of, for this machine and for a Spark."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    common = ["--require-hashes", "--only-binary", ":all:", "--dest", str(folder), "-r", str(LOCK)]
    platforms = [word for _, name in TARGETS for word in ("--platform", name)]
    for what, words in (("this machine", []), ("a Spark", ["--python-version", TARGETS[0][0], *platforms])):
        with console.phase(f"wheels, {what}"):
            done = subprocess.run([*pip, *words, *common], capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode:
            logging.getLogger("pip").error(done.stderr)
            raise LauncherError(
                f"{folder}: the launcher's packages for {what} could not be collected: "
                f"{pip_output.reason(done.stderr)}. What is in the bundle already is kept: run the same command again.",
                Exit.SETUP,
            )


def take(jobs: Sequence[Job], source: Path, options: Options) -> list[Plan]:
    """From a bundle into the folders that are served; never asks the Hub."""
    if not (source / NAME).is_file():
        raise LauncherError(
            f"{source}: is no complete bundle, {NAME} is missing; make one with `./download.sh bundle DIR`."
        )
    plans = []
    for job in jobs:
        verified = record.read(source / job.kind)
        if verified is None:
            raise LauncherError(
                f"{source / job.kind}: the bundle has no {job.kind}; " + (
                    "set SPEC_METHOD=mtp or none, or make the bundle again with the draft."
                    if job.kind == "draft" else "make it again: ./download.sh bundle DIR.")
            )  # fmt: skip
        made = of_folder(job, source / job.kind, verified)
        download.refuse_other(made)
        plans.append(made)
    download.carry_out(plans, options)
    if (source / IMAGE).exists():
        console.say(f"The bundle also holds the image; on every node: docker load -i {source / IMAGE}")
    return plans
