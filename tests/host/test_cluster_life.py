"""Start, restart, stop and status against stub programs: what is called, in which order, and what is left."""

import json
import stat
import time

import pytest
from stub_cluster import LOCAL_MODEL

from launcher import clocks, cluster_life, watch
from launcher.errors import Exit, LauncherError

GUARDED = {"MEMORY_GUARD_GIB": "0.001"}
BOTH = {"exl3-tp2-rank0", "exl3-tp2-rank1"}
UP = BOTH | {"exl3-tp2-rank0-server"}


def test_start_ends_ready_and_stop_leaves_nothing(cluster_stub, capsys):
    config = cluster_stub.config(**GUARDED)
    assert cluster_life.start(config) == Exit.OK
    assert cluster_stub.running == UP
    said = capsys.readouterr()
    assert f"http://127.0.0.1:{cluster_stub.port}/v1" in said.out
    for phase in ("checks", "containers", "ray", "load", "warm-up", "canary"):
        assert phase in said.err
    assert cluster_life.status(config) == Exit.OK
    assert cluster_life.stop(config) == Exit.OK
    assert cluster_stub.running == set()
    assert cluster_life.status(config) == Exit.NOT_RUNNING


def test_ray_starts_on_every_node_before_the_server(cluster_stub):
    cluster_life.start(cluster_stub.config())
    looks = ("nvidia-smi", "/exl3/config/inside.py")
    calls = [call for call in cluster_stub.calls("run", "exec") if not set(looks) & set(call)]
    order = [(call[0], call[1], "ray.nodes()" in " ".join(call)) for call in calls]
    assert order[:2] == [("head", "run", False), ("worker", "run", False)]
    assert order.index(("head", "exec", True)) == 2
    assert set(order[3:]) == {("head", "exec", False)}


def test_no_secret_is_in_an_argument_or_a_record(cluster_stub):
    key = "k3y-that-nobody-may-see"
    cluster_life.start(cluster_stub.config(VLLM_API_KEY=key))
    environment = cluster_stub.run_dir / "exl3-tp2-rank0" / "environment"
    lines = dict(line.split("=", 1) for line in environment.read_text().splitlines())
    assert lines["VLLM_API_KEY"] == key and len(lines["RAY_AUTH_TOKEN"]) >= 32
    assert stat.S_IMODE(environment.stat().st_mode) == 0o600
    worker = next((cluster_stub.books / "worker-home").rglob("environment")).read_text()
    assert key not in worker and lines["RAY_AUTH_TOKEN"] in worker
    public = (cluster_stub.books / "calls").read_text() + "".join(
        (cluster_stub.run_dir / name).read_text() for name in ("tp2.json", "tp2-run.json")
    )
    assert key not in public and lines["RAY_AUTH_TOKEN"] not in public


def test_record_says_what_was_started(cluster_stub):
    cluster_life.start(cluster_stub.config())
    record = json.loads((cluster_stub.run_dir / "tp2-run.json").read_text())
    assert record["sources"]["PORT"] == "environment"
    assert record["image_id"] == "sha256:" + "a" * 64
    assert [rank["address"] for rank in record["ranks"]] == ["10.0.0.1", "10.0.0.2"]
    assert record["ranks"][1]["environment"]["VLLM_HOST_IP"] == "10.0.0.2"


FAILURES = {
    "worker's container": ("--name exl3-tp2-rank1", "node 1 .*ray could not be started"),
    "head's container": ("--name exl3-tp2-rank0", "node 0 .*ray could not be started"),
    "worker's GPU": ("rank1 nvidia-smi -L", "node 1 .*its container sees no GPU"),
    "server": ("runner.py start", "node 0 .*server could not be started"),
}


@pytest.mark.parametrize("part, message", FAILURES.values(), ids=FAILURES)
def test_a_failing_step_is_named_and_leaves_nothing(cluster_stub, part, message):
    cluster_stub.fail(part)
    with pytest.raises(LauncherError, match=message):
        cluster_life.start(cluster_stub.config())
    assert cluster_stub.running == set()
    assert cluster_life.status(cluster_stub.config()) == Exit.NOT_RUNNING


