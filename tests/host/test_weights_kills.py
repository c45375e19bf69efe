"""./download.sh killed without a word at random moments, and what the next run does with what is left."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
from small_packs import read_folder

from launcher.errors import Exit
from launcher.weights import place, record

KILLS = 25


def on_disk(folder: Path, files: dict[str, bytes]) -> dict[str, int]:
    """Bytes of each file that a next run need not fetch."""
    sizes = {}
    for name in files:
        for path in (folder / name, place.part_of(folder, name)):
            if path.exists():
                sizes[name] = path.stat().st_size
    return sizes


def check_nothing_came_twice(asked: list[tuple[str, int]], before: dict[str, int], files: dict[str, bytes]) -> None:
    """Every stream began where its part on the disk ended, and what was whole was not asked for."""
    begun = set()
    for name, start in asked:
        if name not in begun:  # later streams of a run go on from that run's own bytes
            assert start == before.get(name, 0), (name, start, before)
            assert before.get(name, 0) < len(files[name])
        begun.add(name)


@pytest.mark.parametrize("asked", [[("a", 0)], [("a", 4)], [("b", 0)]])
def test_the_judge_sees_what_came_twice(asked):
    """Part `a` has 5 of its 10 bytes, `b` is whole."""
    files, before = {"a": bytes(10), "b": bytes(3)}, {"a": 5, "b": 3}
    check_nothing_came_twice([("a", 5)], before, files)
    with pytest.raises(AssertionError):
        check_nothing_came_twice(asked, before, files)


def test_killed_at_any_moment_it_goes_on_where_it_was(hub_machine):
    files = hub_machine.publish(shards=4, filler=100_000)
    hub_machine.hub.bytes_per_s = 2_000_000
    chance, kills, folder, finished = random.Random(6), 0, hub_machine.root / "model0", 0
    while kills < KILLS:
        before = on_disk(folder, files)
        first = len(hub_machine.hub.asked)
        if kill_one(hub_machine, folder, chance, sum(map(len, files.values())) - sum(before.values())):
            kills += 1
        check_nothing_came_twice(hub_machine.hub.asked[first:], before, files)
        if record.read(folder) or chance.random() < 0.15:
            finish(hub_machine, folder, files)
            finished += 1
            folder = hub_machine.root / f"model{finished}"
    finish(hub_machine, folder, files)


def kill_one(hub_machine, folder: Path, chance: random.Random, remaining: int) -> bool:
    """Ends a run after a random part of what remains, now and then after all of it; whether it still ran then."""
    base = hub_machine.hub.sent.total()
    moment = remaining if chance.random() < 0.2 else remaining * chance.uniform(0, 0.6)
    running = hub_machine.start(MODEL_DIR=str(folder))
    wait_for(lambda: hub_machine.hub.sent.total() - base >= moment or not running.process.is_alive())
    time.sleep(chance.uniform(0, 0.03))
    was_alive = running.process.is_alive()
    running.kill()
    assert was_alive or running.process.exitcode == Exit.OK, running.said
    return was_alive


def finish(hub_machine, folder: Path, files: dict[str, bytes]) -> None:
    """A last run without interruption: exactly what was missing comes, and the tree is the published one."""
    before, first = on_disk(folder, files), len(hub_machine.hub.asked)
    hub_machine.must(MODEL_DIR=str(folder))
    asked = hub_machine.hub.asked[first:]
    check_nothing_came_twice(asked, before, files)
    came = sum(len(files[name]) - start for name, start in asked)
    assert came == sum(map(len, files.values())) - sum(before.values())
    assert read_folder(folder) == files
    assert record.changed(folder, record.read(folder)) == []


def wait_for(condition, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_second_download_is_refused_with_the_first_ones_number(hub_machine):
    files = hub_machine.publish(shards=3)
    hub_machine.hub.bytes_per_s = 40_000
    running = hub_machine.start()
    wait_for(lambda: hub_machine.hub.sent)
    done = hub_machine.call()
    assert done.code == Exit.BUSY
    assert f"another download or verification works there (process {running.process.pid})" in done.said
    hub_machine.hub.bytes_per_s = 0
    assert running.wait().code == Exit.OK
    assert read_folder(hub_machine.model) == files
    assert hub_machine.hub.sent == {name: len(content) for name, content in files.items()}


def test_ctrl_c_says_that_what_arrived_is_kept(hub_machine):
    files = hub_machine.publish(shards=4, filler=100_000)
    hub_machine.hub.bytes_per_s = 100_000
    running = hub_machine.start()
    wait_for(lambda: hub_machine.hub.sent.total() > 100_000)
    os.kill(running.process.pid, signal.SIGINT)
    done = running.wait()
    assert done.code == Exit.INTERRUPTED
    assert "Interrupted; what has arrived is kept, and the same command goes on from there" in done.said
    assert "Traceback" not in done.said
    hub_machine.hub.bytes_per_s = 0
    finish(hub_machine, hub_machine.model, files)


def test_memory_stays_below_300_mb(hub_machine):
    """Of the process's own, beyond what a shard of any size could take: 4 streams of 48 MB each."""
    files = hub_machine.publish(shards=4, filler=48_000_000)
    running = hub_machine.start("--streams", "4")
    peak = 0
    while running.process.is_alive():
        peak = max(peak, rss_bytes(running.process.pid))
        time.sleep(0.01)
    assert running.wait().code == Exit.OK, running.said
    assert 30_000_000 < peak < 300_000_000
    assert read_folder(hub_machine.model) == files


def rss_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0
