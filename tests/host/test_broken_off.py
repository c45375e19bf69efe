"""Launchers that are killed: what `status` says of it, and that the next start or `stop` ends what they left."""

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from stub_cluster import READY_LOG

from launcher import cluster_life, cluster_service, cluster_state, lifecycle, processes
from launcher.errors import Exit, LauncherError
from launcher.settings import REPOSITORY
from launcher.state import Process, State, StateFile, process_of, this_process

UP = {"exl3-tp2-rank0", "exl3-tp2-rank1", "exl3-tp2-rank0-server"}
GONE = Process(2**22 + 1, 1)


def wait_until(condition, what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, f"no {what} in time"
        time.sleep(0.02)


def begin(function, *arguments) -> multiprocessing.Process:
    """A launcher of its own, with what the test has put in the place of other programs."""
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    process.start()
    return process


def kill(process) -> None:
    process.kill()
    process.join(20)


# A cluster


def log_up_to(stub, text: str) -> None:
    whole = (stub.books / "server.log").read_text()
    (stub.books / "server.log").write_text(whole[: whole.index(text) + len(text)] + "\n")


PHASES = {
    "containers": lambda stub: stub.hang("--name exl3-tp2-rank1"),
    "ray": lambda stub: stub.joined("10.0.0.1"),
    "load": lambda stub: log_up_to(stub, "Resolved architecture"),
    "warm-up": lambda stub: log_up_to(stub, "Loading weights took"),
    "canary": lambda stub: setattr(stub.api, "delay_s", 30),
}


def mend(stub) -> None:
    stub.repair()
    stub.joined("10.0.0.1", "10.0.0.2")
    stub.api.delay_s = 0
    (stub.books / "server.log").write_text(READY_LOG.read_text().replace("quantization=None", "quantization=exl3"))


def phase_of(stub) -> str | None:
    state = cluster_life.files_of(stub.config()).read_state()
    return state and state.phase


@pytest.mark.parametrize("phase", PHASES)
def test_a_start_that_was_killed_is_told_and_the_next_goes_on(cluster_stub, capsys, phase):
    stub, config = cluster_stub, cluster_stub.config(MEMORY_GUARD_GIB="0.001" if phase == "load" else "0")
    PHASES[phase](stub)
    launcher = begin(cluster_life.start, config)
    wait_until(lambda: phase_of(stub) == phase and len(stub.calls("run")) == 2, phase)
    assert cluster_life.status(config) == Exit.STARTING
    capsys.readouterr()
    kill(launcher)
    assert cluster_life.status(config) == Exit.SERVER
    said = capsys.readouterr().out
    assert "status:   broken off\n" in said and f"phase:    {phase}\n" in said
    assert f"its process {launcher.pid} is gone" in said and "node 0 (10.0.0.1): ray: runs" in said
    with pytest.raises(LauncherError, match=rf"Phase {phase} was broken off \(its process {launcher.pid} is gone\)"):
        cluster_service.running(config)
    mend(stub)
    assert cluster_life.start(config) == Exit.OK
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("Note: ")]
    assert len(notes) == 1 and f"phase {phase} was broken off before; ends what that left (node 0" in notes[0]
    assert stub.running == UP
    assert cluster_life.stop(config) == Exit.OK
    assert stub.running == set() and stub.processes() == []


@pytest.mark.parametrize("phase", ["containers", "load"])
def test_stop_ends_what_a_killed_start_left(cluster_stub, phase):
    """In phase containers also what its last command starts only after the kill."""
    PHASES[phase](cluster_stub)
    launcher = begin(cluster_life.start, cluster_stub.config())
    wait_until(lambda: phase_of(cluster_stub) == phase and len(cluster_stub.calls("run")) == 2, phase)
    kill(launcher)
    late = begin(lambda: (time.sleep(0.4), cluster_stub.repair()))
    assert cluster_life.stop(cluster_stub.config()) == Exit.OK
    late.join()
    assert cluster_stub.running == set() and cluster_stub.processes() == []
    assert cluster_life.status(cluster_stub.config()) == Exit.NOT_RUNNING


