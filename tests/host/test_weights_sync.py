"""Weights on the way to another node, over real sshd and rsync: interrupted, damaged, in the way, out of room."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from loopback import MIB, REVISION, fill, settings, verify
from page_cache import resident_bytes

from launcher import console
from launcher.errors import LauncherError
from launcher.weights import agent, record, sync, worker

REPOSITORY = Path(__file__).resolve().parents[2]


def run(node, full: bool = False, **changes: str) -> str:
    """What the user reads of a sync."""
    said: list[str] = []
    sync.tell(sync.sync(settings(node, **changes), full=full), said.append)
    return "\n".join(said)


def refusal(node, full: bool = False, **changes: str) -> str:
    with pytest.raises(LauncherError) as caught:
        run(node, full, **changes)
    return str(caught.value)


def assert_equal(node, folder: str = "model") -> None:
    """Bit-equal, with a record that holds, and nothing left of the work."""
    there = node.worker / folder
    verified = record.read(there)
    assert verified.manifest == record.read(node.head / folder).manifest
    assert record.changed(there, verified) == []
    for entry in verified.manifest.files:
        assert (there / entry.name).read_bytes() == (node.head / folder / entry.name).read_bytes(), entry.name
    assert not (there / ".exl3-sync").exists()


@pytest.mark.needs("TMPDIR on a disk")
def test_a_worker_gets_what_the_head_verified_and_proves_it(pair):
    verified = fill(pair.head / "model")
    shards = [pair.head / "model" / entry.name for entry in verified.manifest.files]
    both = [*shards, *(pair.worker / "model" / path.name for path in shards)]
    said = run(pair)
    assert resident_bytes(*both) == 0
    assert_equal(pair)
    assert resident_bytes(*both) >= 8 * MIB  # the measure sees what the comparison has read
    assert said == "node 1 (10.0.0.2): MODEL_DIR 5 of 5 files copied (4.0 MiB), all hashed there and right."
    before = {path: path.stat().st_ino for path in (pair.worker / "model").iterdir()}
    sent = pair.link.sent
    assert "was there and verified already" in run(pair)
    assert {path: path.stat().st_ino for path in (pair.worker / "model").iterdir()} == before
    assert pair.link.sent - sent < 100_000


def test_a_record_of_the_worker_is_not_believed_by_name_alone(pair):
    """A wrong hash in the worker's own record must not pass: it is the manifest of the head that counts."""
    verified = fill(pair.head / "model")
    run(pair)
    shard = pair.worker / "model" / verified.manifest.files[0].name
    shard.write_bytes(bytes(MIB))
    names = [entry.name for entry in verified.manifest.files]
    verify(pair.worker / "model", names)  # says of itself that it is right
    assert f"{shard} was another one than its size said" in run(pair)
    assert_equal(pair)


def test_links_of_a_hub_cache_become_files(pair):
    blobs = pair.head / "blobs"
    fill(blobs)
    (pair.head / "model").mkdir()
    names = [path.name for path in blobs.iterdir() if path.name != record.NAME]
    for name in names:
        (pair.head / "model" / name).symlink_to(f"../blobs/{name}")
    verify(pair.head / "model", names)
    run(pair)
    assert_equal(pair)
    assert not any(path.is_symlink() for path in (pair.worker / "model").iterdir())


def test_draft_and_folders_below_go_too(pair):
    fill(pair.head / "model")
    (pair.head / "draft" / "sub").mkdir(parents=True)
    (pair.head / "draft" / "sub" / "a file's name").write_bytes(os.urandom(1000))
    verify(pair.head / "draft", ["sub/a file's name"])
    said = run(pair, SPEC_METHOD="dflash", DRAFT_DIR="~/draft")
    assert_equal(pair, "model")
    assert_equal(pair, "draft")
    assert "DRAFT_DIR 1 of 1 files copied" in said
    assert "left alone" not in run(pair, SPEC_METHOD="dflash", DRAFT_DIR="~/draft")


def test_an_empty_worker_and_a_foreign_path(pair):
    """Signs that a shell would read arrive as they are."""
    name = "a b'c;touch x&"
    fill(pair.head / name, shards=1)
    key = shutil.copy(pair.settings["SSH_KEY"], pair.head / "the head's key")
    run(pair, MODEL_DIR=f"~/{name}", SSH_KEY=str(key))
    assert_equal(pair, name)
    assert not (pair.worker / "x").exists()


