"""The start scripts as a user types them: they bring their own Python packages, and stay thin."""

import os
import subprocess
import sys
import time

import pytest

from launcher.settings import REPOSITORY

ADDRESSES = {
    "HEAD_IP": "203.0.113.1",
    "WORKER_IP": "203.0.113.2",
    "WORKER2_IP": "203.0.113.3",
    "WORKER3_IP": "203.0.113.4",
}
SCRIPTS = {"start.sh": 2, "start-tp3.sh": 3, "start-tp4.sh": 4}


def call(script: str, *words: str) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name not in ADDRESSES}
    names = list(ADDRESSES)[: SCRIPTS[script]]
    return subprocess.run(
        [REPOSITORY / script, *words], env=environment | {name: ADDRESSES[name] for name in names},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.mark.parametrize("script", [*SCRIPTS, "download.sh"])
def test_script_has_at_most_eight_lines(script):
    assert len((REPOSITORY / script).read_text().splitlines()) <= 8


@pytest.mark.parametrize("script", SCRIPTS)
def test_plan_works_on_any_machine(script):
    done = call(script, "plan")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"# Plan for {'tp2' if script == 'start.sh' else script[6:9]}")
    assert f"# Node {SCRIPTS[script] - 1} (203.0.113.{SCRIPTS[script]})" in done.stdout


def test_weights_need_no_addresses_and_no_network_to_say_what_is_missing(tmp_path):
    environment = {**os.environ, "MODEL_DIR": str(tmp_path), "SPEC_METHOD": "none", "HF_HUB_OFFLINE": "1",
                   "HF_HUB_CACHE": str(tmp_path)}  # fmt: skip
    done = subprocess.run([REPOSITORY / "download.sh", "--dry-run"], env=environment,
                          capture_output=True, text=True, timeout=120)  # fmt: skip
    assert done.returncode == 3 and "HF_HUB_OFFLINE is set" in done.stderr


def test_a_start_has_nothing_with_which_to_ask_the_hub():
    code = "import sys, launcher.cluster; print([name for name in sys.modules if name.startswith(('hugging', 'http'))])"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert "huggingface_hub" not in done.stdout and "httpx" not in done.stdout


def test_check_lists_every_failure_quickly_where_there_is_no_spark():
    call("start.sh", "plan")  # sets up
    began = time.monotonic()
    done = call("start.sh", "check")
    assert time.monotonic() - began < 5
    assert done.returncode == 3
    failed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("FAIL")]
    assert {"ssh-access", "address", "weights"} <= set(failed)
    lines = done.stdout.splitlines()
    assert all(lines[i + 1].strip().startswith("->") for i, line in enumerate(lines) if line.startswith("FAIL"))
