"""The program that runs a rank's commands where there is no container, on real processes."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher import runner

PROGRAM = Path(runner.__file__)


@pytest.fixture
def call(tmp_path):
    def run(command, *words, argv=()):
        line = [sys.executable, str(PROGRAM), command, "--folder", str(tmp_path), "--name", "unit", *words]
        return subprocess.run([*line, *(["--", *argv] if argv else [])], capture_output=True, text=True, timeout=60)

    yield run
    run("stop", "--grace-s", "1")


def state(result):
    return json.loads(result.stdout)


def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_command_runs_in_the_background_with_the_files_environment(call, tmp_path):
    (tmp_path / "environment").write_text('NAME=two "words"\nOTHER=a=b\n')
    script = 'echo "$NAME|$OTHER|$FOREIGN"; sleep 60'
    result = call("start", "--env-file", str(tmp_path / "environment"), argv=["sh", "-c", script])
    assert result.returncode == 0 and state(result)["Running"]
    wait_until(lambda: (tmp_path / "unit.log").read_text())
    assert (tmp_path / "unit.log").read_text() == 'two "words"|a=b|\n'


def test_exit_code_is_kept(call):
    call("start", argv=["sh", "-c", "exit 7"])
    wait_until(lambda: not state(call("state"))["Running"])
    assert state(call("state")) == {**state(call("state")), "Exists": True, "ExitCode": 7}


def test_nothing_is_nothing(call):
    assert state(call("state"))["Exists"] is False
    assert call("stop").returncode == 0


def test_second_start_is_refused(call):
    call("start", argv=["sleep", "60"])
    again = call("start", argv=["sleep", "60"])
    assert again.returncode == 1 and "already runs" in again.stderr


def test_command_that_is_missing_is_named(call):
    result = call("start", argv=["/no/such/program"])
    assert result.returncode == 1 and "cannot start /no/such/program" in result.stderr


def test_stop_ends_what_left_the_process_group_and_ignores_signals(call, tmp_path):
    call("start", argv=["sh", "-c", '(setsid sh -c "trap : TERM; sleep 61; sleep 62" &); sleep 60'])
    mark = f"{tmp_path}/unit"
    wait_until(lambda: len(runner.marked(mark)) >= 4)
    result = call("stop", "--grace-s", "2")
    assert result.returncode == 0 and state(result)["ExitCode"] == 143 and runner.marked(mark) == []


def test_orphans_end_with_the_command(call, tmp_path):
    call("start", argv=["sh", "-c", "(setsid sleep 61 &); exit 3"])
    wait_until(lambda: not state(call("state"))["Running"])
    assert runner.marked(f"{tmp_path}/unit") == [] and state(call("state"))["ExitCode"] == 3


def test_stop_finds_the_command_of_a_killed_supervisor(call, tmp_path):
    call("start", argv=["sh", "-c", "(setsid sleep 61 &); sleep 60"])
    wait_until(lambda: len(runner.marked(f"{tmp_path}/unit")) >= 3)
    os.kill(json.loads((tmp_path / "unit.json").read_text())["supervisor"], 9)
    wait_until(lambda: not state(call("state"))["Running"])
    assert state(call("state"))["ExitCode"] == -1
    assert call("stop").returncode == 0 and runner.marked(f"{tmp_path}/unit") == []


def test_previous_log_is_kept_once(call, tmp_path):
    for word in ("one", "two"):
        call("start", argv=["echo", word])
        wait_until(lambda: not state(call("state"))["Running"])
    assert [(tmp_path / name).read_text() for name in ("unit.log.1", "unit.log")] == ["one\n", "two\n"]


def test_run_stays_in_front(call, tmp_path):
    (tmp_path / "environment").write_text("NAME=value\n")
    result = call("run", "--env-file", str(tmp_path / "environment"), argv=["sh", "-c", 'echo "$NAME"; exit 5'])
    assert (result.returncode, result.stdout) == (5, "value\n")