def test_a_node_that_does_not_join_ray_is_told_by_phase(cluster_stub):
    cluster_stub.joined("10.0.0.1")
    with pytest.raises(LauncherError, match=r"phase ray is not over after 2 s \(1 of 2 GPUs\)"):
        cluster_life.start(cluster_stub.config(RAY_TIMEOUT_S="2"))
    assert cluster_stub.running == set()


def test_a_rank_that_dies_while_loading_is_noticed(cluster_stub, monkeypatch, capsys):
    (cluster_stub.books / "server.log").write_text("INFO nothing yet\n")
    look = watch.Watcher.look

    def look_after_death(watcher):
        if len(watcher.units) == 5:
            cluster_stub.lose("exl3-tp2-rank1")
        look(watcher)

    monkeypatch.setattr(watch.Watcher, "look", look_after_death)
    with pytest.raises(LauncherError, match=r"node 1 \(10.0.0.2\): ray ended with exit code 137"):
        cluster_life.start(cluster_stub.config(**GUARDED))
    assert "what the container said" in capsys.readouterr().err
    assert cluster_stub.running == set()
    assert (cluster_stub.run_dir / "tp2-logs" / "rank1-ray.log").read_text() == "what the container said\n"


def test_a_node_that_is_lost_while_loading_is_named_and_not_forgotten(cluster_stub, monkeypatch, capsys):
    (cluster_stub.books / "server.log").write_text("INFO nothing yet\n")
    monkeypatch.setattr(watch, "LOST_AFTER_S", 0.3)
    look = watch.Watcher.look

    def look_at_lost_node(watcher):
        if len(watcher.units) == 5:
            (cluster_stub.books / "ssh-down").touch()
        look(watcher)

    monkeypatch.setattr(watch.Watcher, "look", look_at_lost_node)
    with pytest.raises(LauncherError, match=r"node 1 \(10.0.0.2\): ray: the node has not answered over ssh"):
        cluster_life.start(cluster_stub.config(**GUARDED))
    assert "still there: node 1" in capsys.readouterr().err
    assert cluster_stub.running == {"exl3-tp2-rank1"}
    (cluster_stub.books / "ssh-down").unlink()
    assert cluster_life.stop(cluster_stub.config()) == Exit.OK
    assert cluster_stub.running == set()


def test_a_wrong_answer_ends_the_start(cluster_stub):
    cluster_stub.api.damaged = True
    with pytest.raises(LauncherError, match=r"canary: to .* the model answered '!!!!'") as caught:
        cluster_life.start(cluster_stub.config())
    assert caught.value.code == Exit.WRONG_ANSWER
    assert cluster_stub.running == set()


@pytest.mark.parametrize("key, asked", [("", "a request for rebound.invalid"), ("sk-x", "a request without its key")])
def test_a_server_that_lets_everyone_in_ends_the_start(cluster_stub, key, asked):
    cluster_stub.api.is_open = True
    with pytest.raises(LauncherError, match=f"door: the server answered {asked} with status 200"):
        cluster_life.start(cluster_stub.config(VLLM_API_KEY=key, BIND="127.0.0.1"))
    assert cluster_stub.running == set()


def test_an_engine_that_does_not_answer_ends_the_start_in_its_time(cluster_stub):
    cluster_stub.api.delay_s = 30
    began = time.monotonic()
    with pytest.raises(LauncherError, match=r"no answer to .* 1 s for all questions are over"):
        cluster_life.start(cluster_stub.config(CANARY_TIMEOUT_S="1"))
    assert time.monotonic() - began < 30
    assert cluster_stub.running == set()


def test_drafts_that_are_never_accepted_end_the_start(cluster_stub):
    cluster_stub.api.counters = 'vllm:spec_decode_num_draft_tokens_total{engine="0"} 70.0\n'
    with pytest.raises(LauncherError, match="SPEC_METHOD=mtp drafted 70 tokens and none was accepted"):
        cluster_life.start(cluster_stub.config(SPEC_METHOD="mtp"))
    assert cluster_stub.running == set()


def test_a_second_start_is_refused_and_touches_nothing(cluster_stub):
    config = cluster_stub.config()
    cluster_life.start(config)
    with pytest.raises(LauncherError, match="already runs") as caught:
        cluster_life.start(config)
    assert caught.value.code == Exit.BUSY
    assert cluster_stub.running == UP