@pytest.mark.parametrize("line, done, rest", [
    (b"     21823488   5%   19.83MB/s    0:00:19  ", b"21823488", b""),
    (b"      1048576  25%  968.75MB/s    0:00:00 (xfr#1, to-chk=3/4)", b"1048576", b""),
    (b"        32768   0%    0.00kB/s    0:00:00  rsync: no room", b"32768", b"rsync: no room"),
])  # fmt: skip
def test_progress_of_rsync_is_read_and_what_follows_it_is_kept(line, done, rest):
    found = agent.PROGRESS.match(line)
    assert (found[1], line[found.end() :]) == (done, rest)


def test_time_left_is_told_by_the_rate_so_far():
    step = agent.Step("copying", 50 << 30, 164 << 30, time.monotonic() - 100)
    assert str(step) == "copying 50.0 GiB of 164.0 GiB, 0.5 GiB/s, 4 min left"
    assert str(agent.Step()) == "looking"


# What is there already


def test_only_the_bad_file_is_replaced(pair):
    names = [entry.name for entry in fill(pair.head / "model").manifest.files]
    run(pair)
    there = pair.worker / "model"
    inodes = {name: (there / name).stat().st_ino for name in names}
    with (there / names[1]).open("r+b") as stream:
        stream.truncate(1000)
    said = run(pair)
    assert "1 of 5 files copied" in said
    assert [name for name in names if (there / name).stat().st_ino != inodes[name]] == [names[1]]
    assert_equal(pair)


def test_an_edit_that_hides_itself_is_found_by_full(pair):
    names = [entry.name for entry in fill(pair.head / "model").manifest.files]
    run(pair)
    shard = pair.worker / "model" / names[2]
    before = shard.stat()
    with shard.open("r+b") as stream:
        stream.seek(1000)
        stream.write(b"another weight")
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert "verified already" in run(pair)  # what only hashes can tell
    assert f"{shard} was another one than its size said, and was replaced" in run(pair, full=True)
    assert_equal(pair)
    assert "was hashed again and is right" in run(pair, full=True)


def test_another_revision_is_named_and_replaced(pair):
    fill(pair.head / "model", shards=5, revision="0" * 40)
    run(pair)
    old = pair.worker / "model" / "model-00001-of-00005.safetensors"
    (pair.worker / "model" / "notes.txt").write_text("mine")
    shutil.rmtree(pair.head / "model")
    fill(pair.head / "model")
    said = run(pair)
    assert f"revision {'0' * 40} was there, {REVISION} is now" in said
    assert f"{old} belonged to what was there before, and was removed" in said
    assert "notes.txt is not one of the weights; it was left alone" in said
    assert_equal(pair)
    assert not old.exists() and (pair.worker / "model" / "notes.txt").exists()


def test_another_revision_that_was_broken_off_is_still_known_and_cleared_away(pair):
    fill(pair.head / "model", shards=5, revision="0" * 40)
    run(pair)
    there = pair.worker / "model"
    shutil.rmtree(pair.head / "model")
    fill(pair.head / "model", shards=3, size=4 * MIB)
    pair.link.bytes_per_s = 8 * MIB
    began, process = pair.link.sent, in_background(pair)
    wait_for(lambda: pair.link.sent > began + 5 * MIB)
    process.kill()
    process.communicate()
    pair.link.bytes_per_s = None
    assert record.read(there) is None
    said = run(pair)
    assert f"revision {'0' * 40} was there, {REVISION} is now" in said
    assert said.count("belonged to what was there before, and was removed") == 5
    assert_equal(pair)


def test_another_checkpoint_that_no_sync_has_put_there_is_left_alone(pair):
    fill(pair.head / "model")
    there = pair.worker / "model"
    fill(there, revision="my own")
    record.remove(there)
    before = {path: path.read_bytes() for path in there.iterdir()}
    assert refusal(pair) == (
        f"node 1 (10.0.0.2): {there} holds another checkpoint, which no sync has put there: its config.json is not "
        f"that of owner/pack; move it away, or set MODEL_DIR, then run this again."
    )
    assert {path: path.read_bytes() for path in before} == before


def test_links_in_the_places_of_shards_are_replaced(pair):
    names = [entry.name for entry in fill(pair.head / "model").manifest.files]
    there = pair.worker / "model"
    there.mkdir()
    (there / names[0]).symlink_to("nowhere")
    (there / names[1]).symlink_to(names[1])
    run(pair)
    assert_equal(pair)


