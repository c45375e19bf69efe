"""The owner's soak without engines: what is refused before it starts, what runs where, what is said after, Ctrl-C."""

import argparse
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from stub_cluster import LOCAL_MODEL, an_image

from launcher import (
    cluster,
    cluster_life,
    cluster_soak,
    cluster_state,
    commands,
    environment,
    lifecycle,
    local_soak,
    recipe,
    soak,
    watch,
)
from launcher import settings as local_settings
from launcher.commands import Unit
from launcher.errors import Exit, LauncherError
from launcher.lifecycle import Interrupted
from launcher.remote import Node
from launcher.state import State, StateFile, this_process

KEY = "sk-not-in-any-argument"
METRICS = 'vllm:cache_config_info{block_size="64",enable_prefix_caching="True",mamba_block_size="4352"} 1.0\n'
PLAIN, ASYNC, FLASH, BOTH = (
    "nocache-nodrafts-sync-eager-triton-auto", "cache-mtp1-async-eager-triton-auto",
    "cache-mtp3-sync-graphs-flashkda-auto", "nocache-dflash7-async-graphs-flashkda-auto",
)  # fmt: skip
PLENTY, LITTLE = (f"MemTotal: 125829120 kB\nMemFree: 1 kB\nMemAvailable: {gib << 20} kB\n" for gib in (120, 50))

# In the place of tests/soak/run.py and over_http.py: says what it was told, and writes a report as they do.
STAND_IN = r"""
import json, os, sys, time
from pathlib import Path
words = sys.argv[1:]
given = dict(zip(words[::2], words[1::2]))
report = Path(given["--report"])
print("1 engines of cuda", flush=True)
seen = {"words": words, "pid": os.getpid(), "path": os.environ.get("PYTHONPATH"), "key": os.environ.get("VLLM_API_KEY")}
(report.parent / "part").write_text(json.dumps(seen))
(report.parent / "part").rename(report.parent / "seen")
behave = json.loads((Path(__file__).parent / "behave").read_text())
if behave.get("hang"):
    time.sleep(60)
print(f"  again, with 1 sessions: python3 tests/soak/run.py --arms a --plan {report.parent}/a.small.json")
if behave.get("report"):
    report.write_text(json.dumps(behave["report"]))
sys.exit(behave["code"])
"""


def arm(*findings):
    return {"turns": 100, "hits": 40, "findings": list(findings)}


def report(code=0, platform="cuda", failed=(), **arms):
    verdicts = [f"{'FAIL' if name in failed else 'PASS'} {name}: 100 turns, 40 hits" for name in arms]
    said = {"platform": {"name": platform}, "verdicts": verdicts, "arms": arms, "settings": {}}
    return {"code": code, "report": said}


GOOD = report(**{name: arm() for name in (PLAIN, ASYNC, FLASH, BOTH)})


def options(**given):
    parser = argparse.ArgumentParser()
    soak.add_options(parser)
    words = [word for name, value in given.items() for word in ("--" + name, *([] if value is True else [str(value)]))]
    return soak.options_of(parser.parse_args(words))


class Machine:
    """The pretended pair, with an image, a GPU, memory, and a stand-in for what the soak runs."""

    def __init__(self, stub, folder: Path) -> None:
        self.stub, self.folder = stub, folder
        self.behave(GOOD)
        (folder / "meminfo").write_text(PLENTY)
        (folder / "stand_in.py").write_text(STAND_IN)
        stub.images("head", ours=an_image("a", "l1", recipe=recipe.digest()))

    def behave(self, how: dict) -> None:
        (self.folder / "behave").write_text(json.dumps(how))

    def run(self, changes=None, **given) -> Exit:
        return cluster_soak.run(self.stub.config(**(changes or {})), options(**given))

    @property
    def out(self) -> Path:
        (found,) = (self.stub.run_dir / "tp2-soak").iterdir()
        return found

    @property
    def seen(self) -> dict:
        return json.loads((self.out / "seen").read_text())

    def pretend_running(self) -> None:
        files = self.stub.pretend_ready(self.stub.config())
        unit = cluster_state.StartedUnit(Node(0, "10.0.0.1"), Unit("server", (), (), (), (), ()))
        state = files.read_state()
        files.write_state(cluster_state.replace(state, units=(unit,)))
        files.write_record({"ranks": [{"commands": [["ray"], ["vllm", "--max-num-batched-tokens", "7168"]]}]})
        self.stub.api.counters = METRICS


