"""The hosts that the cluster tests stand on: that they are separate, reach each other, and leave nothing."""

import os
from pathlib import Path

import pytest
from hosts import FABRIC, HOME, LAN, Hosts, Rdma

pytestmark = pytest.mark.cluster
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=3")


@pytest.fixture
def pair(tmp_path):
    with Hosts(2, tmp_path / "hosts") as hosts:
        yield hosts


def test_hosts_open_to_each_other_under_both_addresses(pair):
    for here in pair:
        for there in pair:
            for link in (FABRIC, LAN):
                assert here.check([*SSH, there.address_on(link), "hostname"]) == f"{there.name}\n"


def test_a_host_that_is_stopped_or_unplugged_does_not_answer(pair):
    head, worker = pair
    worker.stop_sshd()
    assert "refused" in head.run([*SSH, worker.address, "true"]).stderr
    worker.start_sshd()
    worker.set_link(FABRIC, "down")
    assert "timed out" in head.run([*SSH, worker.address, "true"]).stderr
    assert head.run([*SSH, worker.address_on(LAN), "true"]).returncode == 0
    worker.set_link(FABRIC, "up")
    worker.forget_keys()
    assert "Permission denied" in head.run([*SSH, worker.address, "true"]).stderr


def test_files_processes_and_devices_are_a_hosts_own(pair):
    head, worker = pair
    for path in (HOME / "mine", "/tmp/mine", "/etc/nccl.conf", "/dev/shm/mine"):
        head.write(path, "mine")
        assert head.check(["cat", path]) == "mine"
        assert worker.run(["cat", path]).returncode != 0 and not Path(path).exists()
    head.start(["sleep", "1000"], head.folder / "sleep.log")
    assert list(head.processes().values()) == ["sleep 1000"] and worker.processes() == {}
    entry = "/sys/class/infiniband/rocep1s0f0/ports/1/gids/3"
    assert worker.check(["cat", entry]) == "0000:0000:0000:0000:0000:ffff:0a4d:0002\n"
    worker.set_rdma([Rdma("rocep1s0f0", FABRIC.interface, {3: (head.address, "RoCE v2")})])
    assert worker.check(["cat", entry]) == head.check(["cat", entry])
    assert set(worker.check(["ls", "/sys/class/net"]).split()) == {"lo", FABRIC.interface, LAN.interface}


def test_content_of_proc_and_room_on_a_disk_can_be_set(pair):
    host = pair[1]
    host.cover("/proc/meminfo", "MemTotal: 1 kB\n")
    assert host.check(["cat", "/proc/meminfo"]) == "MemTotal: 1 kB\n"
    host.uncover("/proc/meminfo")
    host.limit_disk(HOME / "cache", 1 << 20)
    assert "No space left" in host.run(["sh", "-c", f"head -c 2M /dev/zero > {HOME}/cache/x"]).stderr


def test_a_private_folder_takes_each_hosts_changes(tmp_path):
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    (checkout / "file").write_text("as it was")
    with Hosts(2, tmp_path / "hosts", private=[checkout]) as (head, worker):
        head.write(checkout / "file", "changed")
        assert head.check(["cat", checkout / "file"]) == "changed"
        assert worker.check(["cat", checkout / "file"]) == "as it was"
    assert (checkout / "file").read_text() == "as it was"


def test_nothing_is_left_of_hosts(tmp_path):
    with Hosts(3, tmp_path / "hosts") as hosts:
        hosts[2].start(["sh", "-c", "setsid sleep 4321 & setsid sleep 4321"], tmp_path / "log")
        namespaces = {os.readlink(f"/proc/{host.pid}/ns/net") for host in hosts}
        assert len(namespaces) == 3
    assert str(tmp_path) not in Path("/proc/mounts").read_text()
    left = [pid for pid in filter(str.isdigit, os.listdir("/proc")) if namespace_of(pid) in namespaces]
    assert left == []


def namespace_of(pid: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return ""
