"""Every document of --json is one, is what its schema says, and says what the text says."""

import copy
import json
import subprocess
import time
from dataclasses import replace

import pytest
from cluster_settings import ADMIN, SECRET, TOKEN
from documents_of import SCHEMAS, read, validator
from jsonschema import ValidationError
from recorded import FOLDER, context
from test_cluster_plan import CASES, plan_of
from test_in_service import METRICS, without
from test_launcher_state import sleeper, state_file, state_of  # noqa: F401 - fixtures

from launcher import (
    __main__,
    cluster,
    cluster_life,
    cluster_plan,
    counters,
    lifecycle,
    plan,
    preflight,
    programs,
    remote,
    reports,
    status,
)
from launcher.arguments import JSON, make_parser
from launcher.cluster_state import StartedUnit, files_of, new_state
from launcher.counters import Counters
from launcher.errors import Exit, LauncherError
from launcher.settings import REPOSITORY
from launcher.state import this_process
from launcher.status import LostGpu, Status, UnitStatus

PAGE = (REPOSITORY / "docs/json.md").read_text()


def rendered(report, notes=()) -> dict:
    return read(reports.render(report.kind, report.code, report.problem, report.body(), notes), report.code)


# The schemas


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_is_one_and_is_told(name):
    validator(name).check_schema(SCHEMAS[name])
    assert SCHEMAS[name]["$id"] == f"{name}.json" and f"schemas/{name}.json" in PAGE


def test_the_schema_knows_every_state():
    assert set(SCHEMAS["status"]["properties"]["status"]["enum"]) == set(status.CODES)
    assert all(f"`{word}`" in PAGE for word in status.CODES)


@pytest.mark.parametrize("change", [
    lambda found: found.pop("counters"),
    lambda found: found.update(more=1),
    lambda found: found.update(status="fine"),
    lambda found: found.update(error=None),
    lambda found: found.update(schema_version=2),
    lambda found: found["units"][0].update(state="up"),
])  # fmt: skip
def test_a_damaged_document_is_refused(change):
    found = rendered(Status(status.BROKEN, units=[UnitStatus(0, "10.0.0.1", "ray", "gone")]))
    damaged = copy.deepcopy(found)
    change(damaged)
    with pytest.raises(ValidationError):
        read(json.dumps(damaged))


def test_the_commands_that_take_it_are_those_of_the_page():
    taken = set()
    for program in programs.programs():
        commands = make_parser(program)._subparsers._group_actions[0].choices
        taken |= {f"{program.script} {name}" for name, made in commands.items() if JSON in made._option_string_actions}
    scripts = ("./start.sh", "./start-tp3.sh", "./start-tp4.sh")
    assert taken == {f"{script} {name}" for script in scripts for name in ("check", "plan", "status")} | {
        "./start-local.sh plan", "./start-local.sh status",
    }  # fmt: skip


# status


METRICS_SEEN = [Counters(), Counters(METRICS), without("spec_decode"), without("exl3:"), without("cache_config")]
UNITS = [UnitStatus(0, "10.0.0.1", "ray", "runs"), UnitStatus(1, "10.0.0.2", "ray", "ended", 137),
         UnitStatus(1, "10.0.0.2", "guard", "not reached")]  # fmt: skip


@pytest.mark.parametrize("word", status.CODES)
@pytest.mark.parametrize("seen", [None, *METRICS_SEEN])
def test_every_status_is_as_the_schema_says(word, seen):
    lost = [LostGpu(1, "10.0.0.2", "Failed to initialize NVML")]
    for units, lost_gpus in (((), ()), (UNITS, lost)):
        found = Status(word, phase="load", since=time.time() - 70, url="http://127.0.0.1:1/v1", counters=seen,
                       silent_s=15, units=units, lost_gpus=lost_gpus)  # fmt: skip
        document = rendered(found, ["a note"])
        assert document["status"] == word and document["answers"] == (seen is not None)
        assert (document["error"] is None) == (word == status.READY) and document["notes"] == ["a note"]
        assert 70 <= document["uptime_s"] < 100


