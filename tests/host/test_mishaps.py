"""What goes wrong beside the settings: faults of our own, nodes that never answer, disks that are full."""

import errno
import os
import re
import stat
import time
from pathlib import Path

import pytest

from launcher import __main__ as command_line
from launcher import caches, cluster, cluster_life, facts, mishap, preflight, remote
from launcher.errors import Exit, LauncherError

SECRET = "s3cret-that-nobody-may-see"
MADE = "f00dfeed" * 8


def broken(*_, **__):
    raise RuntimeError(f"it got {SECRET} and {MADE}")


# The last net


def test_a_fault_of_our_own_is_one_sentence_and_a_log(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("VLLM_API_KEY", SECRET)
    monkeypatch.setattr(command_line.lifecycle, "plan_for", broken)
    assert command_line.main(["local", "plan", "--run-dir", str(tmp_path)]) == Exit.FAULT
    said = capsys.readouterr().err.strip()
    found = re.fullmatch(r"The launcher broke \(.*\), which is its own fault; file an issue with this log: (\S+)", said)
    log = Path(found[1])
    assert log.parent == tmp_path and stat.S_IMODE(log.stat().st_mode) == 0o600
    text = log.read_text()
    assert "Traceback" in text and "in broken" in text and "'local' 'plan'" in text
    for words in (said, text):
        assert SECRET not in words and MADE not in words and mishap.HIDDEN in words


def test_a_fault_in_a_cluster_command_is_kept_in_the_run_s_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cluster, "read_config", broken)
    monkeypatch.setenv("RUN_DIR", str(tmp_path))
    assert command_line.main(["cluster", "start.sh", "tp2", "status"]) == Exit.FAULT
    assert f"log: {tmp_path}/launcher-fault-" in capsys.readouterr().err


def test_a_log_finds_another_place_where_the_run_has_none(tmp_path, monkeypatch):
    monkeypatch.setattr(mishap.tempfile, "gettempdir", lambda: str(tmp_path))
    said = mishap.tell(ValueError("x\ny\x1b" + "z" * 1000), [], {}, Path("/proc/x"))
    assert f"file an issue with this log: {tmp_path}/launcher-fault-" in said
    assert said.isprintable() and len(said) < 500
    monkeypatch.setattr(mishap.tempfile, "gettempdir", lambda: "/dev/null/x")
    assert "could write no log" in mishap.tell(ValueError("x"), [], {}, None)


def test_secrets_of_the_env_files_are_hidden_too():
    texts = ["VLLM_API_KEY='abcd efgh'\nexport HF_TOKEN=hf_12345\nPORT=8888\n"]
    found = mishap.secrets_of({"MY_PASSWORD": "a pass-word", "PATH": "/bin"}, texts)
    assert found == ["a pass-word", "abcd efgh", "hf_12345"]


# Nodes of which nothing is known, with every check skipped


@pytest.fixture
def hanging(cluster_stub, monkeypatch):
    """A worker whose ssh never ends."""
    ssh = Path(cluster_stub.path.partition(os.pathsep)[0]) / "ssh"
    ssh.write_text("#!/bin/sh\nexec sleep 60\n")
    run = remote.run
    monkeypatch.setattr(remote, "run", lambda node, argv, stdin=b"", timeout_s=30: run(
        node, argv, stdin=stdin, timeout_s=timeout_s if node.is_here else 0.5))  # fmt: skip
    return cluster_stub


def test_a_start_on_a_node_that_hangs_names_it(hanging):
    with pytest.raises(LauncherError, match=r"node 1 \(10.0.0.2\): no end after 0.5 s; nothing can be started on"):
        cluster_life.start(hanging.config())
    assert hanging.running == set()


@pytest.mark.parametrize("command", ["check", "stop", "status"])
def test_other_commands_bear_a_node_that_hangs(hanging, command):
    assert isinstance(getattr(cluster_life, command)(hanging.config(SKIP_CHECKS="")), Exit)


def test_a_node_that_hangs_is_named_where_images_and_caches_are_copied(hanging):
    with pytest.raises(LauncherError, match=r"image: node 1 \(10.0.0.2\): .*no end after"):
        cluster.images.copy(hanging.config())
    with pytest.raises(LauncherError, match=r"image warm: node 1 \(10.0.0.2\): no end after"):
        caches.places_of(hanging.config())
    assert cluster.images.status(hanging.config()) == Exit.REFUSED


def test_a_node_whose_host_could_not_be_read_starts_nothing(hanging):
    node = facts.NodeFacts(1, "10.0.0.2", errors={"host": "OSError: no"})
    with pytest.raises(LauncherError, match=r"node 1 \(10.0.0.2\): OSError: no; nothing can be started"):
        cluster_life.home_of(node)


def test_no_check_breaks_on_nodes_of_which_nothing_is_known(hanging):
    config = hanging.config(SKIP_CHECKS="")
    for unknown in ({"unreached": "x"}, {"unprobed": "x"}, {}):
        found = [facts.NodeFacts(rank, address, **unknown) for rank, address in enumerate(config.addresses)]
        context = preflight.context(config, remote.nodes_of(config), found)
        assert not [one for one in preflight.run_checks(context) if "the check itself broke" in one.seen] or not unknown


# The disk


def test_a_full_disk_in_the_middle_of_a_start_leaves_nothing(cluster_stub, monkeypatch):
    replace, count = Path.replace, iter(range(100))

    def on_full_disk(path, target):
        if "run" in path.parts and next(count) >= 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", on_full_disk)
    sentence = r"environment: RUN_DIR .* cannot be used \(No space left on device\); name a folder of your own"
    with pytest.raises(LauncherError, match=sentence):
        cluster_life.start(cluster_stub.config())
    assert cluster_stub.running == set()


def test_logs_that_cannot_be_kept_keep_nothing_running(cluster_stub, capsys):
    cluster_stub.fail("--name exl3-tp2-rank1")
    cluster_stub.run_dir.mkdir()
    (cluster_stub.run_dir / "tp2-logs").write_text("in the way")
    with pytest.raises(LauncherError, match="could not be started"):
        cluster_life.start(cluster_stub.config())
    assert cluster_stub.running == set()
    assert "the logs of the ranks are not kept" in capsys.readouterr().err


def test_a_state_that_is_no_file_is_told(cluster_stub):
    cluster_stub.run_dir.mkdir()
    os.mkfifo(cluster_stub.run_dir / "tp2.json")
    began = time.monotonic()
    for command in (cluster_life.status, cluster_life.stop, cluster_life.start):
        with pytest.raises(LauncherError, match=r"tp2\.json: not readable as JSON .*no plain file"):
            command(cluster_stub.config())
    assert time.monotonic() - began < 10
    (cluster_stub.run_dir / "tp2.json").unlink()
