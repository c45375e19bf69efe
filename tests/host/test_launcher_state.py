import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from launcher import lifecycle, processes
from launcher.errors import Exit, LauncherError
from launcher.state import Process, State, StateFile, this_process


@pytest.fixture
def sleeper():
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    yield Process(child.pid, processes.start_time(child.pid))
    child.kill()
    child.wait()


@pytest.fixture
def state_file(values):
    values["run_dir"].mkdir()
    return StateFile(values["run_dir"])


def state_of(server=None, launcher=None, **changes) -> State:
    gone = Process(2**22 + 1, 1)
    return replace(State("ready", 8888, "m", "/log", time.time(), launcher or gone, server, ready=True), **changes)


def test_state_survives_the_file(state_file, sleeper):
    state = state_of(sleeper, this_process())
    state_file.write(state)
    assert state_file.read() == state
    assert state_file.read_alive() == state


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"launcher": null}', '{"phase": "ready"}'])
def test_unreadable_state_is_none(state_file, text):
    state_file.path.write_text(text)
    assert state_file.read() is None


def test_dead_server_is_not_alive(state_file):
    state_file.write(state_of(Process(2**22 + 1, 5), this_process()))
    assert state_file.read_alive() is None


def test_reused_pid_is_another_process(state_file, sleeper, values, capsys):
    """Same pid, other start time: neither called running nor killed."""
    state_file.write(state_of(Process(sleeper.pid, sleeper.started - 1)))
    assert state_file.read_alive() is None
    assert lifecycle.stop(values) == Exit.OK
    assert sleeper.is_alive
    assert "Not running" in capsys.readouterr().out
    assert not state_file.path.exists()


def test_second_start_says_where_the_first_runs(state_file, sleeper):
    state_file.write(state_of(sleeper, port=8899))
    with pytest.raises(LauncherError, match=r"Already running on http://127\.0\.0\.1:8899") as caught:
        lifecycle.refuse_second_start(state_file)
    assert caught.value.code == Exit.BUSY


def test_start_after_a_crash_is_not_refused(state_file):
    state_file.write(state_of(Process(2**22 + 1, 5)))
    lifecycle.refuse_second_start(state_file)
    assert not state_file.path.exists()


def test_lock_lets_one_start_at_a_time(state_file):
    script = f"""
import pathlib, sys
sys.path.insert(0, {os.getcwd()!r})
from launcher.state import StateFile
with StateFile(pathlib.Path({str(state_file.folder)!r})).lock():
    print("held", flush=True); sys.stdin.read()
"""
    other = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "held\n"
    with pytest.raises(LauncherError, match="Another start is under way"), state_file.lock():
        pass
    other.communicate("")
    with state_file.lock():
        pass


def test_stop_ends_a_detached_server_and_is_idempotent(state_file, sleeper, values, capsys):
    state_file.write(state_of(sleeper))
    assert lifecycle.stop(values) == Exit.OK
    assert not sleeper.is_alive and not state_file.path.exists()
    assert lifecycle.stop(values) == Exit.OK
    assert capsys.readouterr().out == "Stopped.\nNot running.\n"


def test_stop_ends_workers_whose_server_was_killed(state_file, values):
    """The group outlives its leader; so would a worker that holds the memory."""
    leader = subprocess.Popen(["bash", "-c", "sleep 60 & sleep 61"], start_new_session=True)
    server = Process(leader.pid, processes.start_time(leader.pid))
    while len(processes.group_members(leader.pid)) < 3:
        time.sleep(0.01)
    state_file.write(state_of(server))
    leader.kill()
    leader.wait()
    assert len(processes.group_members(leader.pid)) == 2
    assert lifecycle.stop(values) == Exit.OK
    assert processes.group_members(leader.pid) == []


def test_stop_kills_a_group_that_ignores_everything(monkeypatch):
    monkeypatch.setattr(processes, "TERMINATE_GRACE_S", 0.3)
    code = (
        "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (2, 15)]; print(1, flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    child.stdout.readline()
    processes.stop_group(child.pid, grace_s=0.3)
    assert processes.group_members(child.pid) == []


def test_status_of_nothing(values, capsys):
    assert lifecycle.status(values) == Exit.NOT_RUNNING
    assert "not running" in capsys.readouterr().out


def test_status_of_a_server_that_hangs(state_file, sleeper, values, unused_port, capsys):
    state_file.write(state_of(sleeper, port=unused_port))
    assert lifecycle.status(values) == Exit.SERVER
    assert "not answering" in capsys.readouterr().out


def test_status_while_starting_names_the_phase(state_file, sleeper, values, capsys):
    state_file.write(state_of(sleeper, this_process(), ready=False, phase="weights"))
    assert lifecycle.status(values) == Exit.STARTING
    assert "weights" in capsys.readouterr().out


def test_logs_of_nothing_and_of_something(values, state_file, capsys):
    assert lifecycle.logs(values, follow=False) == Exit.NOT_RUNNING
    (values["run_dir"] / "local.log").write_text("one\ntwo\n")
    assert lifecycle.logs(values, follow=True) == Exit.OK
    assert capsys.readouterr().out == "one\ntwo\n"


@pytest.fixture
def as_in_the_background():
    """As `nohup ... &` in a script leaves it: both signals are ignored from the beginning."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_start_in_the_background_hears_ctrl_c_and_lives_on_when_the_terminal_closes(as_in_the_background):
    with pytest.raises(lifecycle.Interrupted), lifecycle.signals_interrupt():
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)
    assert signal.getsignal(signal.SIGINT) == signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
