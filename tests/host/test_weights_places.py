"""./download.sh where the disk does not play along: full, read-only, of another user, on another file system."""

import functools
import os
import shutil
import subprocess
import tempfile
from ctypes import CDLL, get_errno
from pathlib import Path

import pytest
from huggingface_hub.utils import get_session
from small_packs import fill_cache, read_folder

from launcher.errors import Exit
from launcher.weights import place, record

CLONE_NEWNS = 0x20000
SHARD = "model-00001-of-00003.safetensors"
needs_root = pytest.mark.needs("root")
needs_mounts = pytest.mark.needs("root", "namespaces", "mount")


def mount(*steps: tuple[str, ...]) -> None:
    """Commands in a view of the file systems that only this process has."""
    if CDLL(None, use_errno=True).unshare(CLONE_NEWNS):
        raise OSError(get_errno(), "unshare")
    for step in (("mount", "--make-rprivate", "/"), *steps):
        subprocess.run(step, check=True)


def tmpfs(folder: Path, options: str) -> tuple[str, ...]:
    folder.mkdir(exist_ok=True)
    return ("mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder))


@needs_mounts
def test_a_disk_that_is_too_small_is_told_before_anything_is_fetched(hub_machine):
    hub_machine.publish(shards=4, filler=100_000)
    small = functools.partial(mount, tmpfs(hub_machine.model, "size=300k"))
    done = hub_machine.start(before=small).wait()
    assert done.code == Exit.REFUSED
    assert f"MODEL_DIR {hub_machine.model}: 509.2 KiB more are needed on that disk and 300.0 KiB are free" in done.said
    assert not hub_machine.hub.sent


@needs_mounts
def test_two_folders_on_one_disk_need_the_sum(hub_machine):
    hub_machine.publish(shards=3)
    disk = hub_machine.root / "disk"
    folders = {"MODEL_DIR": str(disk / "model"), "DRAFT_DIR": str(disk / "draft"), "SPEC_METHOD": "dflash"}
    done = hub_machine.start(before=functools.partial(mount, tmpfs(disk, "size=88k")), **folders).wait()
    assert done.code == Exit.REFUSED
    assert f"MODEL_DIR {disk}/model and DRAFT_DIR {disk}/draft: 93." in done.said
    alone = functools.partial(mount, tmpfs(disk, "size=400k"))
    assert hub_machine.start(before=alone, **folders | {"SPEC_METHOD": "none"}).wait().code == Exit.OK


@needs_mounts
def test_what_is_there_already_is_counted(hub_machine):
    files = hub_machine.publish(shards=4, filler=100_000)
    shard = "model-00001-of-00004.safetensors"
    (hub_machine.root / "source").mkdir()
    (hub_machine.root / "source" / shard).write_bytes(files[shard])
    fill = ("cp", "-r", f"{hub_machine.root}/source/.", str(hub_machine.model))
    steps = (tmpfs(hub_machine.model, "size=520k"), fill)
    done = hub_machine.start("--dry-run", before=functools.partial(mount, *steps)).wait()
    assert done.code == Exit.OK, done.said
    assert "there, to be hashed: 1 files" in done.said


@needs_mounts
def test_a_disk_that_fills_up_meanwhile_loses_nothing(hub_machine):
    """Out of file entries, which no sum of bytes foresees."""
    files = hub_machine.publish(shards=4, filler=100_000)
    disk = hub_machine.root / "disk"
    disk.mkdir()
    subprocess.run(tmpfs(disk, "size=4m,nr_inodes=9"), check=True)
    try:
        done = hub_machine.call("--streams", "1", MODEL_DIR=str(disk / "model"))
        assert done.code == Exit.REFUSED
        assert "the disk is full; what has arrived is kept. Free some room" in done.said
        assert record.read(disk / "model") is None
        subprocess.run(["mount", "-o", "remount,nr_inodes=1000", disk], check=True)
        hub_machine.must(MODEL_DIR=str(disk / "model"))
        assert read_folder(disk / "model") == files
        assert hub_machine.hub.sent.total() <= sum(map(len, files.values())) + 200_000  # the file in flight
    finally:
        subprocess.run(["umount", disk], check=True)


@needs_mounts
def test_a_read_only_target_is_named(hub_machine):
    hub_machine.publish(shards=3)
    done = hub_machine.start(before=functools.partial(mount, tmpfs(hub_machine.model, "ro"))).wait()
    assert done.code == Exit.REFUSED
    assert f"{hub_machine.model}/.download.lock: Read-only file system; make {hub_machine.model} a folder" in done.said
    assert not hub_machine.hub.sent


@needs_mounts
def test_a_cache_on_another_disk_is_copied_once(hub_machine):
    files = hub_machine.publish(shards=3)
    disk = hub_machine.root / "disk"
    disk.mkdir()
    subprocess.run(tmpfs(disk, "size=1m"), check=True)
    try:
        fill_cache(hub_machine.cache, hub_machine.table[0], files)
        for number, begin in ((1, files[SHARD][:7_000]), (3, bytes(7_000))):  # of an earlier copy; the second damaged
            part = place.part_of(disk / "model", SHARD.replace("1-of", f"{number}-of"))
            part.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(begin)
        hub_machine.must(MODEL_DIR=str(disk / "model"))
        assert read_folder(disk / "model") == files and hub_machine.hub.requests == []
    finally:
        subprocess.run(["umount", disk], check=True)


def become_nobody(url: str) -> None:
    """After a first request: Python's own files may lie where only root can read them."""
    get_session().get(url)
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)