def test_the_counters_are_those_of_the_text():
    numbers = counters.numbers(Counters(METRICS))
    assert numbers["prefix_cache"] == {"prompt_tokens": 200_000, "found_tokens": 146_000, "block_tokens": 4352}
    assert numbers["drafts"] == {
        "drafts": 1000, "drafted_tokens": 2000, "accepted_tokens": 1300, "accepted_by_position": [800, 500],
    }  # fmt: skip
    assert numbers["loops"]["answers_repeating"] == 1 and numbers["preemptions"] == 3
    assert counters.numbers(Counters()) == dict.fromkeys(numbers)


def test_local_status_without_and_with_a_run(values, state_file, sleeper, unused_port, capsys):  # noqa: F811
    assert lifecycle.status(values, as_json=True) == Exit.NOT_RUNNING
    nothing = read(capsys.readouterr().out, Exit.NOT_RUNNING)
    assert nothing["status"] == "not running" and nothing["error"]["name"] == "NOT_RUNNING"
    state_file.write(state_of(sleeper, port=unused_port))
    assert lifecycle.status(values, as_json=True) == Exit.SERVER
    hangs = read(capsys.readouterr().out, Exit.SERVER)
    assert hangs["status"] == "not answering" and hangs["pid"] == sleeper.pid and str(unused_port) in hangs["url"]
    state_file.write(state_of(sleeper, this_process(), ready=False, phase="weights"))
    assert lifecycle.status(values, as_json=True) == Exit.STARTING
    assert "phase weights" in read(capsys.readouterr().out, Exit.STARTING)["error"]["message"]


def pretend_started(stub, config) -> None:
    """As a start leaves it, in the state and in the books of the stubs."""
    made = plan_of(config)
    state = replace(new_state(made), url=f"http://127.0.0.1:{stub.port}", phase="ready", ready=True)
    for node, rank in zip(remote.nodes_of(config), made.ranks, strict=True):
        for unit in rank.units:
            state = state.with_unit(StartedUnit(node, unit))
            name = rank.name if unit.name == "ray" else f"{rank.name}-{unit.name}"
            (stub.books / "running" / name).write_text(json.dumps({"Running": True, "ExitCode": 0, "Pid": 1}))
    files_of(config).write_state(state)


def test_cluster_status_without_and_with_a_run(cluster_stub, capsys):
    config = cluster_stub.config()
    assert cluster_life.status(config, as_json=True) == Exit.NOT_RUNNING
    assert read(capsys.readouterr().out, Exit.NOT_RUNNING)["units"] == []
    pretend_started(cluster_stub, config)
    cluster_stub.api.counters = METRICS.replace("requests_running", "requests_gone")
    assert cluster_life.status(config, as_json=True) == Exit.OK
    ready = read(capsys.readouterr().out, Exit.OK)
    assert ready["status"] == "ready" and ready["counters"]["tokens_written"] == 12345
    assert [unit["name"] for unit in ready["units"]] == ["ray", "server", "ray"]
    cluster_stub.lose("exl3-tp2-rank1")
    (cluster_stub.books / "running/exl3-tp2-rank0-server").unlink()
    assert cluster_life.status(config, as_json=True) == Exit.SERVER
    broken = read(capsys.readouterr().out, Exit.SERVER)
    assert [unit["state"] for unit in broken["units"]] == ["runs", "gone", "ended"]
    assert broken["units"][2]["exit_code"] == 137 and "exit code 137" in broken["error"]["message"]


# check


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.json")))
def test_check_of_every_recorded_cluster(name):
    report = preflight.CheckReport(preflight.run_checks(context(name)))
    document = rendered(report)
    text = report.text()
    assert [one["check"] for one in document["findings"]] == [one.check for one in report.findings]
    assert all(one["fix"] in text for one in document["findings"] if one["level"] == "FAIL")
    bad = {one["check"] for one in document["findings"] if one["level"] == "FAIL"}
    assert bool(bad) == (document["exit_code"] == Exit.REFUSED) == bool(document["error"])
    assert all(one in document["error"]["message"] for one in bad)
    assert sum(document["counts"].values()) == len(document["findings"])


