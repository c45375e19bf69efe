"""Every message of docs/weights.md, produced."""

import os
import re

import pytest
from hub_server import Fault, sha256
from huggingface_hub import constants
from small_packs import fill_cache, model_files, write_folder

from launcher.settings import REPOSITORY
from launcher.weights import bundle, patience, place

PAGE = (REPOSITORY / "docs/weights.md").read_text()
ROWS = re.findall(r"^\| `([^`]+)` \|", PAGE[PAGE.index("## When it does not work") :], re.MULTILINE)
SHARD = "model-00002-of-00002.safetensors"


@pytest.fixture
def machine(hub_machine, monkeypatch):
    hub_machine.files = hub_machine.publish(shards=2)
    hub_machine.offline = lambda: monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(patience, "ATTEMPTS", 2)
    monkeypatch.setattr(bundle, "collect_wheels", lambda folder: folder.mkdir())
    return hub_machine


def after(prepare, *words, **settings):
    def produce(machine):
        prepare(machine)
        return machine.call(*words, **settings).said

    return produce


def faults(*made, times=99, **fields):
    def prepare(machine):
        path = f"/lfs/{sha256(machine.files[SHARD])}" if not made else made[0]
        machine.hub.faults = [Fault(path, times=times, **fields)]

    return after(prepare)


def small_disk(machine):
    free = os.statvfs(machine.root)
    machine.monkeypatch.setattr(os, "statvfs", lambda path: type(free)([*free[:4], 3, *free[5:]]))


def cached(break_it, offline=False):
    def prepare(machine):
        snapshot = fill_cache(machine.cache, machine.table[0], machine.files)
        break_it((snapshot / SHARD).resolve())
        if offline:
            machine.offline()

    return after(prepare)


def flip(path):
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def held(machine):
    with place.lock(machine.model):
        return machine.call().said


def changed(machine):
    machine.must()
    flip(machine.model / SHARD)


def mixed(machine):
    index = machine.files["model.safetensors.index.json"].replace(b"up_proj.suh", b"up_proj.sux")
    machine.hub.repos["first/model"]["a" * 40]["model.safetensors.index.json"] = index


def bundled(machine):
    machine.must()
    machine.must("bundle", machine.root / "disk")
    machine.settings |= {"MODEL_DIR": str(machine.root / "new"), "SPEC_METHOD": "dflash"}
    return machine.call("--from", machine.root / "disk").said


def two_files(machine):
    del machine.settings["MODEL_DIR"]
    for name in (".env", ".env.tp4"):
        (machine.home / name).write_text(f"MODEL_DIR=/somewhere/{name}\n")


def nothing(machine):
    pass


PRODUCERS = {
    "is not to be had from": faults("/api/models/", status=404),
    "does not say what it holds": after(lambda machine: machine.hub.close()),
    "HF_HUB_OFFLINE is set": after(lambda machine: machine.offline()),
    "trying again in": faults(status=503, times=1),
    "limits how often you may ask": faults(status=429),
    "is busy or broken": faults(status=503),
    "what has arrived is kept. Look at the network": faults("/lfs/", cut=0),
    "sent wrong bytes twice": faults(wrong_at=5),
    "answered with revision": faults("/resolve/", commit="f" * 40),
    "more are needed on that disk": after(small_disk),
    "holds another checkpoint than": after(lambda machine: write_folder(machine.model, model_files(3, seed=1))),
    "and WEIGHTS_SOURCE asks for": after(lambda machine: machine.must(), WEIGHTS_SOURCE="third/model"),
    "another download or verification works there": held,
    "links that lead nowhere": cached(lambda blob: blob.unlink()),
    "not used:": cached(flip),
    "this copy of the weights is damaged": cached(flip, offline=True),
    "files are not those of": after(changed, "verify"),
    "unlike the index": after(mixed),
    "is no complete bundle": after(nothing, "--from", "/tmp"),
    "the bundle has no draft": bundled,
    "is not verified; run": after(nothing, "bundle", "/nowhere"),
    "differs (": after(two_files),
}


def test_the_page_and_the_producers_name_the_same():
    assert set(ROWS) == set(PRODUCERS)


@pytest.mark.parametrize("message", PRODUCERS)
def test_the_message_is_produced(message, machine):
    assert message in PRODUCERS[message](machine)