def test_a_helper_that_hangs_is_ended(cluster_stub, monkeypatch):
    monkeypatch.setattr(cluster_life, "HELPERS_S", 0.2)
    PHASES["containers"](cluster_stub)
    launcher = begin(cluster_life.start, cluster_stub.config())
    wait_until(lambda: len(cluster_stub.calls("run")) == 2, "second container")
    kill(launcher)
    assert cluster_life.stop(cluster_stub.config()) == Exit.OK
    wait_until(lambda: cluster_stub.processes() == [], "end of the helper")


def test_a_start_that_was_killed_in_its_checks_leaves_nothing(cluster_stub):
    cluster_stub.hang("info")
    launcher = begin(cluster_life.start, cluster_stub.config())
    wait_until(lambda: cluster_stub.calls("info"), "checks")
    kill(launcher)
    assert cluster_life.status(cluster_stub.config()) == Exit.NOT_RUNNING
    cluster_stub.repair()
    assert cluster_life.start(cluster_stub.config()) == Exit.OK


@pytest.mark.parametrize("command", [cluster_life.restart, cluster_life.stop], ids=["restart", "stop"])
@pytest.mark.parametrize("then", [cluster_life.start, cluster_life.restart, cluster_life.stop],
                         ids=["start", "restart", "stop"])  # fmt: skip
def test_an_end_that_was_killed_is_told_and_finished(cluster_stub, capsys, command, then):
    config = cluster_stub.config()
    assert cluster_life.start(config) == Exit.OK
    cluster_stub.hang("stop -t 5 exl3-tp2-rank1")
    launcher = begin(command, config)
    wait_until(lambda: len(cluster_stub.running) == 1, "end of node 0")
    capsys.readouterr()
    assert cluster_life.status(config) == Exit.STARTING
    assert "status:   stopping\n" in capsys.readouterr().out
    kill(launcher)
    assert cluster_life.status(config) == Exit.SERVER
    said = capsys.readouterr().out
    assert "status:   broken off\nphase:    stop\n" in said and "left:     runs: 1 of 3\n" in said
    assert "node 1 (10.0.0.2): ray: runs" in said
    cluster_stub.repair()
    assert then(config) == Exit.OK
    assert cluster_stub.running == (set() if then is cluster_life.stop else UP)


def rewrite(files: cluster_state.Files, **launcher: object) -> None:
    state = files.read_state()
    files.write_state(replace(state, ready=False, phase="load", launcher=replace(state.launcher, **launcher)))


def test_after_a_reboot_pids_mean_nothing(cluster_stub, capsys):
    """This process lives, and has the pid and the start time of the state's launcher."""
    config = cluster_stub.config()
    assert cluster_life.start(config) == Exit.OK
    files = cluster_life.files_of(config)
    assert files.read_state().launcher == this_process()
    rewrite(files, boot="another")
    capsys.readouterr()
    assert cluster_life.status(config) == Exit.SERVER
    assert f"{socket.gethostname()} was restarted since" in capsys.readouterr().out
    assert cluster_life.start(config) == Exit.OK


def test_a_launcher_of_another_machine_is_not_judged(cluster_stub):
    config = cluster_stub.config()
    assert cluster_life.start(config) == Exit.OK
    rewrite(cluster_life.files_of(config), boot="another", host="spark-9")
    assert cluster_life.status(config) == Exit.STARTING
    with pytest.raises(LauncherError, match="phase load of tp2 runs on spark-9, which cannot be seen") as told:
        cluster_life.start(config)
    assert told.value.code == Exit.BUSY and cluster_stub.running == UP
    assert cluster_life.stop(config) == Exit.OK
    assert cluster_stub.running == set()


def test_what_a_killed_start_left_on_a_node_that_is_away_is_named(cluster_stub, capsys):
    PHASES["ray"](cluster_stub)
    launcher = begin(cluster_life.start, cluster_stub.config())
    wait_until(lambda: phase_of(cluster_stub) == "ray", "ray")
    kill(launcher)
    (cluster_stub.books / "ssh-down").touch()
    assert cluster_life.status(cluster_stub.config()) == Exit.SERVER
    said = capsys.readouterr().out
    assert "left:     runs: 1 of 2, 1 on nodes that were not reached\n" in said
    assert "node 1 (10.0.0.2): ray: node not reached" in said
    with pytest.raises(LauncherError, match="still there: node 1"):
        cluster_life.start(cluster_stub.config())
    assert cluster_life.status(cluster_stub.config()) == Exit.STARTING, "this process has taken over, and lives"