# plan


@pytest.mark.parametrize("name", CASES)
def test_plan_of_every_golden_cluster(name):
    config, is_found = CASES[name]
    made = plan_of(config(), is_found)
    document = rendered(reports.PlanReport(cluster_plan.body(made), ""), made.notes)
    assert len(document["nodes"]) == made.config.topology.nodes and document["notes"] == list(made.notes)
    assert bool(document["unresolved"]) == (not is_found)
    for node, rank in zip(document["nodes"], made.ranks, strict=True):
        assert [unit["start"] for unit in node["units"]] == [list(unit.start) for unit in rank.units]
        assert node["environment"].keys() == rank.environment.keys()
    text = json.dumps(document)
    assert not [secret for secret in (SECRET, TOKEN, ADMIN) if secret in text]


def test_plan_of_this_machine(values):
    made = lifecycle.plan_for(values | {"api_key": SECRET}, {"HF_HOME": "/x"}, admin_token=ADMIN)
    document = rendered(reports.PlanReport(plan.body(made), ""), lifecycle.ignored_notes(made))
    (node,) = document["nodes"]
    assert node["units"][0]["start"] == list(made.argv) and "HF_HOME" in document["notes"][0]
    assert node["environment"]["VLLM_API_KEY"] == plan.REDACTED
    assert SECRET not in json.dumps(document) and ADMIN not in json.dumps(document)


# Refusals, and what else is on the two streams


ENDS = {
    "refused": (LauncherError("there: seen, needed.", Exit.BUSY), Exit.BUSY, "there: seen, needed."),
    "interrupted": (KeyboardInterrupt(), Exit.INTERRUPTED, "Interrupted; nothing was left running."),
}


@pytest.mark.parametrize("name", ENDS)
def test_what_came_to_no_result_is_a_document_and_a_sentence(name, monkeypatch, capsys):
    def fail(values, ambient):
        raise error

    error, code, message = ENDS[name]
    monkeypatch.setattr(lifecycle, "plan_for", fail)
    assert __main__.main(["local", "plan", "--json"]) == code
    said = capsys.readouterr()
    assert read(said.out, code)["error"] == {"exit_code": code, "name": code.name, "message": message}
    assert said.err.strip() == message
    assert __main__.main(["local", "plan"]) == code
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("words", [["status", "--jsom"], ["status", "--json", "more"], ["begin", "--json"]])
def test_wrong_usage_is_told_in_the_form_that_was_asked_for(words, capsys):
    assert __main__.main(["local", *words]) == Exit.USAGE
    said = capsys.readouterr()
    assert "./start-local.sh" in said.err and "--help" in said.err
    if "--json" in words:
        assert read(said.out, Exit.USAGE)["schema"] == "error"
    else:
        assert said.out == ""


@pytest.mark.parametrize("command, code", [("status", Exit.NOT_RUNNING), ("check", Exit.USAGE), ("plan", Exit.USAGE)])
def test_a_cluster_with_a_mistake_in_its_settings(command, code, tmp_path, monkeypatch, capsys):
    """`status` goes by the state and notes the mistake; the others refuse."""
    (tmp_path / ".env").write_text("HAED_IP=10.0.0.1\n")
    monkeypatch.setattr(cluster, "REPOSITORY", tmp_path)
    monkeypatch.setenv("RUN_DIR", str(tmp_path / "run"))
    assert __main__.main(["cluster", "start.sh", "tp2", command, "--json"]) == code
    said = capsys.readouterr()
    document = read(said.out, code)
    assert "HAED_IP" in json.dumps(document) and "HAED_IP" in said.err
    assert document["schema"] == ("status" if command == "status" else "error")


def test_the_script_prints_one_document(tmp_path):
    script = REPOSITORY / "start-local.sh"
    for words, code in ((["status"], Exit.NOT_RUNNING), (["plan"], Exit.OK)):
        done = subprocess.run([script, *words, "--json", "--run-dir", tmp_path / "run"], capture_output=True, text=True)
        assert done.returncode == code and read(done.stdout, code)["schema"] == words[0]
