"""Every message of docs/troubleshooting.md, produced."""

import argparse
import contextlib
import io
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from docker_refusals import REFUSALS
from recorded import context
from stub_cluster import INSIDE, an_image

from launcher import (
    __main__,
    canary,
    clocks,
    cluster,
    cluster_life,
    cluster_service,
    cluster_soak,
    config,
    preflight,
    service,
    topology,
)
from launcher import soak as soaks
from launcher.counters import Counters, rows
from launcher.errors import LauncherError
from launcher.settings import REPOSITORY

CACHE_ON = 'vllm:cache_config_info{block_size="256",enable_prefix_caching="True"} 1.0\n'
TP2 = topology.TOPOLOGIES["tp2"]
ROWS = re.findall(r"^\| `([^`]+)` \|", (REPOSITORY / "docs/troubleshooting.md").read_text(), re.MULTILINE)


def said_by(function, *arguments) -> str:
    """What a user reads on the terminal."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            function(*arguments)
        except LauncherError as error:
            output.write(str(error))
    return output.getvalue()


def first_run(stub, monkeypatch, tmp_path):
    (tmp_path / ".env.example").write_text("HEAD_IP=\n")
    monkeypatch.setattr(cluster, "REPOSITORY", tmp_path)
    return said_by(cluster.main, ["start.sh", "tp2", "check"], {})


def of_settings(text):
    return lambda stub, monkeypatch, tmp_path: said_by(config.load, TP2, text, ".env", {})


def start_after(break_it, **changes):
    def produce(stub, monkeypatch, tmp_path):
        break_it(stub)
        return said_by(cluster_life.start, stub.config(**changes))

    return produce


def failing_check(stub, monkeypatch, tmp_path):
    skipped = [name for name in stub.config()["SKIP_CHECKS"] if name != "address"]
    return said_by(cluster_life.start, stub.config(SKIP_CHECKS=",".join(skipped)))


def second_start(stub, monkeypatch, tmp_path):
    said_by(cluster_life.start, stub.config())
    return said_by(cluster_life.start, stub.config())


def start_under_lock(stub, monkeypatch, tmp_path):
    with cluster_life.files_of(stub.config()).lock():
        return said_by(cluster_life.start, stub.config())


def dead_rank(stub, monkeypatch, tmp_path):
    (stub.books / "server.log").write_text("nothing yet\n")
    look = cluster_life.watch.Watcher.look

    def look_after_death(watcher):
        stub.lose("exl3-tp2-rank1")
        look(watcher)

    monkeypatch.setattr(cluster_life.watch.Watcher, "look", look_after_death)
    return said_by(cluster_life.start, stub.config())


def soak(stub):
    parser = argparse.ArgumentParser()
    soaks.add_options(parser)
    return said_by(cluster_soak.run, stub.config(), soaks.options_of(parser.parse_args([])))


def soak_beside_the_service(stub, monkeypatch, tmp_path):
    said_by(cluster_life.start, stub.config())
    return soak(stub)


def soak_without_memory(stub, monkeypatch, tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 125829120 kB\nMemAvailable: 1024 kB\n")
    monkeypatch.setattr(soaks, "MEMINFO", tmp_path / "meminfo")
    return soak(stub)


def stop_without_a_node(stub, monkeypatch, tmp_path):
    said_by(cluster_life.start, stub.config())
    (stub.books / "ssh-down").touch()
    return said_by(cluster_life.stop, stub.config())


def standstill(stub, monkeypatch, tmp_path):
    said_by(cluster_life.start, stub.config())
    stub.api.counters = "vllm:num_requests_running 1.0\nvllm:generation_tokens_total 7.0\n"
    monkeypatch.setattr(cluster_life.time, "sleep", lambda _: None)
    return said_by(cluster_life.status, stub.config())


def of_recorded(name):
    """What `check` prints of recorded nodes."""
    return lambda stub, monkeypatch, tmp_path: preflight.describe(preflight.run_checks(context(name)))


def stuck_clock(stub, monkeypatch, tmp_path):
    monkeypatch.setattr(clocks, "SAMPLE_EVERY_S", 0.01)
    stub.api.delay_s = 1
    stub.clock("worker", 507)
    return said_by(cluster_life.start, stub.config())


def other_library(stub):
    (stub.books / "inside-exl3-tp2-rank1").write_text(json.dumps({**INSIDE, "nccl": {"/opt/libnccl.so.2": "ff" * 32}}))


def hanging_long_question(stub, monkeypatch, tmp_path):
    question = canary.Question("Which number?", ("4827",), "long", 65, "The number is 4827.", 0.5)
    monkeypatch.setattr(cluster_life, "questions_of", lambda config: [question])
    stub.api.longest, stub.api.delay_s = 262_144, 10
    return said_by(cluster_life.start, stub.config())


def long_question_with_little_context(stub, monkeypatch, tmp_path):
    question = canary.Question("Which number?", ("4827",), "long", 65, "The number is 4827.", 0.5)
    fact = canary.Question("Which port does the API use?", ("8888",), "fact")
    monkeypatch.setattr(cluster_life, "questions_of", lambda config: [question, fact])
    return said_by(cluster_life.start, stub.config())


def lost_gpu(stub, monkeypatch, tmp_path):
    said_by(cluster_life.start, stub.config())
    stub.fail("rank1 nvidia-smi -L")
    return said_by(cluster_life.status, stub.config())


def no_way_to_the_gpu(stub):
    stub.daemon("worker", **dict(REFUSALS[name] for name in ("no toolkit", "CDI off", "no runtime")))


def status_without_settings(stub, monkeypatch, tmp_path):
    said_by(cluster_life.start, stub.config())
    (tmp_path / ".env").write_text("HEAD_IP='\n")
    monkeypatch.setattr(cluster, "REPOSITORY", tmp_path)
    return said_by(cluster.main, ["start.sh", "tp2", "status"], {"RUN_DIR": str(stub.run_dir)})


def start_of(command, **launcher):
    """The state of a start whose launcher is not this process any more."""

    def produce(stub, monkeypatch, tmp_path):
        files = stub.pretend_ready(stub.config())
        state = files.read_state()
        files.write_state(replace(state, ready=False, phase="load", launcher=replace(state.launcher, **launcher)))
        return said_by(command, stub.config())

    return produce


def without_packages(stub, monkeypatch, tmp_path):
    for name in ("launcher", "requirements"):
        shutil.copytree(REPOSITORY / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, tmp_path / "launcher/bootstrap.py", "start.sh", "tp2", "status"]
    return subprocess.run(command, capture_output=True, text=True).stderr


def escaped_folder_without_packages(stub, monkeypatch, tmp_path):
    monkeypatch.setattr(config, "has_parser", lambda: False)
    return said_by(config.of_what_runs, TP2, 'RUN_DIR="/srv/\\x41"\n', {})


def in_service(command, **changes):
    """What is said of a cluster whose API has these faults."""

    def produce(stub, monkeypatch, tmp_path):
        config = stub.config()
        stub.pretend_ready(config)
        monkeypatch.setattr(service, "WAIT_S", 0)
        for name, value in changes.items():
            setattr(stub.api, name, value)
        return said_by(command, config)

    return produce


def cached_question(**changes):
    question = canary.Question("Which port does the API use?", ("8888",), canary.CACHED, needle="It is 8888.")
    ask = in_service(cluster_service.ask, longest=262_144, **changes)

    def produce(stub, monkeypatch, tmp_path):
        monkeypatch.setattr(cluster_service, "questions_of", lambda config: [question])
        return ask(stub, monkeypatch, tmp_path)

    return produce


def answers_in_a_loop(stub, monkeypatch, tmp_path):
    counters = "exl3:answers_running 2.0\nexl3:answers_repeating 1.0\n"
    return "\n".join(dict(rows(Counters(counters))).values())


def three_nodes(stub, monkeypatch, tmp_path):
    values = {"HEAD_IP": "10.0.0.1", "WORKER_IP": "10.0.0.2", "WORKER2_IP": "10.0.0.3"}
    return said_by(cluster_life.start, config.load(topology.TOPOLOGIES["tp3"], None, ".env.tp3", values))


def start_with_images(head, worker, cut=False):
    def produce(stub, monkeypatch, tmp_path):
        stub.images("head", **head)
        stub.images("worker", **worker)
        if cut:
            (stub.books / "cut").touch()
        skipped = ",".join(name for name in stub.config()["SKIP_CHECKS"] if name != "image")
        return said_by(cluster_life.start, stub.config(SKIP_CHECKS=skipped))

    return produce


def check_over_ssh(script):
    def produce(stub, monkeypatch, tmp_path):
        (tmp_path / "ssh").write_text(f"#!/bin/sh\nfor last; do :; done\n{script}\n")
        (tmp_path / "ssh").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{stub.path}")
        return said_by(cluster_life.check, stub.config(SKIP_CHECKS=""))

    return produce


def cut_off(stub):
    (stub.books / "ssh-down").touch()


def stop_in_a_file(stub, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    return said_by(cluster_life.stop, stub.config(RUN_DIR=str(tmp_path / "file")))


def fault_of_ours(stub, monkeypatch, tmp_path):
    monkeypatch.setattr(cluster, "main", lambda *_: 1 / 0)
    monkeypatch.setenv("RUN_DIR", str(tmp_path))
    return said_by(__main__.main, ["cluster", "start.sh", "tp2", "status"])


OURS = {"ours": an_image("a", "l1", recipe="f" * 64)}
ADDRESSES = "HEAD_IP=10.0.0.1\nWORKER_IP=10.0.0.2\n"
PRODUCERS = {
    ".env was made from its example": first_run,
    "is not filled in": of_settings("HEAD_IP=10.0.0.1\nWORKER_IP=\n"),
    "did you mean": of_settings(ADDRESSES + "MAX_MODEL_LENGTH=5\n"),
    "is no setting of this launcher": of_settings(ADDRESSES + "EXL3_OVERLAY_HOST=1\n"),
    "Nothing was started and nothing was stopped": failing_check,
    "is not there": start_with_images({}, {}),
    "built from other sources than this checkout": start_with_images(OURS, OURS),
    "the image did not arrive": start_with_images(OURS, {}, cut=True),
    "already runs": second_start,
    "broken off": start_of(cluster_life.status, started=0),
    "which cannot be seen from here": start_of(cluster_life.start, boot="another", host="spark-9"),
    "runs without the launcher's Python environment": without_packages,
    "are not here; give it in the environment": escaped_folder_without_packages,
    "is under way": start_under_lock,
    "instead of an answer": check_over_ssh("echo This account is not available; exit 1"),
    "it is passed over": check_over_ssh('echo Welcome; exec sh -c "$last"'),
    "nothing can be started on a node that does not answer": start_after(cut_off),
    "cannot be used (": stop_in_a_file,
    "The launcher broke": fault_of_ours,
    "could not be started": start_after(lambda stub: stub.fail("--name exl3-tp2-rank1")),
    "phase ray is not over after": start_after(lambda stub: stub.joined("10.0.0.1"), RAY_TIMEOUT_S="1"),
    "ended with exit code": dead_rank,
    "the model answered": start_after(lambda stub: setattr(stub.api, "damaged", True)),
    "has to refuse it with": start_after(lambda stub: setattr(stub.api, "is_open", True)),
    "none was accepted": start_after(lambda stub: None, SPEC_METHOD="mtp"),
    "still there:": stop_without_a_node,
    "stuck": standstill,
    "Gb/s to node 0 by ib_write_bw, at least": of_recorded("bad_fabric"),
    "not measured: no ib_write_bw": of_recorded("bad_node"),
    "is needed: others hang in sparse attention": start_after(lambda stub: stub.inside(1, flashinfer_python="0.7.1")),
    "is needed: the plugin's overrides": start_after(lambda stub: stub.inside(1, vllm="0.34.0")),
    "collectives of different builds": start_after(other_library),
    "while busy: stuck low": stuck_clock,
    "for this question are over": hanging_long_question,
    "tokens is left out": long_question_with_little_context,
    "no container gets the GPU": start_after(no_way_to_the_gpu),
    "would refuse the server's arguments": start_after(lambda stub: None, EXTRA_ARGS="--max-num-sequences 4"),
    "its container sees no GPU": lost_gpu,
    "the settings cannot be used": status_without_settings,
    "running answers repeat a short cycle": answers_in_a_loop,
    "what is cached is damaged": cached_question(counters=CACHE_ON, warm_text="18888"),
    "so trust none of its answers": in_service(cluster_service.ask, damaged=True),
    "no cached prefix was compared": cached_question(counters=""),
    "nothing was emptied": in_service(cluster_service.reset_cache, busy=10**6),
    "the server has no route for it": in_service(cluster_service.reset_cache, has_route=False),
    "refused the token": in_service(cluster_service.reset_cache, env_file=Path("/dev/null")),
    "runs and has this node's memory": soak_beside_the_service,
    "engines side by side need": soak_without_memory,
    "cannot start yet": three_nodes,
}


def test_the_page_and_the_producers_name_the_same():
    assert set(ROWS) == set(PRODUCERS)


@pytest.mark.parametrize("message", PRODUCERS)
def test_the_message_is_produced(message, cluster_stub, monkeypatch, tmp_path):
    assert message in PRODUCERS[message](cluster_stub, monkeypatch, tmp_path)