def test_a_restart_whose_checks_fail_stops_nothing(cluster_stub):
    config = cluster_stub.config()
    cluster_life.start(config)
    before = cluster_stub.calls("stop", "rm")
    assert before  # of what may have been left over before the start
    (cluster_stub.books / "ssh-down").touch()
    with pytest.raises(LauncherError, match=r"Nothing was started and nothing was stopped: .*ssh-access"):
        cluster_life.restart(cluster_stub.config(SKIP_CHECKS=config_without_ssh(config)))
    (cluster_stub.books / "ssh-down").unlink()
    assert cluster_stub.calls("stop", "rm") == before
    assert cluster_stub.running == UP
    assert cluster_life.status(config) == Exit.OK


def config_without_ssh(config) -> str:
    return ",".join(name for name in config["SKIP_CHECKS"] if name != "ssh-access")


def test_a_restart_replaces_what_runs(cluster_stub):
    config = cluster_stub.config()
    cluster_life.start(config)
    assert cluster_life.restart(config) == Exit.OK
    assert cluster_stub.running == UP
    assert len(cluster_stub.calls("run")) == 4


def test_stop_without_a_run_says_so(cluster_stub, capsys):
    assert cluster_life.stop(cluster_stub.config()) == Exit.OK
    assert "Not running." in capsys.readouterr().out


def test_stop_tells_when_a_node_is_not_reached_and_keeps_the_state(cluster_stub):
    config = cluster_stub.config()
    cluster_life.start(config)
    (cluster_stub.books / "ssh-down").touch()
    with pytest.raises(LauncherError, match=r"still there: node 1 .*not reached"):
        cluster_life.stop(config)
    (cluster_stub.books / "ssh-down").unlink()
    assert cluster_life.stop(config) == Exit.OK
    assert cluster_stub.running == set()


def test_status_sees_a_dead_rank(cluster_stub, capsys):
    config = cluster_stub.config()
    cluster_life.start(config)
    cluster_stub.lose("exl3-tp2-rank1")
    assert cluster_life.status(config) == Exit.SERVER
    assert "node 1 (10.0.0.2): ray: ended with exit code 137" in capsys.readouterr().out


def test_status_sees_an_engine_that_stands_still(cluster_stub, capsys, monkeypatch):
    config = cluster_stub.config()
    cluster_life.start(config)
    cluster_stub.api.counters = (
        'vllm:num_requests_running{engine="0"} 1.0\nvllm:generation_tokens_total{engine="0"} 7.0\n'
    )
    monkeypatch.setattr(cluster_life.time, "sleep", lambda _: None)
    assert cluster_life.status(config) == Exit.SERVER
    assert "stuck" in capsys.readouterr().out


def test_status_does_not_take_a_long_prompt_for_a_standstill(cluster_stub, capsys, monkeypatch):
    config = cluster_stub.config()
    cluster_life.start(config)
    counters = "vllm:num_requests_running 1.0\nvllm:prompt_tokens_total 7.0\nvllm:kv_cache_usage_perc {}\n"
    cluster_stub.api.counters = counters.format(0.25)
    slept = []

    def read_a_step(seconds):
        slept.extend([seconds] if seconds == cluster_life.LOOK_AGAIN_S else [])
        if len(slept) == 3:
            cluster_stub.api.counters = counters.format(0.5)

    monkeypatch.setattr(cluster_life.time, "sleep", read_a_step)
    assert cluster_life.status(config) == Exit.OK
    assert len(slept) == 3


def test_status_sees_a_container_that_lost_its_gpu(cluster_stub, capsys):
    config = cluster_stub.config()
    cluster_life.start(config)
    cluster_stub.fail("rank1 nvidia-smi -L")
    assert cluster_life.status(config) == Exit.SERVER
    said = capsys.readouterr().out
    assert "node 1 (10.0.0.2): its container sees no GPU any more (stub: told to fail); `restart`" in said
    assert "status:   broken" in said


# What only a rank that runs can tell


