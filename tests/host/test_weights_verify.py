"""./download.sh verify: bad files are named, only they are fetched again, and what was verified is known at once."""

import os
import shutil
import time

import pytest
from hub_server import sha256
from huggingface_hub import constants
from small_packs import fill_cache, read_folder, write_folder

from launcher.errors import Exit
from launcher.weights import place, record

SHARD = "model-00002-of-00003.safetensors"


@pytest.fixture
def filled(hub_machine):
    """A machine whose folder was filled and verified; `files` is what it holds."""
    hub_machine.files = hub_machine.publish(shards=3)
    hub_machine.must()
    return hub_machine


def change(path, position=-1):
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_a_verified_folder_is_known_without_reading_it(filled, monkeypatch):
    monkeypatch.setattr("launcher.weights.place.digests_and_stats", None)  # hashing would fail
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "7 files of first/model" in filled.must("verify")


def test_full_reads_every_byte(filled):
    path = filled.model / SHARD
    before = path.stat()
    change(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # as a bad disk would: nothing shows
    assert filled.call("verify").code == Exit.OK
    done = filled.call("verify", "--full")
    assert done.code == Exit.REFUSED and f"{SHARD}: expected SHA-256 {sha256(filled.files[SHARD])}, found" in done.said
    assert record.read(filled.model) is None


def test_an_interrupted_look_takes_nothing_away(filled, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(place.Filling, "verify_in_place", interrupted)
        assert filled.call("verify", "--full").code == Exit.INTERRUPTED
    assert record.changed(filled.model, record.read(filled.model)) == []
    assert "nothing to do" in filled.must()


@pytest.mark.parametrize("name", [SHARD, "tokenizer.json", "model.safetensors.index.json"])
def test_a_changed_file_is_named_and_only_it_is_fetched_again(filled, name):
    change(filled.model / name)
    wrong = (filled.model / name).read_bytes()
    sent = filled.hub.sent.copy()
    done = filled.call("verify")
    assert done.code == Exit.REFUSED
    assert f"1 of 7 files are not those of first/model:\n  {name}: expected SHA-256" in done.said
    assert record.read(filled.model) is None  # nothing starts with it
    assert read_folder(filled.model)[name] == wrong  # and nothing was touched
    assert filled.hub.sent == sent
    filled.must()
    assert filled.hub.sent - sent == {name: len(filled.files[name])}
    assert (filled.model / ".aside" / name).read_bytes() == wrong
    filled.must("verify", "--full")


def test_a_cut_and_a_missing_file_are_named_without_hashing(filled):
    (filled.model / SHARD).write_bytes(filled.files[SHARD][:-5])
    (filled.model / "tokenizer.json").unlink()
    said = filled.call("verify").said
    assert f"{SHARD}: expected {len(filled.files[SHARD])} bytes, found {len(filled.files[SHARD]) - 5}" in said
    assert "tokenizer.json: expected 2 bytes, found nothing" in said
    filled.must()
    assert read_folder(filled.model) == filled.files


def test_a_folder_of_unknown_origin_is_held_against_the_hub(hub_machine):
    files = hub_machine.publish(shards=3)
    write_folder(hub_machine.model, files)
    hub_machine.must("verify")
    assert record.read(hub_machine.model).manifest.pack == "first/model"
    assert not hub_machine.hub.sent


def test_without_a_network_the_cache_says_what_it_should_be(hub_machine, monkeypatch):
    files = hub_machine.publish(shards=3)
    fill_cache(hub_machine.cache, hub_machine.table[0], files)
    write_folder(hub_machine.model, files)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub_machine.must("verify")
    change(hub_machine.model / SHARD)
    assert SHARD in hub_machine.call("verify").said


def test_a_checkpoint_of_ones_own_is_taken_when_the_user_says_so(hub_machine):
    hub_machine.publish(shards=3)
    own = hub_machine.publish(shards=2, filler=64)
    hub_machine.publish(shards=3)
    write_folder(hub_machine.model, own)
    done = hub_machine.call("verify")
    assert done.code == Exit.REFUSED and "./download.sh verify --own" in done.said
    assert "nothing says what its author published" in hub_machine.must("verify", "--own")
    assert record.read(hub_machine.model).manifest.pack == "own"
    assert "nothing to do" in hub_machine.must()  # no other is fetched over it
    change(hub_machine.model / "model-00001-of-00002.safetensors")
    assert "model-00001-of-00002.safetensors: expected SHA-256" in hub_machine.call("verify").said


def test_a_known_draft_stays_known_beside_a_model_of_ones_own(filled):
    filled.must(SPEC_METHOD="dflash")
    own = filled.root / "own"
    shutil.copytree(filled.model, own, ignore=lambda *_: [".exl3-verified.json"])
    filled.must("verify", "--own", SPEC_METHOD="dflash", MODEL_DIR=str(own))
    assert record.read(own).manifest.pack == "own"
    assert record.read(filled.draft).manifest.pack == "some/draft"


def test_a_record_that_cannot_be_read_is_named(filled):
    (filled.model / record.NAME).write_text("{")
    done = filled.call()
    assert done.code == Exit.REFUSED and str(filled.model / record.NAME) in done.said


def test_no_folder(hub_machine):
    hub_machine.publish(shards=3)
    done = hub_machine.call("verify")
    assert done.code == Exit.REFUSED and "there is no such folder; ./download.sh makes and fills it" in done.said


def test_verification_of_a_verified_folder_takes_less_than_two_seconds(hub_machine):
    hub_machine.publish(shards=120)
    hub_machine.must()
    began = time.monotonic()
    hub_machine.must("verify")
    assert time.monotonic() - began < 2