# The local topology

# In the place of vLLM: a log up to a phase, a process beside it, an API that may never answer.
SERVER = """\
import subprocess, sys, threading, time
sys.path[:0] = [{root!r}, {here!r}]
from http.server import ThreadingHTTPServer
from stub_cluster import Api, READY_LOG, expected_answers
end, port = sys.argv[1:]
text = READY_LOG.read_text().replace("quantization=None", "quantization=exl3")
worker = subprocess.Popen(["sleep", "60"])
class LocalApi(Api):
    answers, delay_s = expected_answers(), 60 * (end == "canary")
    def do_GET(self):
        if self.path == "/version":
            return super().do_GET()
        self.reply('{{"data": [{{"id": "GLM-5.3-Flash-EXL3"}}]}}')
try:
    if end not in ("", "canary"):
        print(text[: text.index(end)], flush=True)
        time.sleep(60)
    server = ThreadingHTTPServer(("127.0.0.1", int(port)), LocalApi)
    print(text, flush=True)
    server.serve_forever()
finally:
    worker.kill()
"""
ENDS = {
    "imports": "Initializing a V1", "weights": "Loading weights took", "engine": "init engine (",
    "http": "Application startup", "canary": "canary",
}  # fmt: skip


class Local:
    """A local topology whose environment is there, and whose server is a stand-in."""

    def __init__(self, folder: Path, values: dict, port: int, patch) -> None:
        self.values, self.end = values | {"port": port, "detach": True, "run_dir": folder / "run"}, ""
        self.state_file = StateFile(self.values["run_dir"])
        here = str(Path(__file__).parent)
        (folder / "server.py").write_text(SERVER.format(root=str(REPOSITORY), here=here))
        self.script = str(folder / "server.py")
        patch.setattr(lifecycle.environment, "make_environment", self.make_environment)
        patch.setattr(lifecycle.environment.Sources, "python", Path(sys.executable))
        patch.setattr(lifecycle.plans, "make_plan", self.plan)

    def make_environment(self, *_) -> None:
        while self.end == "environment":
            time.sleep(0.1)

    def plan(self, values, python, ambient, token=""):
        argv = (str(python), self.script, ENDS.get(self.end, ""), str(values["port"]))
        return lifecycle.plans.Plan(argv, {}, dict(ambient), (), values["run_dir"], values["port"])

    def start(self) -> int:
        return lifecycle.start(self.values, os.environ)

    def start_elsewhere(self) -> int:
        """By a launcher that has ended once the server is ready."""
        launcher = begin(lambda: sys.exit(self.start()))
        launcher.join(60)
        return launcher.exitcode

    @property
    def phase(self) -> str | None:
        state = self.state_file.read()
        return state and state.phase

    def group(self) -> list[int]:
        state = self.state_file.read()
        return processes.group_members(state.server.pid) if state and state.server else []

    def processes(self) -> list[int]:
        return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and
                self.script.encode() in processes.command_line(entry)]  # fmt: skip


@pytest.fixture
def local(tmp_path, values, unused_port, monkeypatch):
    model = REPOSITORY / "models/local"
    one = Local(tmp_path, values | {"model": model, "canary": model / "canary.json"}, unused_port, monkeypatch)
    yield one
    lifecycle.stop(one.values)
    assert one.processes() == []