def test_what_somebody_copied_by_hand_is_hashed_and_kept(pair):
    names = [entry.name for entry in fill(pair.head / "model").manifest.files]
    shutil.copytree(pair.head / "model", pair.worker / "model", ignore=lambda *_: [record.NAME])
    sent = pair.link.sent
    assert "0 of 5 files copied" in run(pair)
    assert pair.link.sent - sent < 100_000
    assert_equal(pair)
    assert len(names) == 5


# Refusals


def test_an_unverified_head_is_refused(pair, monkeypatch):
    monkeypatch.setattr(sync, "SMALL_BYTES", 1000)
    fill(pair.head / "model")
    record.remove(pair.head / "model")
    assert "nobody has verified it; run `./download.sh verify`" in refusal(pair)
    assert not (pair.worker / "model").exists()


@pytest.mark.parametrize("damage", ["dangling", "loop", "missing", "edited"])
def test_a_damaged_head_is_refused_by_name(pair, damage):
    name = fill(pair.head / "model").manifest.files[1].name
    shard = pair.head / "model" / name
    if damage == "edited":
        shard.write_bytes(os.urandom(MIB))
    else:
        shard.unlink()
    if damage in ("dangling", "loop"):
        shard.symlink_to({"dangling": "nowhere", "loop": name}[damage])
    said = refusal(pair)
    assert f"1 of 5 files are not as they were when they were verified, first {name}" in said
    seen = {"dangling": "a link to nowhere", "loop": "symbolic links", "missing": "missing", "edited": "written 20"}
    assert seen[damage] in said
    assert not (pair.worker / "model").exists()


def test_a_folder_in_the_place_of_a_shard_is_refused_and_no_success_told(pair):
    name = fill(pair.head / "model").manifest.files[1].name
    (pair.worker / "model" / name / "full").mkdir(parents=True)
    said = refusal(pair)
    assert said == f"node 1 (10.0.0.2): {pair.worker}/model/{name} is a folder and should be a file; move it away."
    assert record.read(pair.worker / "model") is None
    (pair.worker / "model" / name / "full").rmdir()
    (pair.worker / "model" / name).rmdir()
    run(pair)
    assert_equal(pair)


@pytest.mark.parametrize("kind", ["file", "loop", "dangling"])
def test_something_in_the_place_of_the_folder_is_named(pair, kind):
    fill(pair.head / "model")
    place = pair.worker / "model"
    if kind == "file":
        place.write_text("")
    else:
        place.symlink_to({"loop": "model", "dangling": "nowhere"}[kind])
    assert f"node 1 (10.0.0.2): {place} cannot be written" in refusal(pair)


def test_bytes_that_arrive_wrong_twice_are_not_a_success(pair, monkeypatch):
    """The planted fault: the head's file changes behind its record's back, as bad memory would have it."""
    fill(pair.head / "model", revision="0" * 40)
    run(pair)
    verified = fill(pair.head / "model")
    shard = pair.head / "model" / verified.manifest.files[0].name
    before = shard.stat()
    with shard.open("r+b") as stream:
        stream.write(b"wrong")
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert f"{shard.name} arrived with another SHA-256 than" in refusal(pair)
    assert record.read(pair.worker / "model") is None  # nor is there the one of the revision before


def test_a_node_without_rsync_is_named(pair, monkeypatch):
    fill(pair.head / "model")
    source = agent.WORKER.read_text().replace('("rsync", "flock")', '("rsync-is-not-here", "flock")')
    (pair.head / "worker.py").write_text(source)
    monkeypatch.setattr(agent, "WORKER", pair.head / "worker.py")
    assert "node 1 (10.0.0.2): rsync-is-not-here not installed there; sudo apt-get install rsync" in refusal(pair)
    monkeypatch.setattr(sync, "PROGRAMS", ("rsync", "setpriv-is-not-here"))
    assert "setpriv-is-not-here not installed on this machine; sudo apt-get install" in refusal(pair)


@pytest.fixture
def disk(pair, need):
    """A small disk where the worker's weights belong."""
    need("root", "namespaces", "mount")
    place = pair.worker / "model"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(place)], check=True)
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_full_disk_is_known_before_and_named_after(pair, disk, monkeypatch):
    fill(pair.head / "model")
    said = refusal(pair)
    assert f"node 1 (10.0.0.2): {disk} needs 4.0 MiB more and its disk has 3.0 MiB free; free 1.0 MiB there" in said
    # Somebody else fills it while the copy is under way.
    monkeypatch.setattr(sync.Job, "refuse_what_is_in_the_way", lambda *_: None)
    assert re.search(r"rsync to .* ended with 11 .*its disk has [0-9.]+ MiB free", refusal(pair))
    assert record.read(disk) is None
    subprocess.run(["mount", "-o", "remount,size=30m", str(disk)], check=True)
    sent = pair.link.sent
    run(pair)
    assert_equal(pair)
    assert pair.link.sent - sent < 3 * MIB  # what had arrived was kept


