"""Every message of docs/weights-workers.md, produced."""

import fcntl
import os
import re
from contextlib import contextmanager

import pytest
from loopback import fill, settings
from recorded import context

from launcher import preflight
from launcher.commands import REPOSITORY
from launcher.errors import LauncherError
from launcher.remote import Node
from launcher.weights import agent, record, share, sync

ROWS = re.findall(r"^\| `([^`]+)` \|", (REPOSITORY / "docs/weights-workers.md").read_text(), re.MULTILINE)
ROWS = [row for row in ROWS if not row.startswith("./start.sh")]


def of_recorded(rank: int, **values):
    """What `check` prints when a node's checkpoint, or the record in it, is otherwise."""

    def change(records):
        there = records[rank]["probe"]["paths"]["model"]["checkpoint"]
        for name, value in values.items():
            there[name] = {**there[name], **value} if isinstance(value, dict) else value

    def produce(node, monkeypatch):
        found = preflight.CHECKS["weights"](context("good_tp2", change))
        return preflight.describe(found)

    return produce


def without_rsync(node, monkeypatch):
    return preflight.describe(preflight.CHECKS["rsync"](context("bad_node")))


def of_sync(prepare):
    """What a sync says where `prepare` has put something in its way; it may hold that as a context."""

    def produce(node, monkeypatch):
        fill(node.head / "model", shards=1, size=1000)
        with prepare(node, monkeypatch) or nothing(), pytest.raises(LauncherError) as caught:
            sync.sync(settings(node))
        return str(caught.value)

    return produce


@contextmanager
def nothing():
    yield


@contextmanager
def lock_is_held(node, monkeypatch):
    patched(node, monkeypatch, "LOCK_WAIT_S = 15", "LOCK_WAIT_S = 0")
    work = node.worker / "model/.exl3-sync"
    work.mkdir(parents=True)
    with (work / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def patched(node, monkeypatch, old: str, new: str) -> None:
    """The program on the other node, in one place otherwise."""
    text = agent.WORKER.read_text()
    assert old in text
    (node.head / "worker.py").write_text(text.replace(old, new))
    monkeypatch.setattr(agent, "WORKER", node.head / "worker.py")


def little_room(node, monkeypatch):
    patched(node, monkeypatch, "disk.f_bavail * disk.f_frsize", "10")


def file_in_the_way(node, monkeypatch):
    (node.worker / "model").write_text("")


def folder_in_the_way(node, monkeypatch):
    (node.worker / "model/config.json").mkdir(parents=True)


def other_checkpoint(node, monkeypatch):
    fill(node.worker / "model", shards=1, size=1000, revision="my own")
    record.remove(node.worker / "model")


def edited_behind_the_record(node, monkeypatch):
    config = node.head / "model/config.json"
    before = config.stat()
    with config.open("r+") as stream:
        stream.write("[")
    os.utime(config, ns=(before.st_atime_ns, before.st_mtime_ns))


def no_node(node, monkeypatch):
    monkeypatch.setitem(node.settings, "SSH_KEY", "/nowhere")


def copy_in_the_way(node, monkeypatch):
    place = share.Place(Node(1, "10.0.0.2"), sync.Source("MODEL_DIR", node.head, None), "/m", "", 121, True, 0)
    with pytest.raises(LauncherError) as caught:
        share.commands(Node(0, "10.0.0.1"), [place], "tp2", True)
    return str(caught.value)


def other_mount(node, monkeypatch):
    fill(node.head / "model", shards=1, size=1000)
    fill(node.worker / "model", shards=1, size=1000)
    source = sync.source_of("MODEL_DIR", node.head / "model")
    config = settings(node)
    place = share.look(sync.remote.nodes_of(config)[1], source, "~/model")
    with pytest.raises(LauncherError) as caught:
        share.refuse_other_bytes(place, "~/model")
    return str(caught.value)


PRODUCERS = {
    "nobody has verified it": of_recorded(0, record=None),
    "are not as they were when they were verified": of_recorded(1, record={"changed": ["a"]}),
    "cannot be read": of_recorded(0, record={"error": "no"}),
    "other weights (": of_recorded(1, record={"digest": "00" * 32}),
    "is another one than on node 0": of_recorded(1, hashes={"config.json": "00" * 32}),
    "is not one of the verified files": of_recorded(1, record={"extra": ["other.safetensors"]}),
    "rsync is not installed": without_rsync,
    "another sync writes to": of_sync(lock_is_held),
    "more and its disk has": of_sync(little_room),
    "cannot be written": of_sync(file_in_the_way),
    "holds another checkpoint": of_sync(other_checkpoint),
    "is a folder and should be a file": of_sync(folder_in_the_way),
    "arrived with another SHA-256": of_sync(edited_behind_the_record),
    "the connection ended": of_sync(no_node),
    "files that a mount would hide": copy_in_the_way,
    "is not the file of node 0": other_mount,
}


def test_the_page_and_the_producers_name_the_same():
    assert set(ROWS) == set(PRODUCERS)


@pytest.mark.parametrize("message", PRODUCERS)
def test_the_message_is_produced(message, pair, monkeypatch):
    assert message in PRODUCERS[message](pair, monkeypatch)
