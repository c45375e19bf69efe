"""Small checkpoints and settings for the launcher's tests."""

import contextlib
import io
import json
import shutil
import socket
import struct
from pathlib import Path

import pytest
from hypothesis import settings as hypothesis_settings

from launcher import console, settings

# How long an example takes is the machine's affair: a busy one must not fail a property.
hypothesis_settings.register_profile("untimed", deadline=None)
hypothesis_settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def own_program(monkeypatch):
    """A command that a test calls names itself for all messages that follow."""
    monkeypatch.setattr(console, "_program", "./start.sh")


def write_shard(path: Path, names: list[str], size: int = 16) -> None:
    header = {
        name: {"dtype": "F16", "shape": [size // 2], "data_offsets": [i * size, (i + 1) * size]}
        for i, name in enumerate(names)
    }
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(size * len(names)))


@pytest.fixture
def checkpoint_folder(tmp_path) -> Path:
    """Two shards, an index, and the files around them; no weights worth the name."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "exl3"}}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text("{}")
    shards = {"model-00001-of-00002.safetensors": ["a", "b"], "model-00002-of-00002.safetensors": ["c"]}
    for name, tensors in shards.items():
        write_shard(folder / name, tensors)
    weight_map = {tensor: shard for shard, tensors in shards.items() for tensor in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "canary.json").write_text(json.dumps([
        {"question": "Which port?", "must_contain": ["8888"], "kind": "fact"},
        {"question": "Count from 3 to 5.", "must_contain": ["3, 4, 5"], "kind": "count"},
    ]))  # fmt: skip
    return folder


@pytest.fixture
def values(tmp_path, checkpoint_folder):
    """Settings as a plain start would have them, with folders of this test."""
    return settings.resolve({"model": checkpoint_folder, "run_dir": tmp_path / "run"}, {})


@pytest.fixture
def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def pretended_cluster(folder, port):
    """Two nodes that are only pretended, and a launcher that looks at them often."""
    from stub_cluster import Cluster

    from launcher import cluster_life, watch

    made = Cluster(folder, port)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", made.path)
        patch.setenv("HOME", str(made.home))
        patch.setattr(watch, "WATCH_EVERY_S", 0.1)
        patch.setattr(cluster_life, "POLL_S", 0.05)
        yield made
        made.repair()
        with contextlib.redirect_stdout(io.StringIO()):
            cluster_life.stop(made.config())
    made.close()


@pytest.fixture
def cluster_stub(tmp_path, unused_port):
    with pretended_cluster(tmp_path, unused_port) as made:
        yield made


@pytest.fixture(scope="module")
def shared_cluster_stub(tmp_path_factory):
    """For tests that only look at what runs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pretended_cluster(tmp_path_factory.mktemp("cluster"), port) as made:
        yield made


@pytest.fixture
def hub_machine(tmp_path, monkeypatch):
    """A small Hub, and a machine that fetches from it."""
    from hub_machine import Machine

    made = Machine(tmp_path, monkeypatch)
    yield made
    made.hub.close()


@pytest.fixture(scope="session")
def loopback_node(tmp_path_factory, need):
    from loopback import NEEDS, Loopback

    need(*NEEDS)
    loopback = Loopback(tmp_path_factory.mktemp("loopback"))
    yield loopback
    loopback.close()


@pytest.fixture
def pair(loopback_node, monkeypatch):
    """Another node by SSH on loopback, and this process as the head; both homes are empty."""
    for home in (loopback_node.head, loopback_node.worker, loopback_node.other):
        while home.exists():  # what a killed sync had started there may take a moment to end
            shutil.rmtree(home, ignore_errors=True)
        home.mkdir()
    for name, value in loopback_node.environment.items():
        monkeypatch.setenv(name, value)
    return loopback_node