@pytest.fixture
def open_root(hub_machine):
    """The machine below a folder that every user may enter, made by a root whose umask lets them."""
    umask = os.umask(0o022)
    root = Path(tempfile.mkdtemp())
    os.chmod(root, 0o777)
    hub_machine.root = root
    hub_machine.model, hub_machine.cache, hub_machine.home = root / "model", root / "cache", root / "home"
    hub_machine.home.mkdir()
    hub_machine.settings["MODEL_DIR"] = str(hub_machine.model)
    yield hub_machine
    os.umask(umask)
    shutil.rmtree(root)


@needs_root
def test_a_cache_made_by_root_is_copied_where_it_can_be_read(open_root):
    """The kernel lets nobody link a file that is not theirs to write."""
    files = open_root.publish(shards=3)
    snapshot = fill_cache(open_root.cache, open_root.table[0], files)
    os.system(f"chmod -R go+rX {open_root.cache}")
    done = open_root.start(before=functools.partial(become_nobody, open_root.hub.url)).wait()
    assert done.code == Exit.OK, done.said
    assert read_folder(open_root.model) == files and not open_root.hub.sent
    protected = Path("/proc/sys/fs/protected_hardlinks").read_text().strip() == "1"
    same = (open_root.model / "config.json").stat().st_ino == (snapshot / "config.json").stat().st_ino
    assert same != protected


@needs_root
@pytest.mark.parametrize("closed", ["snapshots", "blobs"])
def test_a_cache_made_by_root_that_cannot_be_read_is_named(open_root, closed):
    files = open_root.publish(shards=3)
    snapshot = fill_cache(open_root.cache, open_root.table[0], files)
    os.chmod(snapshot.parent.parent / closed, 0o700)
    nobody = functools.partial(become_nobody, open_root.hub.url)
    done = open_root.start(before=nobody).wait()
    assert done.code == Exit.REFUSED
    assert "this user may not read it (made by root?); `sudo chown -R $USER" in done.said
    assert open_root.start("--ignore-cache", before=nobody).wait().code == Exit.OK
    assert read_folder(open_root.model) == files


@needs_root
def test_a_folder_of_another_user_is_named(open_root):
    open_root.publish(shards=3)
    open_root.model.mkdir(mode=0o755)
    done = open_root.start(before=functools.partial(become_nobody, open_root.hub.url)).wait()
    assert done.code == Exit.REFUSED and f"{open_root.model}/.download.lock: Permission denied" in done.said
    assert not open_root.hub.sent
