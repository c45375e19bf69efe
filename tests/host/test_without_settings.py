"""Stop, status and logs of a cluster whose settings file has become unusable: the state of the run is enough."""

import os

import pytest

from launcher import cluster, cluster_life, config, topology
from launcher.errors import Exit, LauncherError

TP2 = topology.TOPOLOGIES["tp2"]


@pytest.fixture
def settings_file(monkeypatch, tmp_path):
    """Where a checkout without a settings file would have it."""
    monkeypatch.setattr(cluster, "REPOSITORY", tmp_path)
    (tmp_path / ".env.example").write_text("HEAD_IP=\n")
    return tmp_path / ".env"


@pytest.fixture
def up(cluster_stub, settings_file):
    """A cluster that runs, and a command line in a checkout without a settings file."""
    assert cluster_life.start(cluster_stub.config()) == Exit.OK
    return cluster_stub, settings_file


@pytest.fixture(scope="module")
def running(shared_cluster_stub):
    assert cluster_life.start(shared_cluster_stub.config()) == Exit.OK
    return shared_cluster_stub


@pytest.fixture
def still_up(running, settings_file):
    """The same cluster for all who may not change it."""
    before, calls = running.running, len(running.calls("run", "stop", "rm"))
    yield running, settings_file
    assert running.running == before and len(running.calls("run", "stop", "rm")) == calls


def main(stub, command: str, **ambient: str):
    return cluster.main(["start.sh", "tp2", command], {"RUN_DIR": str(stub.run_dir)} | ambient)


UNUSABLE = {
    "no file": lambda path: None,
    "a mistake": lambda path: path.write_text("HEAD_IP=10.0.0.1\nWORKER_IP=10.0.0.2\nMAX_NUM_SEQ=3\n"),
    "half a line": lambda path: path.write_text("HEAD_IP='10.0.0"),
    "no text": lambda path: path.write_bytes(b"\xff\xfe\x00"),
    "no file, a folder": lambda path: path.mkdir(),
}


@pytest.mark.parametrize("spoil", UNUSABLE.values(), ids=UNUSABLE)
def test_status_logs_and_stop_go_by_the_state(up, spoil, capsys):
    stub, path = up
    spoil(path)
    before, ran = os.path.lexists(path), len(stub.calls("run"))
    assert main(stub, "status") == Exit.OK
    said = capsys.readouterr()
    assert said.err.count("Note: the settings cannot be used (.env") == 1
    assert "status:   ready" in said.out and f"http://127.0.0.1:{stub.port}/v1" in said.out
    assert main(stub, "logs") == Exit.OK
    assert main(stub, "stop") == Exit.OK
    assert stub.running == set()
    assert os.path.lexists(path) == before and len(stub.calls("run")) == ran


@pytest.mark.parametrize("command", ["start", "restart", "check", "plan", "shell"])
def test_nothing_else_works_without_settings(still_up, command):
    stub, path = still_up
    path.write_text("HEAD_IP=10.0.0.1\nWORKER_IP=10.0.0.2\nMAX_NUM_SEQ=3\n")
    with pytest.raises(LauncherError, match="did you mean MAX_NUM_SEQS") as caught:
        main(stub, command)
    assert caught.value.code == Exit.USAGE


def test_an_unreadable_file_is_named_and_kept(still_up):
    stub, path = still_up
    path.mkdir()
    with pytest.raises(LauncherError, match=r"\.env could not be read: it is a folder"):
        main(stub, "check")


def test_status_goes_by_what_runs_when_the_port_was_changed(still_up, capsys):
    stub, _ = still_up
    changed = stub.config(PORT="1")
    assert cluster_life.status(changed) == Exit.OK


def test_run_dir_is_the_default_the_file_s_or_the_environment_s():
    where = lambda text, **ambient: config.of_what_runs(TP2, text, ambient)["RUN_DIR"]
    assert where(None) == where("RUN_DIR=\n") == ".run"
    assert where("HEAD_IP='open\n") == ".run"
    assert where("MAX_NUM_SEQ=1\nRUN_DIR=/srv/run\n") == "/srv/run"
    assert where("RUN_DIR=/srv/run\n", RUN_DIR="/tmp/run") == "/tmp/run"
    assert where("RUN_DIR=/srv/run\n", RUN_DIR="~nobody/x") == "/srv/run"