@pytest.fixture
def machine(cluster_stub, tmp_path, monkeypatch):
    made = Machine(cluster_stub, tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(soak, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(soak, "ENGINES", tmp_path / "stand_in.py")
    monkeypatch.setattr(soak, "OVER_HTTP", tmp_path / "stand_in.py")
    yield made
    cluster_state.files_of(cluster_stub.config()).forget_state()


# Refused before anything starts


@pytest.mark.parametrize(("given", "words"), [
    ({"minutes": 1}, "--minutes is 1, it must be from 2"), ({"sessions": 0}, "--sessions is 0"),
    ({"plan": "/none.json"}, "--plan /none.json: no such file"), ({"report": "/none/r.json"}, "cannot be written"),
    ({"report": "/"}, "cannot be written"), ({"running": True, "arms": "product"}, "leave them or --running out"),
    ({"running": True, "bugs": True}, "leave them or --running out"),
])  # fmt: skip
def test_wrong_usage_is_one_sentence(given, words):
    with pytest.raises(LauncherError, match=words) as told:
        options(**given)
    assert told.value.code == Exit.USAGE


def assert_refused(machine, words: str, code: Exit, **changes) -> None:
    with pytest.raises(LauncherError, match=words) as told:
        machine.run(changes)
    assert told.value.code == code and "\n" not in str(told.value)
    assert machine.stub.calls("run") == [] and not (machine.stub.run_dir / "tp2-soak").exists()


def test_a_running_service_keeps_its_memory(machine, monkeypatch):
    machine.pretend_running()
    monkeypatch.setattr(watch, "state_of", lambda unit: {"Running": True})
    words = r"tp2 runs and has this node's memory; `\./start\.sh stop` first, .*soak --running"
    assert_refused(machine, words, Exit.BUSY)


def test_a_missing_image_folder_or_gpu_is_told(machine, monkeypatch):
    machine.stub.images("head")
    assert_refused(machine, "is not on this machine; .*image build", Exit.SETUP)
    machine.stub.images("head", ours=an_image("a", "l1"))
    (machine.stub.books / "clocks-head").unlink()
    assert_refused(machine, "nvidia-smi shows no GPU", Exit.REFUSED)
    monkeypatch.setattr(soak, "FOLDERS", ("tests/soak", "models/none"))
    assert_refused(machine, "models/none is not there", Exit.SETUP)


def test_little_memory_is_refused_with_both_numbers(machine):
    (machine.folder / "meminfo").write_text(LITTLE)
    assert_refused(machine, r"50\.0 GiB are available here and 7 engines side by side need 56\.0", Exit.REFUSED)


def test_a_start_waits_for_a_soak(machine):
    with cluster_state.files_of(machine.stub.config()).lock():
        assert_refused(machine, "sync or soak of tp2 is under way", Exit.BUSY)


# What runs


def test_the_container_has_what_a_rank_has_and_no_network(machine):
    assert machine.run({"PDL": "1", "VLLM_API_KEY": KEY}, seed=7) == Exit.OK
    (call,) = [one for one in machine.stub.calls("run") if "--gpus" in one]
    named = dict(call[at + 1].partition("=")[::2] for at, word in enumerate(call) if word == "--env")
    assert set(commands.SHARED_ENVIRONMENT | commands.CACHES) < set(named)
    assert named["PDL"] == "1" and named["MLA_GEOMETRY"] == "auto" and named["VLLM_USE_DEEP_GEMM"] == "1"
    assert call[call.index("--network") + 1] == "none" and call[call.index("--pull") + 1] == "never"
    assert KEY not in json.dumps(machine.stub.calls("run", "rm")) and machine.seen["key"] is None
    mounts = [word for word in call if word.startswith("type=bind")]
    writable = [mount for mount in mounts if not mount.endswith(",readonly")]
    assert len(writable) == 2 and f"source={machine.out},target={machine.out}" in writable[1]
    for name in soak.FOLDERS:
        place = local_settings.REPOSITORY / name
        assert place.is_dir() and f"type=bind,source={place},target={place},readonly" in mounts
    assert machine.seen["words"][:2] == ["--seconds", "570"] and "--parallel" in machine.seen["words"]
    assert ["--seed", "7"] == machine.seen["words"][4:6]


def test_the_words_are_those_of_the_real_soak(machine, monkeypatch, capsys):
    """Its parser takes all of them, and ends with its own exit code where one is wrong."""
    monkeypatch.undo()
    plan = machine.folder / "plan.json"
    edges = {"block": 256, "chunk": 509, "longest": 2040, "graphs": []}
    plan.write_text(json.dumps({"seed": 0, "edges": edges, "sessions": []}))
    given = options(minutes=3, arms="fast", sessions=4, seed=1, plan=plan, report=machine.folder / "r.json")
    words = soak.engine_words(given, machine.folder)
    done = subprocess.run([sys.executable, soak.ENGINES, *words], capture_output=True, text=True)
    assert done.returncode == Exit.USAGE and "--arms fast: no such arm" in done.stderr
    assert {"--plan", "--seconds", "--sessions", "--seed", "--report", "--work", "--parallel"} < set(words)


def test_without_containers_the_same_process_runs_here(machine):
    changes = {"RUNTIME": "native", "NATIVE_PYTHON": sys.executable}
    assert machine.run(changes, sessions=3, arms="product") == Exit.OK
    assert machine.stub.calls("run") == [] and ["--arms", "product"] == machine.seen["words"][-4:-2]
    assert machine.seen["path"] == str(local_settings.REPOSITORY)


def test_what_runs_is_asked_with_its_own_numbers_and_the_key_in_no_argument(machine, monkeypatch):
    machine.pretend_running()
    asked = []

    def request(port, method, path, headers, host):
        asked.append(headers)
        return 200, json.dumps({"data": [{"max_model_len": 262144}]}).encode()

    monkeypatch.setattr(soak.canary, "request", request)
    monkeypatch.setattr(soak.counters, "fetch", lambda host, port, key: soak.counters.Counters(METRICS))
    http = {"turns": 9, "hits": 4, "findings": [], "misshapen": [], "plan": {}}
    machine.behave({"code": 0, "report": http})
    assert machine.run({"VLLM_API_KEY": KEY, "KDA_PREFILL_BACKEND": "flashkda"}, running=True) == Exit.OK
    words = machine.seen["words"]
    given = dict(zip(words[::2], words[1::2], strict=True))
    assert given["--url"] == f"http://127.0.0.1:{machine.stub.port}/v1" and given["--model"] == str(LOCAL_MODEL)
    numbers = {"block": "4352", "chunk": "7168", "longest": "262144", "sessions": "12"}
    assert {name: given[f"--{name}"] for name in numbers} == numbers
    assert asked[0]["Authorization"] == f"Bearer {KEY}" and machine.seen["key"] == KEY
    (call,) = [one for one in machine.stub.calls("run") if "host" in one]
    assert KEY not in json.dumps(machine.stub.calls("run", "rm"))
    assert call[call.index("VLLM_API_KEY") - 1] == "--env" and "--gpus" not in call
    assert KEY not in (machine.out / "soak.json").read_text()


def test_a_wrong_key_and_a_stopped_server_are_told_before(machine, monkeypatch, capsys):
    assert machine.run(running=True) == Exit.NOT_RUNNING
    machine.pretend_running()
    monkeypatch.setattr(soak.canary, "request", lambda *a, **more: (401, b""))
    with pytest.raises(LauncherError, match="its key is another than VLLM_API_KEY"):
        machine.run(running=True)


def test_a_server_without_room_for_the_judge_is_left_alone(machine, monkeypatch):
    machine.pretend_running()
    monkeypatch.setattr(cluster_soak, "SCORED_ROWS", 1 << 40)
    with pytest.raises(LauncherError, match=r"node 0 \(10\.0\.0\.1\): .* answers of 1,024 kinds of tokens needs"):
        machine.run(running=True)


# What is said after


def test_lines_come_through_in_our_words_and_the_report_is_complete(machine, capsys):
    place = machine.folder / "mine.json"
    assert machine.run(report=place) == Exit.OK
    said = capsys.readouterr()
    assert "1 engines of cuda\n" in said.err
    assert f"./start.sh soak --arms a --plan {machine.out}/a.small.json" in said.err
    assert "400 turns in 4 arms, 160 of them from the prefix cache: nothing was found." in said.out
    assert f"The report is {place};" in said.out
    assert "you may set ASYNC_SCHEDULING=1 and KDA_PREFILL_BACKEND=flashkda" in said.out
    told = json.loads(place.read_text())["launcher"]
    assert told["image"]["id"] == "sha256:" + "a" * 64 and told["gpu"].startswith("2400")
    assert len(told["commit"]) >= 40 if (cluster_soak.REPOSITORY / ".git").exists() else told["commit"] == "not told"
    assert told["may_be_set"] == ["ASYNC_SCHEDULING=1", "KDA_PREFILL_BACKEND=flashkda"]


def allowed(code=0, failed=(), names=(PLAIN, ASYNC, FLASH, BOTH), platform="cuda", **given):
    made = report(code, platform, failed, **{name: arm() for name in names})["report"]
    return soak.settings_allowed(made, options(**given), code)


def test_a_fast_choice_is_named_only_where_every_arm_with_it_passed(tmp_path):
    assert allowed() == ["ASYNC_SCHEDULING=1", "KDA_PREFILL_BACKEND=flashkda"]
    assert allowed(failed=[ASYNC]) == ["KDA_PREFILL_BACKEND=flashkda"]  # as if the code were no second bar
    assert allowed(failed=[BOTH]) == []
    assert allowed(names=[PLAIN, FLASH]) == ["KDA_PREFILL_BACKEND=flashkda"]
    # Arms without the cache cannot show what these choices are feared for.
    assert allowed(names=[PLAIN, BOTH]) == []
    (plan := tmp_path / "plan").write_text("{}")
    assert allowed(arms="all") and not allowed(arms="product") and not allowed(arms=ASYNC)
    assert allowed(sessions=40) == allowed()
    for more in ({"code": 1}, {"platform": "cpu"}, {"bugs": True}, {"plan": plan}, {"sessions": 39}):
        assert allowed(**more) == []


@pytest.mark.parametrize(("code", "words"), [(1, "1 findings, failed: " + ASYNC), (3, "not every arm gave an answer")])
def test_exit_codes_are_those_of_the_soak(machine, capsys, code, words):
    made = report(code, "cuda", [ASYNC], **{PLAIN: arm(), ASYNC: arm({"text": "wrong"})})
    machine.behave(made)
    assert machine.run() == code
    said = capsys.readouterr().out
    assert words in said and "you may set" not in said


def test_wrong_words_end_without_a_report(machine, capsys):
    machine.behave({"code": 2})
    assert machine.run(arms="fast") == Exit.USAGE and capsys.readouterr().out == ""


def test_any_other_end_is_an_error_with_the_last_lines(machine):
    machine.behave({"code": 125})
    with pytest.raises(LauncherError, match=r"(?s)1 engines of cuda.*ended with 125; .*logs are in"):
        machine.run()
    for code in (0, 1):
        machine.behave({"code": code})
        with pytest.raises(LauncherError, match=f"ended with {code} and left no .*soak.json; the lines above"):
            cluster_soak.run(machine.stub.config(), options())


def test_findings_of_states_are_counted():
    made = report(1, **{PLAIN: arm({}), ASYNC: arm() | {"states": {"findings": [{}, {}]}}})["report"]
    assert ": 3 findings" in soak.summary(made, 1)


def test_planted_bugs_that_show_are_told_as_such():
    made = GOOD["report"] | {"settings": {"bugs": "all"}}
    assert "every planted bug that must show did." in soak.summary(made, 0)
    lacks = {f"other-slot in {ASYNC}": "needs CUDA", "contexts above 2040 tokens": "dense"}
    assert "did, 1 could not be planted here." in soak.summary(made | {"not_run": lacks}, 0)


# Its end


def when_it_runs(machine, do) -> threading.Thread:
    """Calls do(pid) in a thread as soon as the stand-in has said who it is."""

    def watch_it():
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            for file in (machine.stub.run_dir / "tp2-soak").glob("*/seen"):
                return do(json.loads(file.read_text())["pid"])
            time.sleep(0.02)

    thread = threading.Thread(target=watch_it)
    thread.start()
    return thread


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_an_interrupt_leaves_no_process_and_no_container(machine):
    machine.behave({"hang": True})
    thread = when_it_runs(machine, lambda pid: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(Interrupted):
        machine.run()
    thread.join()
    assert is_gone(machine.seen["pid"])
    removed = [call[1:] for call in machine.stub.calls("rm")]
    assert removed == [["rm", "--force", "--volumes", "exl3-tp2-rank0-soak"]] * 3  # before, of a killed one, and after
    assert machine.stub.calls("run")[0][machine.stub.calls("run")[0].index("--name") + 1] == removed[0][-1]


def killed(machine, run, folder: Path) -> int:
    """Kills the launcher of a soak, a process of its own; the pid of what it left."""
    launcher = multiprocessing.get_context("fork").Process(target=run)
    launcher.start()
    deadline = time.monotonic() + 30
    while not (found := list(folder.glob("*/seen"))):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    launcher.kill()
    launcher.join(20)
    return json.loads(found[0].read_text())["pid"]


@pytest.mark.parametrize("then", ["start", "stop", "soak"])
def test_what_a_killed_soak_left_is_told_and_ended(machine, capsys, then):
    config = machine.stub.config()
    machine.behave({"hang": True})
    left = killed(machine, machine.run, machine.stub.run_dir / "tp2-soak")
    assert cluster_life.status(config) == Exit.SERVER
    said = capsys.readouterr().out
    assert "status:   broken off\nphase:    soak\n" in said and "left:     runs: 1 of 2" in said and not is_gone(left)
    machine.behave(GOOD)
    assert (machine.run() if then == "soak" else getattr(cluster_life, then)(config)) == Exit.OK
    assert is_gone(left)
    assert ("phase soak was broken off before" in capsys.readouterr().err) == (then != "stop")
    assert ["rm", "--force", "--volumes", "exl3-tp2-rank0-soak"] in [call[1:] for call in machine.stub.calls("rm")]
    cluster_life.stop(config)


def test_status_tells_a_soak_that_is_under_way(machine, capsys):
    machine.behave({"hang": True})
    said = []

    def look(pid):
        said.append(cluster_life.status(machine.stub.config()))
        os.kill(os.getpid(), signal.SIGINT)

    thread = when_it_runs(machine, look)
    with pytest.raises(Interrupted):
        machine.run()
    thread.join()
    assert said == [Exit.STARTING] and "status:   soak\n" in capsys.readouterr().out
    assert cluster_life.status(machine.stub.config()) == Exit.NOT_RUNNING


def test_it_ends_before_the_machine_has_no_memory_left(machine):
    machine.behave({"hang": True})
    (machine.folder / "low").write_text(PLENTY.replace(str(120 << 20), "1024"))
    thread = when_it_runs(machine, lambda pid: (machine.folder / "low").replace(machine.folder / "meminfo"))
    with pytest.raises(LauncherError, match="less than the 1 GiB of MEMORY_GUARD_GIB were available"):
        machine.run({"MEMORY_GUARD_GIB": "1"})
    thread.join()
    assert is_gone(machine.seen["pid"])


def test_a_daemon_that_does_not_answer_is_told_and_waited_for_no_longer(monkeypatch, capsys):
    monkeypatch.setattr(soak, "DOCKER_S", 0.2)
    begin = time.monotonic()
    soak.run_briefly(["sleep", "20"])
    said = "".join(capsys.readouterr())
    assert time.monotonic() - begin < 10 and "no answer in 0.2 s, left undone: sleep 20" in said


def test_it_ends_when_it_hangs_beyond_its_time(machine, monkeypatch):
    machine.behave({"hang": True})
    monkeypatch.setattr(soak, "OVERTIME_S", -10_000)
    with pytest.raises(LauncherError, match="after its time was over; it was ended"):
        machine.run()


# The command lines, and the local topology


def test_both_command_lines_have_it(machine, monkeypatch, capsys):
    for script, words in (("./start.sh", ["cluster", "start.sh", "tp2"]), ("./start-local.sh", ["local"])):
        command = [sys.executable, "-m", "launcher", *words, "soak", "--help"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=local_settings.REPOSITORY)
        assert done.returncode == 0 and f"usage: {script} soak" in done.stdout and "--running" in done.stdout
    monkeypatch.setattr(cluster, "read_config", lambda *_: machine.stub.config())
    assert cluster.main(["start.sh", "tp2", "soak", "--sessions", "2"], {}) == Exit.OK


@pytest.fixture
def local(machine, values, monkeypatch):
    """(settings, what it was told): the environment is there already, and is this one."""
    monkeypatch.setattr(local_soak.environment, "make_environment", lambda *_: -1)
    monkeypatch.setattr(environment.Sources, "python", Path(sys.executable))
    machine.behave(report(0, "cpu", **{PLAIN: arm()}))
    return values, lambda: json.loads(next((values["run_dir"] / "local-soak").glob("*/seen")).read_text())


def test_the_local_soak_asks_more_than_two_hundred_turns(local, monkeypatch, capsys):
    values, seen = local
    assert local_soak.run(values, {"VLLM_API_KEY": KEY, "PATH": os.environ["PATH"]}, options()) == Exit.OK
    given = dict(zip(seen()["words"][::2], seen()["words"][1::2], strict=True))
    assert "you may set" not in capsys.readouterr().out and seen()["key"] is None
    monkeypatch.syspath_prepend(str(local_settings.REPOSITORY / "tests" / "soak"))
    import sessions

    for seed in range(8):
        for block in (16, 128, 512):
            edges = sessions.Edges(block, 2048, 2040)
            assert sessions.make_plan(seed, int(given["--sessions"]), edges).turns >= 200


def test_what_a_killed_local_soak_left_is_told_and_ended(local, machine, capsys):
    values, _ = local
    machine.behave({"hang": True})
    ambient = {"PATH": os.environ["PATH"]}
    left = killed(machine, lambda: local_soak.run(values, ambient, options()), values["run_dir"] / "local-soak")
    assert lifecycle.status(values) == Exit.SERVER and "phase:    soak\n" in capsys.readouterr().out
    assert not is_gone(left)
    machine.behave(report(0, "cpu", **{PLAIN: arm()}))
    assert local_soak.run(values, ambient, options()) == Exit.OK
    assert is_gone(left) and "broken off in phase soak" in capsys.readouterr().err
    assert lifecycle.status(values) == Exit.NOT_RUNNING


def test_a_local_server_is_asked_with_its_model_and_key(local, monkeypatch, values):
    values, seen = local
    values |= {"api_key": KEY}
    state_file = StateFile(values["run_dir"])
    values["run_dir"].mkdir()
    assert local_soak.run(values, {}, options(running=True)) == Exit.NOT_RUNNING
    state_file.write(State("ready", 8888, "/models/x", "log", time.time(), this_process(), ready=True))
    with pytest.raises(LauncherError, match=r"soak: a server runs here \(port 8888\).*soak --running"):
        local_soak.run(values, {}, options())
    monkeypatch.setattr(soak, "edges_of", lambda host, port, key: {"block": 64, "longest": 2048})
    assert local_soak.run(values, {"PATH": os.environ["PATH"]}, options(running=True)) == Exit.OK
    given = dict(zip(seen()["words"][::2], seen()["words"][1::2], strict=True))
    assert given["--url"] == "http://127.0.0.1:8888/v1" and given["--model"] == "/models/x" and seen()["key"] == KEY