@pytest.mark.parametrize("packages, message", [
    ({"flashinfer_python": "0.7.1"}, "FlashInfer 0.7.1 inside, 0.7.2.post1 is needed"),
    ({"vllm": "0.34.0"}, "vLLM 0.34.0 inside, 0.33.0 is needed"),
    ({"torch": "2.13.0"}, "torch 2.13.0 inside, 2.14.0 on node 0"),
])  # fmt: skip
def test_another_engine_inside_ends_the_start_before_the_server(cluster_stub, capsys, packages, message):
    cluster_stub.inside(1, **packages)
    with pytest.raises(LauncherError, match=r"phase containers: engine-versions failed.*SKIP_CHECKS=engine-versions"):
        cluster_life.start(cluster_stub.config())
    assert f"node 1: {message}" in capsys.readouterr().err
    assert cluster_stub.running == set()
    assert not [call for call in cluster_stub.calls("exec") if "start" in call]


def test_what_is_inside_is_recorded_and_its_check_can_be_left_out(cluster_stub):
    cluster_stub.inside(1, vllm="0.34.0")
    skipped = ",".join([*cluster_stub.config()["SKIP_CHECKS"], "engine-versions"])
    assert cluster_life.start(cluster_stub.config(SKIP_CHECKS=skipped)) == Exit.OK
    record = json.loads((cluster_stub.run_dir / "tp2-run.json").read_text())
    assert [rank["packages"]["vllm"] for rank in record["ranks"]] == ["0.33.0", "0.34.0"]


def answer_slowly(cluster_stub, monkeypatch):
    monkeypatch.setattr(clocks, "SAMPLE_EVERY_S", 0.01)
    cluster_stub.api.delay_s = 1


def test_a_clock_that_is_stuck_low_ends_the_start(cluster_stub, capsys, monkeypatch):
    answer_slowly(cluster_stub, monkeypatch)
    cluster_stub.clock("worker", 507)
    with pytest.raises(LauncherError, match=r"phase canary: sm-clocks failed.*SKIP_CHECKS=sm-clocks") as caught:
        cluster_life.start(cluster_stub.config())
    assert caught.value.code == Exit.SERVER
    assert "node 1: SM clock 507 of 3003 MHz while busy: stuck low" in capsys.readouterr().err
    assert cluster_stub.running == set()


def test_a_stuck_clock_can_be_lived_with_by_name(cluster_stub, monkeypatch):
    answer_slowly(cluster_stub, monkeypatch)
    cluster_stub.clock("worker", 507)
    skipped = ",".join([*cluster_stub.config()["SKIP_CHECKS"], "sm-clocks"])
    assert cluster_life.start(cluster_stub.config(SKIP_CHECKS=skipped)) == Exit.OK


# Long questions


def long_list(cluster_stub, tmp_path, tokens: int):
    """A model folder whose list has a long question, and an API that finds the needle."""
    folder = tmp_path / "long"
    folder.mkdir()
    questions = json.loads((LOCAL_MODEL / "canary.json").read_text())
    questions.append({"kind": "long", "tokens": tokens, "limit_s": 20, "needle": "The number of the box is 4827.",
                      "question": "What is the number of the box?", "must_contain": ["4827"]})  # fmt: skip
    (folder / "canary.json").write_text(json.dumps(questions))
    cluster_stub.api.answers |= {"What is the number of the box?": "4827"}
    return cluster_stub.config(MODEL_DIR=str(folder))


def test_a_long_question_is_asked_at_a_start(cluster_stub, tmp_path, capsys):
    cluster_stub.api.longest = 262_144
    assert cluster_life.start(long_list(cluster_stub, tmp_path, 14_000)) == Exit.OK
    assert "(14,000 tokens of text) What is the number of the box?\n    4827" in capsys.readouterr().out
    assert len(cluster_stub.api.asked[-1].split()) + 8 == 14_000


def test_a_long_question_that_does_not_fit_is_left_out_with_a_note(cluster_stub, tmp_path, capsys):
    assert cluster_life.start(long_list(cluster_stub, tmp_path, 14_000)) == Exit.OK
    assert "Note: the question of 14,000 tokens is left out: with 2,048 for its answer" in capsys.readouterr().err


def test_three_nodes_refuse_to_start():
    from launcher import config, topology

    values = {"HEAD_IP": "10.0.0.1", "WORKER_IP": "10.0.0.2", "WORKER2_IP": "10.0.0.3"}
    three = config.load(topology.TOPOLOGIES["tp3"], None, ".env.tp3", values)
    with pytest.raises(LauncherError, match="cannot start yet"):
        cluster_life.start(three)