@pytest.mark.parametrize("phase", ["environment", *ENDS])
def test_a_local_start_that_was_killed_is_told_and_the_next_goes_on(local, capfd, phase):
    local.end = phase
    launcher = begin(local.start)
    wait_until(lambda: local.phase == phase and len(local.group()) == 2 * (phase != "environment"), phase)
    assert lifecycle.status(local.values) == Exit.STARTING
    with pytest.raises(LauncherError, match="Another start is under way") as told:
        local.start()
    assert told.value.code == Exit.BUSY
    capfd.readouterr()
    kill(launcher)
    assert lifecycle.status(local.values) == Exit.SERVER
    said = capfd.readouterr().out
    assert f"status:   broken off\nphase:    {phase}\n" in said and f"its process {launcher.pid} is gone" in said
    assert ("left:     nothing runs any more" if phase == "environment" else "left:     2 processes of group") in said
    with pytest.raises(LauncherError, match=f"The start was broken off in phase {phase}"):
        lifecycle.ready_state(local.state_file)
    local.end = ""
    if phase in ("environment", "canary"):
        assert local.start_elsewhere() == Exit.OK
        assert lifecycle.status(local.values) == Exit.OK
    else:
        assert lifecycle.stop(local.values) == Exit.OK
        assert lifecycle.status(local.values) == Exit.NOT_RUNNING and local.processes() == []
    notes = [line for line in capfd.readouterr().err.splitlines() if line.startswith("Note: ")]
    assert len(notes) == 1 and f"an earlier start was broken off in phase {phase} (" in notes[0]


def test_a_stop_that_was_killed_is_finished_by_another(local):
    assert local.start_elsewhere() == Exit.OK
    state = local.state_file.read()
    os.kill(state.server.pid, signal.SIGSTOP)  # so that it does not end when it is asked
    stopping = begin(lifecycle.stop, local.values)
    time.sleep(0.3)
    kill(stopping)
    os.kill(state.server.pid, signal.SIGCONT)
    assert lifecycle.stop(local.values) == Exit.OK
    assert local.processes() == [] and lifecycle.status(local.values) == Exit.NOT_RUNNING


def test_a_server_begins_only_when_it_is_on_record(tmp_path):
    code = f"""
import os, signal, sys
sys.path.insert(0, {str(REPOSITORY)!r})
from launcher import processes
print(1, flush=True)
processes.start_recorded(["touch", {str(tmp_path / "begun")!r}], lambda pid: print(pid, flush=True) or
                         os.kill(os.getpid(), signal.SIGKILL))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    pid = int(done.stdout.splitlines()[1])
    wait_until(lambda: processes.start_time(pid) is None, "end of what had not begun")
    assert done.returncode == -signal.SIGKILL and not (tmp_path / "begun").exists()


def a_state(**changes) -> State:
    return replace(State("weights", 8888, "m", "/log", time.time(), GONE, process_of(os.getpid())), **changes)


def test_after_a_reboot_no_local_process_is_taken_for_ours(values, capsys):
    state_file = StateFile(values["run_dir"])
    values["run_dir"].mkdir()
    there = subprocess.Popen(["sleep", "60"], start_new_session=True)
    before = [replace(one, boot="before") for one in (this_process(), process_of(there.pid))]
    state_file.write(a_state(launcher=before[0], server=before[1]))
    assert lifecycle.status(values) == Exit.SERVER
    said = capsys.readouterr().out
    assert f"{socket.gethostname()} was restarted since" in said and "nothing runs any more" in said
    assert lifecycle.stop(values) == Exit.OK and there.poll() is None
    there.kill()
    there.wait()


def test_a_local_run_of_another_machine_is_not_judged(values, capsys):
    state_file = StateFile(values["run_dir"])
    values["run_dir"].mkdir()
    away = Process(1, 1, "b", "spark-9")
    state_file.write(a_state(launcher=away, server=away, ready=True))
    assert lifecycle.status(values) == Exit.SERVER and "elsewhere" in capsys.readouterr().out
    for function in (lifecycle.stop, lambda _: lifecycle.refuse_second_start(state_file)):
        with pytest.raises(LauncherError, match="phase weights runs on spark-9, which cannot be seen from here"):
            function(values)
    assert state_file.read()


def test_a_state_of_an_older_launcher_is_of_this_machine(values):
    raw = json.loads('{"pid": 1, "started": 0}')
    assert Process(**raw).is_of_this_boot and not Process(**raw).is_elsewhere
