"""The script as a user runs it, up to where a server would be started."""

import os
import socket
import subprocess
import sys

import pytest

from launcher.errors import Exit
from launcher.settings import REPOSITORY

SCRIPT = REPOSITORY / "start-local.sh"


@pytest.fixture
def run(tmp_path, checkpoint_folder):
    def call(*arguments, **environment):
        return subprocess.run(
            [SCRIPT, *map(str, arguments)], cwd=tmp_path, capture_output=True, text=True, timeout=60,
            env={**os.environ, **environment},
        )  # fmt: skip

    return call


@pytest.fixture
def start(run, tmp_path, checkpoint_folder):
    """A start that must be refused: leaves no process, no state and no environment behind."""

    def call(*arguments, **environment):
        had_environment = (REPOSITORY / ".venv-local").exists()
        result = run("--run-dir", tmp_path / "run", "--model", checkpoint_folder, *arguments, **environment)
        assert not (tmp_path / "run/local.json").exists()
        assert (REPOSITORY / ".venv-local").exists() == had_environment
        return result

    return call


def last_line(result) -> str:
    return result.stderr.strip().splitlines()[-1]


def test_help_lists_every_command(run):
    result = run("--help")
    assert result.returncode == 0
    assert all(word in result.stdout for word in ("start", "stop", "status", "logs", "plan", "setup"))


@pytest.mark.parametrize("arguments", [["--prot", "1"], ["begin"], ["--port", "many"], ["--port", "70000"]])
def test_wrong_usage_is_refused(run, arguments):
    result = run(*arguments)
    assert result.returncode == Exit.USAGE
    assert "Traceback" not in result.stderr


def test_taken_port_is_refused_with_its_owner(start):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        result = start("--port", port)
    assert result.returncode == Exit.REFUSED
    assert f"port: 127.0.0.1:{port} is taken by " in last_line(result)
    assert f"(pid {os.getpid()})" in last_line(result)


def test_port_taken_on_all_addresses_counts(start):
    with socket.socket() as listener:
        listener.bind(("0.0.0.0", 0))
        listener.listen()
        assert start("--port", listener.getsockname()[1]).returncode == Exit.REFUSED


def test_damaged_model_is_refused_in_one_line(start, checkpoint_folder, unused_port):
    shard = checkpoint_folder / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-3])
    result = start("--port", unused_port)
    assert result.returncode == Exit.REFUSED
    assert str(shard) in last_line(result) and "3 bytes are missing" in last_line(result)
    assert len(result.stderr.strip().splitlines()) == 1


def test_model_without_questions_is_refused(start, checkpoint_folder, unused_port):
    (checkpoint_folder / "canary.json").unlink()
    result = start("--port", unused_port)
    assert result.returncode == Exit.REFUSED and "canary.json" in last_line(result)


def test_plan_starts_nothing_and_shows_no_secret(run, tmp_path):
    result = run("plan", "--port", "8899", "--run-dir", tmp_path / "run", VLLM_API_KEY="sk-secret", HF_HOME="/x")
    assert result.returncode == 0
    assert "--port 8899" in result.stdout and "VLLM_API_KEY=<set, not shown>" in result.stdout
    assert "sk-secret" not in result.stdout + result.stderr
    assert "HF_HOME" in result.stderr
    assert not (tmp_path / "run").exists()


def test_status_and_stop_of_nothing(run, tmp_path):
    assert run("status", "--run-dir", tmp_path).returncode == Exit.NOT_RUNNING
    assert run("stop", "--run-dir", tmp_path).returncode == 0
    assert run("logs", "--run-dir", tmp_path).returncode == Exit.NOT_RUNNING


def test_folder_of_the_caller_cannot_shadow_the_launcher(run, tmp_path):
    (tmp_path / "launcher").mkdir()
    (tmp_path / "launcher/__main__.py").write_text("raise SystemExit(99)")
    (tmp_path / "json.py").write_text("raise SystemExit(98)")
    assert run("status", "--run-dir", tmp_path / "run").returncode == Exit.NOT_RUNNING


def test_script_works_through_a_link(tmp_path):
    (tmp_path / "link").symlink_to(SCRIPT)
    result = subprocess.run([tmp_path / "link", "status", "--run-dir", tmp_path], capture_output=True, text=True)
    assert result.returncode == Exit.NOT_RUNNING


def test_missing_python_is_one_sentence(tmp_path):
    """A machine whose only Python is too old, or lacks venv."""
    for name in ("python3", "python3.11", "python3.12", "python3.13", "python3.14"):
        (tmp_path / name).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    for name in ("bash", "dirname", "readlink", "env"):
        (tmp_path / name).symlink_to(f"/usr/bin/{name}")
    result = subprocess.run([SCRIPT, "status"], capture_output=True, text=True, env={"PATH": str(tmp_path)})
    assert result.returncode == Exit.REFUSED
    assert "No Python 3.11 to 3.14" in result.stderr and len(result.stderr.splitlines()) == 1


def test_launcher_needs_only_the_standard_library():
    code = "import sys, launcher.__main__; print(sorted({m.split('.')[0] for m in sys.modules}))"
    result = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    loaded = set(eval(result.stdout))
    assert loaded <= set(sys.stdlib_module_names) | {"launcher", "__main__"}, loaded
