"""Starting, refusing, stopping: every way out leaves no process and no state behind."""

import json
import os
import random
import shutil
import signal
import struct
import subprocess
import time

import pytest
from launching import MODEL, START_TIMEOUT_S, Launch, last_line
from openai import AuthenticationError, OpenAI

from launcher import canary, checkpoint, service
from launcher.errors import Exit
from launcher.settings import MODEL_ID

KEY = "sk-local-test-key"


def wait_for(condition, what: str, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not condition():
        assert process.poll() is None, f"ended before {what}: {process.communicate()}"
        assert time.monotonic() < deadline, f"no {what} in time"
        time.sleep(0.1)


def phase_of(one: Launch) -> str | None:
    path = one.run_dir / "local.json"
    return json.loads(path.read_text())["phase"] if path.exists() else None


def in_foreground(one: Launch, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        one.argv("start"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def workers(one: Launch) -> int:
    return sum("Worker" in line for line in one.processes())


def test_two_processes_serve_with_a_key_until_ctrl_c(launch):
    """Ready is who answered as the model has to."""
    one = launch("--tensor-parallel-size", 2)
    process = in_foreground(one, VLLM_API_KEY=KEY)
    wait_for(lambda: phase_of(one) == "ready", "readiness", process)
    assert workers(one) == 2
    assert one.run("status").returncode == 0
    url = f"http://127.0.0.1:{one.port}/v1"
    assert [model.id for model in OpenAI(base_url=url, api_key=KEY).models.list()] == [MODEL_ID]
    with pytest.raises(AuthenticationError):
        OpenAI(base_url=url, api_key="wrong", max_retries=0).models.list()
    assert [one.run("canary").returncode, one.run("canary", VLLM_API_KEY=KEY).returncode] == [Exit.SERVER, Exit.OK]
    assert canary.request(one.port, "POST", service.RESET_PATH, headers=canary.headers_with(KEY))[0] == 401
    assert one.run("cache", "reset").returncode == Exit.OK
    assert not any(KEY in path.read_text(errors="replace") for path in one.run_dir.glob("local*") if path.is_file())
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert one.leaves_nothing()
    assert f"{url}" in output and "curl " in output and KEY not in output + errors


def test_ctrl_c_while_starting_leaves_nothing(launch):
    one = launch()
    process = in_foreground(one)
    wait_for(lambda: phase_of(one) == "weights", "phase weights", process)
    assert one.processes()
    assert one.run("status").returncode == Exit.STARTING
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == Exit.INTERRUPTED, errors
    assert one.leaves_nothing()


def test_stop_ends_a_start_that_is_under_way(launch):
    one = launch()
    process = in_foreground(one)
    wait_for(lambda: phase_of(one) == "imports", "phase imports", process)
    assert one.run("stop").returncode == 0
    process.communicate(timeout=60)
    assert process.returncode == Exit.INTERRUPTED
    assert one.leaves_nothing()


def test_killed_engine_ends_the_foreground_with_a_reason(launch):
    """Of two processes with whole experts each, which answered as well and must not stay either."""
    one = launch("--tensor-parallel-size", 2, "--expert-parallel")
    process = in_foreground(one)
    wait_for(lambda: phase_of(one) == "ready", "readiness", process)
    assert workers(one) == 2
    (engine,) = [line.split()[0] for line in one.processes() if "EngineCor" in line]
    os.kill(int(engine), signal.SIGKILL)
    _, errors = process.communicate(timeout=90)
    assert process.returncode == Exit.SERVER
    assert "server: died" in last_line(errors) and "local.log" in last_line(errors)
    assert one.leaves_nothing()


@pytest.fixture
def model_copy(tmp_path):
    return shutil.copytree(MODEL, tmp_path / "model")


def edit_tensors(folder, suffix: str, change) -> str:
    """Overwrites the bytes of every tensor with this ending in all shards; returns one of the names."""
    last = ""
    for shard in checkpoint.read_index(folder):
        header, start = checkpoint.read_header(folder / shard)
        content = bytearray((folder / shard).read_bytes())
        for name, entry in header.items():
            if name.endswith(suffix):
                begin, end = (start + offset for offset in entry["data_offsets"])
                content[begin:end] = change(bytes(content[begin:end]), name)
                last = name
        (folder / shard).write_bytes(content)
    assert last, f"no tensor ends with {suffix}"
    return last


def test_truncated_shard_is_refused_before_anything_starts(launch, model_copy):
    shard = next(iter(checkpoint.read_index(model_copy)))
    (model_copy / shard).write_bytes((model_copy / shard).read_bytes()[:-1000])
    one = launch("--model", model_copy)
    refused = one.run("start", "--detach")
    assert refused.returncode == Exit.REFUSED
    assert refused.stderr.strip().count("\n") == 0
    assert shard in refused.stderr and "1000 bytes are missing" in refused.stderr
    assert one.leaves_nothing() and not (one.run_dir / "local.log").exists()


def test_flipped_marker_is_refused_by_tensor(launch, model_copy):
    changed = []

    def flip(content, name):
        if changed:
            return content
        changed.append(name)
        return struct.pack("<I", struct.unpack("<I", content)[0] ^ 1)

    edit_tensors(model_copy, ".mcg", flip)
    one = launch("--model", model_copy)
    refused = one.run("start", "--detach")
    assert refused.returncode == Exit.SERVER
    assert changed[0].rpartition(".")[0].split(".mlp.")[-1] in last_line(refused.stderr)
    assert "Traceback" not in refused.stderr
    assert one.leaves_nothing()


def test_wrong_weights_do_not_pass_the_canary(launch, model_copy):
    """Everything loads, but the experts hold noise: only the answer can tell."""
    rng = random.Random(1)
    edit_tensors(model_copy, ".trellis", lambda content, name: rng.randbytes(len(content)))
    one = launch("--model", model_copy)
    refused = one.run("start", "--detach")
    assert refused.returncode == Exit.WRONG_ANSWER, refused.stderr
    assert "canary: to " in last_line(refused.stderr) and "the model answered" in last_line(refused.stderr)
    assert one.leaves_nothing()
