"""The start script over several hosts: real SSH, Ray and vLLM, then with things broken on purpose."""

import shutil
import signal
import subprocess
import sys
import time

import pytest
from hosts import FABRIC, LAN, REPOSITORY, Hosts, Rdma, usual_rdma
from stand_in import make_python

pytestmark = pytest.mark.cluster
BUSY, REFUSED, SERVER, NOT_RUNNING, INTERRUPTED = 7, 3, 5, 1, 130


class Pair:
    """Two hosts, and the start script on the first."""

    def __init__(self, hosts: Hosts, python) -> None:
        self.head, self.worker = hosts
        self.settings = {
            "HEAD_IP": self.head.address, "WORKER_IP": self.worker.address, "RUNTIME": "native",
            "NATIVE_PYTHON": str(python), "MODEL_DIR": str(REPOSITORY / "models/local"), "RUN_DIR": "/tmp/run",
            "SPEC_METHOD": "none", "VISION": "0", "PREFIX_CACHE": "0", "ENFORCE_EAGER": "1", "KV_CACHE_DTYPE": "auto",
            "MAX_MODEL_LEN": "2048", "MAX_NUM_SEQS": "8", "KV_CACHE_GIB": "1", "MEMORY_FLOOR_GIB": "2",
            "EXTRA_ARGS": "--dtype bfloat16", "RAY_TIMEOUT_S": "120",
        }  # fmt: skip

    def argv(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "launcher", "cluster", "start.sh", "tp2", *words]

    def launch(self, *words: str, timeout_s: float = 400, **changes: str) -> subprocess.CompletedProcess:
        return self.head.run(
            self.argv(*words), environment=self.settings | changes, cwd=REPOSITORY, timeout_s=timeout_s
        )

    def start_in_background(self, log, **changes: str) -> subprocess.Popen:
        return self.head.start(self.argv("start"), log, self.settings | changes, cwd=REPOSITORY)

    def leftovers(self) -> dict:
        return {**self.head.processes(), **self.worker.processes()}

    def wait_for(self, log, words: str, timeout_s: float = 120) -> None:
        deadline = time.monotonic() + timeout_s
        while words not in log.read_text():
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hosts")
    python = make_python(folder / "python")
    with Hosts(2, folder, shared=[folder / "python"]) as hosts:
        yield Pair(hosts, python)


@pytest.fixture(autouse=True)
def nothing_is_left(pair):
    yield
    pair.launch("stop")
    assert pair.leftovers() == {}


def refused_by(done: subprocess.CompletedProcess, check: str) -> str:
    """The finding's line, of a start that a check refused before anything ran."""
    assert done.returncode == REFUSED, done.stdout + done.stderr
    assert "Nothing was started" in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("FAIL")]
    assert [line.split()[1] for line in lines] == [check], done.stderr
    return lines[0]


def elsewhere(host) -> set:
    """What listens on another address than the fabric's and loopback, but for sshd."""
    own = (host.address, f"[::ffff:{host.address}]")
    return {
        (address, port)
        for address, port in host.listening()
        if port != 22 and address not in own and not address.startswith(("127.", "[::1]", "[::ffff:127."))
    }


@pytest.mark.parametrize("executor", ["ray", "mp"])
def test_two_hosts_serve_and_stop_leaves_nothing(pair, executor):
    done = pair.launch("start", EXECUTOR=executor)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The API listens on port 8888." in done.stdout and "1, 2, 3, 4, 5" in done.stdout
    assert pair.head.run(["curl", "-sf", "http://127.0.0.1:8888/v1/models"]).stdout.count("GLM-5.3-Flash-EXL3")
    status = pair.launch("status")
    assert status.returncode == 0
    assert "0 of 0 running answers repeat a short cycle, 0 of 2 ended so" in status.stdout
    assert pair.launch("cache", "reset").returncode == 0
    assert "The API listens on port 8888." in pair.launch("canary").stdout
    assert pair.worker.processes()
    assert pair.launch("start").returncode == BUSY
    # A restart that its checks refuse leaves the pair as it is.
    pair.worker.stop_sshd()
    assert pair.launch("restart").returncode == REFUSED
    pair.worker.start_sshd()
    assert pair.launch("status").returncode == 0
    for host in (pair.head, pair.worker):
        assert elsewhere(host) == set()
    pair.head.kill("EngineCore" if executor == "ray" else "vllm")
    broken = pair.launch("status")
    assert broken.returncode == SERVER, broken.stdout
    stopped = pair.launch("stop")
    assert stopped.returncode == 0, stopped.stderr
    assert pair.leftovers() == {}
    assert pair.launch("status").returncode == NOT_RUNNING