def test_a_read_only_disk_is_named_and_one_that_is_complete_is_taken(pair, disk):
    fill(pair.head / "model", shards=2)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    assert f"{disk} cannot be written (Read-only file system)" in refusal(pair)
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    run(pair)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    assert "verified already" in run(pair)
    assert "was hashed again and is right" in run(pair, full=True)


def test_the_heads_own_folder_is_recognised_and_not_copied(pair):
    """As a network file system shows it on both nodes; here, by a link."""
    fill(pair.head / "model")
    (pair.worker / "model").symlink_to(pair.head / "model")
    assert "verified already" in run(pair)  # the record is there, and holds
    small = pair.head / "model"
    record.remove(small)
    sent = pair.link.sent
    assert "is this machine's own folder" in run(pair)
    assert pair.link.sent - sent < 100_000
    assert not (small / ".exl3-sync").exists() and record.read(small) is None


# More nodes, two at once, and killed ones


def test_of_two_other_nodes_one_that_fails_is_named_and_the_other_completed(pair):
    fill(pair.head / "model")
    three = settings(pair, "tp3", WORKER2_IP="10.0.0.3")
    (pair.other / "model").write_text("in the way")
    with pytest.raises(LauncherError) as caught:
        sync.sync(three)
    assert str(caught.value).startswith(f"node 2 (10.0.0.3): {pair.other}/model cannot be written")
    assert_equal(pair)
    (pair.other / "model").unlink()
    said: list[str] = []
    sync.tell(sync.sync(three), said.append)
    assert said == [
        "node 1 (10.0.0.2): MODEL_DIR was there and verified already.",
        "node 2 (10.0.0.3): MODEL_DIR 5 of 5 files copied (4.0 MiB), all hashed there and right.",
    ]
    assert record.read(pair.other / "model").manifest == record.read(pair.head / "model").manifest


SYNC = """
import json, sys
sys.path.insert(0, sys.argv[1])
from launcher import config, topology
from launcher.errors import LauncherError
from launcher.weights import sync
settings = config.load(topology.TOPOLOGIES["tp2"], None, ".env", json.loads(sys.argv[2]))
try:
    sync.tell(sync.sync(settings))
except LauncherError as error:
    sys.exit(str(error))
"""


def in_background(node) -> subprocess.Popen:
    argv = [sys.executable, "-I", "-c", SYNC, str(REPOSITORY), json.dumps(node.settings)]
    environment = {**os.environ, **node.environment}
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def test_of_two_at_once_one_waits_for_the_other(pair):
    fill(pair.head / "model", shards=8)
    sent = pair.link.sent
    pair.link.bytes_per_s = 8 * MIB
    both = [in_background(pair), in_background(pair)]
    said = [one.communicate(timeout=60)[0] for one in both]
    pair.link.bytes_per_s = None
    assert [one.returncode for one in both] == [0, 0], said
    assert_equal(pair)
    assert pair.link.sent - sent < 9 * MIB
    assert sum("9 of 9 files copied" in text for text in said) == 1


