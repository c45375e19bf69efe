"""Weights at a start: what other nodes lack is copied once nothing else is wrong; what nobody verified is refused."""

import json

import pytest
from loopback import fill, settings, verify

from launcher import cluster, cluster_life, facts, preflight
from launcher.errors import Exit, LauncherError
from launcher.weights import record, sync

OTHERS = [name for name in preflight.CHECKS if name not in ("weights", "rsync")]


@pytest.fixture
def head(pair, tmp_path, monkeypatch):
    """A checkpoint that counts as large, verified, with an index; every check but those of the weights left out."""
    source = tmp_path / "probe.py"
    source.write_text(facts.PROBE.read_text().replace("SMALL_BYTES = 256 << 20", "SMALL_BYTES = 1000"))
    monkeypatch.setattr(facts, "PROBE", source)
    monkeypatch.setattr(sync, "SMALL_BYTES", 1000)
    folder = pair.head / "model"
    names = [entry.name for entry in fill(folder).manifest.files]
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: name for name in names if name.startswith("model-")}}))
    verify(folder, [*names, index.name])
    monkeypatch.setitem(pair.settings, "SKIP_CHECKS", ",".join(OTHERS))
    return pair


def brought(node, **changes: str):
    config = settings(node, **changes)
    context = cluster_life.look(config, None)
    return context, cluster_life.bring_what_is_missing(context, None)


def levels(context) -> dict[tuple, str]:
    found = preflight.CHECKS["weights"](context)
    return {(finding.node, finding.seen.partition(": ")[2].partition(",")[0]): finding.level for finding in found}


def test_a_start_copies_what_another_node_lacks_and_says_so(head, capfd):
    before, after = brought(head)
    assert levels(before) == {(0, "4 shards"): "PASS", (1, "there is no such folder"): "FAIL"}
    assert levels(after) == {(0, "4 shards"): "PASS", (1, "4 shards"): "PASS"}
    said = capfd.readouterr().err
    assert "The weights on node 1 are not those of node 0: up to 4.0 MiB are copied first." in said
    assert "node 1 (10.0.0.2): MODEL_DIR 6 of 6 files copied" in said
    again, same = brought(head)
    assert same is again


def test_a_node_that_lacks_image_and_weights_gets_both(head, monkeypatch):
    sent = []
    monkeypatch.setattr(cluster_life.images, "behind", lambda context: [1])
    monkeypatch.setattr(cluster_life.images, "copy_to_others", sent.append)
    before, after = brought(head)
    assert sent == [before.config] and set(levels(after).values()) == {"PASS"}


def test_nothing_is_copied_while_something_else_is_wrong(head):
    before, after = brought(head, SKIP_CHECKS=",".join(name for name in OTHERS if name != "address"))
    assert after is before and not (head.worker / "model").exists()
    with pytest.raises(LauncherError, match=r"Nothing was started .*: address, weights failed"):
        cluster_life.refuse_bad_findings(after)


def test_nothing_is_copied_where_the_check_is_left_out(head):
    before, after = brought(head, SKIP_CHECKS=",".join(preflight.CHECKS))
    assert after is before and not (head.worker / "model").exists()


def test_a_start_refuses_what_nobody_verified(head):
    record.remove(head.head / "model")
    before, after = brought(head)
    assert after is before and not (head.worker / "model").exists()
    with pytest.raises(LauncherError, match=r"Nothing was started .*: weights failed"):
        cluster_life.refuse_bad_findings(after)


def test_check_changes_nothing(head, capsys):
    assert cluster.main(["start.sh", "tp2", "check"], head.settings) == Exit.REFUSED
    said = capsys.readouterr().out
    assert "-> ./start.sh sync copies from node 0 and verifies there; a start does it, too" in said
    assert not (head.worker / "model").exists()


def test_a_change_on_either_node_is_noticed_by_a_look(head):
    brought(head)
    shard = head.worker / "model" / "model-00002-of-00004.safetensors"
    shard.write_bytes(shard.read_bytes())
    (finding,) = [one for one in preflight.CHECKS["weights"](cluster_life.look(settings(head), None)) if one.node]
    assert finding.seen == (
        f"{head.worker}/model: 1 files are not as they were when they were verified, first {shard.name}"
    )  # fmt: skip
    _, after = brought(head)
    assert set(levels(after).values()) == {"PASS"}


def test_sync_is_a_command_that_waits_for_no_other_one(head, capsys):
    with cluster_life.files_of(settings(head)).lock(), pytest.raises(LauncherError, match="is under way") as caught:
        cluster.main(["start.sh", "tp2", "sync"], head.settings)
    assert caught.value.code == Exit.BUSY
    assert cluster.main(["start.sh", "tp2", "sync"], head.settings) == Exit.OK
    assert cluster.main(["start.sh", "tp2", "sync", "--full"], head.settings) == Exit.OK
    assert capsys.readouterr().out.splitlines() == [
        "node 1 (10.0.0.2): MODEL_DIR 6 of 6 files copied (4.0 MiB), all hashed there and right.",
        "node 1 (10.0.0.2): MODEL_DIR was hashed again and is right.",
    ]
