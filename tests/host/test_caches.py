"""Caches of compiled kernels on two pretended nodes: filled on one, sent whole to the other, keyed by the image."""

import subprocess
import tarfile

import pytest
from stub_cluster import an_image

from launcher import caches, cluster_state, commands, remote, watch
from launcher.errors import Exit, LauncherError
from launcher.state import this_process

OURS, OTHER = an_image("a", "l1"), an_image("b", "l2")
KEY = "a" * 12


@pytest.fixture
def stub(cluster_stub, tmp_path, monkeypatch):
    """Both nodes have one image; their home folders, and so their caches, are apart."""
    for node in ("head", "worker"):
        cluster_stub.images(node, ours=OURS)
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return cluster_stub


def folders(stub, tmp_path):
    return [home / ".cache/glm53-exl3" / KEY for home in (tmp_path / "home", stub.books / "worker-home")]


def test_caches_are_filled_here_and_sent_whole(stub, tmp_path):
    here, there = folders(stub, tmp_path)
    there.mkdir(parents=True)
    (there / "stale").write_text("of an interrupted start")
    (there.parent / ("b" * 12)).mkdir()
    assert caches.warm(stub.config()) == Exit.OK
    for folder in (here, there):
        assert (folder / "flashinfer/module.so").read_text() == "compiled"
    assert not (there / "stale").exists()
    # Another image's folder stays as it is, and nothing is left beside them.
    assert sorted(one.name for one in there.parent.iterdir()) == [KEY, "b" * 12]


def test_every_cache_is_in_the_mounted_folder(stub):
    place = commands.Place(stub.config(), 0, commands.Found("/home/x", OURS["Id"]))
    command = caches.warm_command(place)
    named = dict(command[at + 1].split("=", 1) for at, word in enumerate(command) if word == "--env")
    assert set(commands.CACHES) < set(named)
    assert all(value.startswith("/cache/") for name, value in named.items() if name != "CUDA_CACHE_MAXSIZE")
    assert int(named["CUDA_CACHE_MAXSIZE"]) == 4 << 30
    assert f"type=bind,source=/home/x/.cache/glm53-exl3/{KEY},target=/cache" in command


def test_caches_that_were_cut_off_leave_what_was_there(stub, tmp_path, monkeypatch):
    """tar itself takes an archive without an end for a whole one."""
    _, there = folders(stub, tmp_path)
    there.mkdir(parents=True)
    (there / "old").write_text("kept")
    monkeypatch.setattr(caches, "READ", "cd /cache && echo x > half && tar -cf - half")
    with pytest.raises(LauncherError, match=r"node 1 .*what was there is as before: it was cut off"):
        caches.warm(stub.config())
    assert (there / "old").read_text() == "kept"


def test_a_reader_that_fails_leaves_what_was_there(stub, tmp_path, monkeypatch):
    _, there = folders(stub, tmp_path)
    there.mkdir(parents=True)
    (there / "old").write_text("kept")
    monkeypatch.setattr(caches, "READ", f"{caches.READ.replace('exec ', '')}; echo no space >&2; exit 3")
    with pytest.raises(LauncherError, match=r"node 1 .*did not arrive.*no space"):
        caches.warm(stub.config())
    assert (there / "old").read_text() == "kept"


def test_what_could_not_be_compiled_is_told_after_the_rest_was_sent(stub, tmp_path):
    stub.fail("vllm_exl3.warm_up")
    with pytest.raises(LauncherError, match="not everything could be compiled"):
        caches.warm(stub.config())
    assert all(folder.is_dir() for folder in folders(stub, tmp_path))


def test_nodes_with_different_images_share_no_caches(stub):
    stub.images("worker", ours=OTHER)
    with pytest.raises(LauncherError, match=r"node 1 \(10.0.0.2\): the image is missing or another one"):
        caches.warm(stub.config())
    assert stub.calls("run") == []


def test_caches_in_use_are_left_alone(stub, monkeypatch):
    config, node = stub.config(), remote.Node(0, "10.0.0.1")
    unit = commands.Unit("ray", start=(), state=(), logs=(), follow=(), stop=())
    running = cluster_state.ClusterState("ready", this_process(), "", units=(cluster_state.StartedUnit(node, unit),))
    cluster_state.files_of(config).write_state(running)
    monkeypatch.setattr(watch, "state_of", lambda unit: {"Running": True})
    with pytest.raises(LauncherError, match="runs and uses these caches"):
        caches.warm(config)
    cluster_state.files_of(config).forget_state()


def test_the_mark_comes_last(stub, tmp_path):
    """Who reads the archive from its beginning has everything once the mark is there."""
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / "a").write_text("x")
    script = caches.READ.replace("/cache", str(folder))
    with (tmp_path / "archive.tar").open("wb") as archive:
        subprocess.run(["sh", "-c", script], stdout=archive, check=True)
    with tarfile.open(tmp_path / "archive.tar") as archive:
        assert archive.getnames()[-1] == caches.MARK