def wait_for(condition, timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_what_a_killed_rsync_left_is_where_the_next_one_looks(tmp_path):
    folder = worker.Folder(tmp_path, record.NAME)
    partial = tmp_path / ".exl3-sync/partial"
    partial.mkdir(parents=True)
    for name, size in (("a", 100), ("b", 100)):
        (partial / name).write_bytes(bytes(size))
    for name, size in (("a.x1Y2z3", 200), ("b.x1Y2z3", 50), ("model.safetensors.AbCdEf", 10), ("nonce-ab12", 1)):
        (tmp_path / ".exl3-sync" / name).write_bytes(bytes(size))
    room = folder.open("nonce-1")
    assert {path.name: path.stat().st_size for path in partial.iterdir()} == {
        "a": 200, "b": 100, "model.safetensors": 10
    }  # fmt: skip
    assert room["partial_bytes"] == 310
    assert sorted(path.name for path in (tmp_path / ".exl3-sync").iterdir()) == ["lock", "nonce-1", "partial"]
    folder.leave()
    assert partial.exists()
    shutil.rmtree(partial)
    partial.mkdir()
    folder.leave()
    assert not (tmp_path / ".exl3-sync").exists()


@pytest.mark.needs("TMPDIR on a disk")
def test_the_page_cache_stays_small_on_both_ends_while_it_copies(pair, monkeypatch):
    """Else 164 GiB of pages would go through the memory that a Spark's GPU needs."""
    monkeypatch.setattr(sync, "LET_GO_S", 0.2)
    fill(pair.head / "model", shards=1, size=32 * MIB)
    pair.link.bytes_per_s = 10 * MIB
    most = {"model": 0, "model/.exl3-sync": 0}  # by folder: what is sent, and what arrives
    with ThreadPoolExecutor() as pool:
        done = pool.submit(run, pair)
        while not done.done():
            for folder, home in zip(most, (pair.head, pair.worker), strict=True):
                most[folder] = max(most[folder], sum(map(resident_of, home.glob(f"{folder}/model-*"))))
            time.sleep(0.05)
    assert "all hashed there and right" in done.result()
    pair.link.bytes_per_s = None
    print({folder: f"{size / MIB:.0f} MiB" for folder, size in most.items()})
    assert all(MIB < size < 26 * MIB for size in most.values())


def resident_of(path: Path) -> int:
    try:
        return resident_bytes(path)
    except OSError:  # it was renamed meanwhile
        return 0


KILLS = 25
# On its way when a side is killed: buffers of sockets and pipes, what rsync has not yet written, and around it logins.
LOST_PER_KILL = MIB


def test_killed_at_any_moment_it_goes_on_where_it_was(pair):
    """25 times kill -9 of the sync, its children, or the receiving rsync; then the trees are equal to the bit."""
    verified = fill(pair.head / "model", shards=4, size=20 * MIB)
    total, sent = verified.manifest.total_bytes, pair.link.sent
    chance = random.Random(6)
    pair.link.bytes_per_s = 32 * MIB
    whole: dict[str, int] = {}
    for turn in range(KILLS):
        process = in_background(pair)
        wait_a_while(process, pair.link, chance)
        assert process.poll() is None, process.stdout.read()
        if turn % 3 == 2:
            kill_receivers(pair)
        process.kill()
        process.wait()
        process.stdout.close()
        for name, inode in whole.items():  # what was whole is not touched again
            assert (pair.worker / "model" / name).stat().st_ino == inode
        whole = {path.name: path.stat().st_ino for path in (pair.worker / "model").glob("model-*")}
        assert record.read(pair.worker / "model") is None
    pair.link.bytes_per_s = None
    run(pair)
    assert_equal(pair)
    lost = pair.link.sent - sent - total
    print(f"{lost / MIB:.1f} MiB sent twice or around the weights, {KILLS} kills, {total / MIB:.0f} MiB")
    assert lost < KILLS * LOST_PER_KILL


def wait_a_while(process: subprocess.Popen, link, chance: random.Random) -> None:
    """Until some more has been sent, or for a moment without that: while it looks, locks or hashes."""
    if chance.random() < 0.2:
        time.sleep(chance.random())
        return
    goal, deadline = link.sent + chance.randrange(100_000, 4_500_000), time.monotonic() + 10
    while link.sent < goal and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)


def kill_receivers(node) -> None:
    """The rsyncs at the other end, as if that node had lost its power."""
    for pid in [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]:
        try:
            is_rsync = Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"rsync\0--server")
            if is_rsync and os.path.realpath(f"/proc/{pid}/cwd").startswith(str(node.worker)):
                os.kill(pid, signal.SIGKILL)
        except (FileNotFoundError, ProcessLookupError):
            continue


def test_ctrl_c_ends_it_and_what_had_arrived_is_kept(pair, monkeypatch, capfd):
    """Until then, each node's progress is told."""
    monkeypatch.setattr(console, "HEARTBEAT_S", 0)
    fill(pair.head / "model", shards=4, size=2 * MIB)
    pair.link.bytes_per_s = 4 * MIB
    began = pair.link.sent
    timer = threading.Thread(target=lambda: (wait_for(lambda: pair.link.sent > began + 3 * MIB), interrupt()))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        run(pair)
    timer.join()
    pair.link.bytes_per_s, sent = None, pair.link.sent
    assert sent - began < 5 * MIB
    assert re.search(r"node 1: copying [\d.]+ MiB of 8\.0 MiB, [\d.]+ MiB/s, \d+ s left", capfd.readouterr().err)
    run(pair)
    assert_equal(pair)
    assert pair.link.sent - sent < 6 * MIB


def interrupt() -> None:
    import _thread

    _thread.interrupt_main()
