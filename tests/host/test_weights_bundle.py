"""Weights on a disk for a head without a network, and back from there."""

import json

import pytest
from huggingface_hub import constants
from small_packs import draft_files, read_folder

from launcher import bootstrap
from launcher.errors import Exit
from launcher.weights import bundle, record

SHARD = "model-00002-of-00003.safetensors"


@pytest.fixture
def bundled(hub_machine, monkeypatch):
    """A bundle of a filled machine, and new folders that nobody filled; the network is gone."""
    monkeypatch.setattr(bundle, "collect_wheels", lambda folder: folder.mkdir())
    hub_machine.settings["SPEC_METHOD"] = "dflash"
    hub_machine.files = hub_machine.publish(shards=3)
    hub_machine.must()
    hub_machine.disk = hub_machine.root / "disk"
    hub_machine.must("bundle", hub_machine.disk)
    hub_machine.settings |= {"MODEL_DIR": str(hub_machine.root / "new"), "DRAFT_DIR": str(hub_machine.root / "draft2")}
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub_machine.hub.requests.clear()
    return hub_machine


def test_a_bundle_gives_what_went_in_without_a_network(bundled):
    said = bundled.must("--from", bundled.disk)
    assert read_folder(bundled.root / "new") == bundled.files
    assert read_folder(bundled.root / "draft2") == draft_files()
    assert "every one verified" in said and bundled.hub.requests == []
    assert record.read(bundled.root / "new").manifest == record.read(bundled.model).manifest
    assert "nothing to do" in bundled.must("--from", bundled.disk)
    assert "7 files of first/model" in bundled.must("verify", "--full")


def test_a_bundle_says_what_it_holds(bundled):
    contents = json.loads((bundled.disk / bundle.NAME).read_text())
    assert contents["packs"]["model"] == {"pack": "first/model", "revision": "a" * 40}
    assert contents["image"] is None
    (bundled.disk / bundle.IMAGE).write_bytes(b"")
    assert f"docker load -i {bundled.disk / 'image.tar'}" in bundled.must("--from", bundled.disk)


def test_a_damaged_file_of_a_bundle_is_named_and_never_placed(bundled):
    path = bundled.disk / "model" / SHARD
    content = path.read_bytes()
    path.unlink()  # it may share its bytes with the folder that it came from
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    done = bundled.call("--from", bundled.disk)
    assert done.code == Exit.REFUSED and f"{path}: {SHARD}: expected SHA-256" in done.said
    assert not (bundled.root / "new" / SHARD).exists() and record.read(bundled.root / "new") is None
    path.write_bytes(content)
    bundled.must("--from", bundled.disk)
    assert read_folder(bundled.root / "new") == bundled.files


def test_a_bundle_without_a_file_is_named(bundled):
    (bundled.disk / "model" / SHARD).unlink()
    done = bundled.call("--from", bundled.disk)
    assert done.code == Exit.REFUSED and f"{bundled.disk / 'model' / SHARD}" in done.said


def test_a_bundle_without_the_draft_is_named(bundled):
    (bundled.disk / "draft" / record.NAME).unlink()
    done = bundled.call("--from", bundled.disk)
    assert done.code == Exit.REFUSED and "the bundle has no draft; set SPEC_METHOD=mtp or none" in done.said
    bundled.must("--from", bundled.disk, SPEC_METHOD="none")


def test_an_unfinished_bundle_is_refused_and_finished_by_the_same_command(bundled, monkeypatch):
    (bundled.disk / bundle.NAME).unlink()
    done = bundled.call("--from", bundled.disk)
    assert done.code == Exit.REFUSED and "is no complete bundle, bundle.json is missing" in done.said
    bundled.settings |= {"MODEL_DIR": str(bundled.model), "DRAFT_DIR": str(bundled.draft)}
    (bundled.disk / "wheels").rmdir()
    bundled.must("bundle", bundled.disk)
    bundled.must("--from", bundled.disk, MODEL_DIR=str(bundled.root / "new"))


def test_what_is_not_verified_is_not_bundled(bundled):
    done = bundled.call("bundle", bundled.root / "other")
    assert done.code == Exit.REFUSED and "is not verified; run `./download.sh` first" in done.said


def test_the_launchers_environment_is_made_from_the_bundle(tmp_path):
    (tmp_path / "wheels").mkdir()
    expected = ["--no-index", "--find-links", str(tmp_path / "wheels")]
    assert bootstrap.wheels_of(["download.sh", "weights", "--from", str(tmp_path)]) == expected
    assert bootstrap.wheels_of(["download.sh", "weights", f"--from={tmp_path}"]) == expected
    assert bootstrap.wheels_of(["download.sh", "weights", "--from", str(tmp_path / "nowhere")]) == []
    assert bootstrap.wheels_of(["start.sh", "tp2", "check"]) == []