def test_a_ray_node_killed_while_loading_is_noticed_and_cleared_away(pair, tmp_path):
    log = tmp_path / "start.log"
    start = pair.start_in_background(log)
    pair.wait_for(log, "ray ")
    time.sleep(12)
    killed = time.monotonic()
    assert pair.worker.kill("raylet")
    assert start.wait(90) == SERVER, log.read_text()
    assert time.monotonic() - killed < 45
    assert f"node 1 ({pair.worker.address}): ray ended" in log.read_text()
    assert pair.leftovers() == {}


def test_ctrl_c_while_loading_leaves_nothing(pair, tmp_path):
    log = tmp_path / "start.log"
    start = pair.start_in_background(log)
    pair.wait_for(log, "containers")
    time.sleep(3)
    pair.head.kill("start.sh tp2 start", signal.SIGINT)
    assert start.wait(90) == INTERRUPTED, log.read_text()
    assert pair.leftovers() == {}


def received(host, link) -> int:
    return int(host.check(["cat", f"/sys/class/net/{link.interface}/statistics/rx_bytes"]))


def test_a_model_that_only_the_first_host_has_is_synced_over_the_fabric(pair):
    shutil.copytree(REPOSITORY / "models/local", pair.head.home / "model")
    size = sum(path.stat().st_size for path in (pair.head.home / "model").iterdir())
    assert "there is no such folder" in pair.launch("check", MODEL_DIR="~/model").stdout
    before = {link: received(pair.worker, link) for link in (FABRIC, LAN)}
    done = pair.launch("sync", MODEL_DIR="~/model")
    assert done.returncode == 0, done.stderr
    assert received(pair.worker, FABRIC) - before[FABRIC] > size
    assert received(pair.worker, LAN) - before[LAN] < 10_000
    for path in (pair.head.home / "model").iterdir():
        assert path.read_bytes() == (pair.worker.home / "model" / path.name).read_bytes()
    lines = [line for line in pair.launch("check", MODEL_DIR="~/model").stdout.splitlines() if " weights " in line]
    assert lines and all(line.startswith("PASS") for line in lines), lines
    # What both hosts see at the same place is one folder.
    assert "is this machine's own folder" in pair.launch("sync").stdout


def test_a_worker_without_sshd_is_named(pair):
    pair.worker.stop_sshd()
    done = pair.launch("start")
    pair.worker.start_sshd()
    assert "node 1" in refused_by(done, "ssh-access")
    assert f"ssh-copy-id {pair.worker.address}" in done.stderr


def test_a_key_that_opens_nothing_is_named(pair):
    keys = pair.worker.home / ".ssh/authorized_keys"
    allowed = keys.read_text()
    pair.worker.forget_keys()
    done = pair.launch("start")
    keys.write_text(allowed)
    assert "Permission denied" in refused_by(done, "ssh-access")


def test_the_gid_of_another_node_is_refused_with_the_table(pair):
    device = usual_rdma(pair.worker.address)[0]
    pair.worker.set_rdma([Rdma(device.name, device.interface, {3: (pair.head.address, "RoCE v2")})])
    done = pair.launch("start")
    pair.worker.set_rdma(usual_rdma(pair.worker.address))
    refused_by(done, "rdma-gid")
    assert pair.head.address in done.stderr


def test_a_port_taken_on_the_worker_is_named(pair):
    script = "import socket, time; s = socket.create_server(('0.0.0.0', 6380)); time.sleep(60)"
    taker = pair.worker.start([sys.executable, "-c", script], pair.worker.folder / "taker.log")
    while ("0.0.0.0", 6380) not in pair.worker.listening():
        time.sleep(0.1)
    done = pair.launch("start")
    pair.worker.kill("create_server")
    taker.wait()
    assert "6380" in refused_by(done, "ports-free")


def test_a_full_disk_on_the_worker_is_named(pair):
    pair.worker.limit_disk("/root/.cache/small", 1 << 20)
    done = pair.launch("start", CACHE_DIR="/root/.cache/small")
    pair.worker.run(["umount", "/root/.cache/small"])
    assert "node 1" in refused_by(done, "disk-space")


def test_check_is_quick_and_reports_every_node(pair):
    began = time.monotonic()
    done = pair.launch("check")
    assert done.returncode == 0, done.stdout
    assert time.monotonic() - began < 3
    assert "10.77.0.2 as RoCE v2" in done.stdout


def test_three_nodes_are_prepared_in_three_seconds(tmp_path):
    with Hosts(3, tmp_path / "hosts") as hosts:
        addresses = dict(zip(("HEAD_IP", "WORKER_IP", "WORKER2_IP"), (host.address for host in hosts), strict=True))
        began = time.monotonic()
        done = hosts[0].run(
            [sys.executable, "-m", "launcher", "cluster", "start-tp3.sh", "tp3", "check"],
            environment=addresses, cwd=REPOSITORY,
        )  # fmt: skip
        assert time.monotonic() - began < 3
    assert done.returncode == REFUSED  # no Docker, no GPU
    assert "node 2: ssh 10.77.0.3 works without a password" in done.stdout
