"""Checks of each machine by itself and beside the others: access, Docker, GPU, memory, clocks, ports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from launcher import gpu_ways
from launcher.facts import NEEDED_PYTHON, NodeFacts
from launcher.findings import (
    CHECKS,
    CLOCKS_FIX,
    EQUAL_CLOCKS,
    FAULTY_CLOCKS,
    GIB,
    NOT_REACHED,
    Context,
    Finding,
    Verdict,
    docker_problem,
    each_node,
    failed,
    gib,
    over_all,
    passed,
    warned,
)

GPU = "GB10"
# Bits of nvidia-smi's reasons that mean heat or power trouble; idling and limits that somebody set are none.
SLOWDOWNS = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
MOST_CLOCK_SKEW_S = 60
MOST_SWAP_USED_BYTES = 256 << 20
CMA_MARGIN_BYTES = 64 << 20  # the two counters are not read at the same moment
SMALL_PAGE_BYTES = 4096
SPARK_PAGE_LIMIT_BYTES = 65536


# Access. These two speak about nodes that could not be looked at, so they stand outside of the usual frame.


def check_ssh_access(context: Context) -> list[Finding]:
    return [ssh_finding(context, node) for node in context.facts]


def ssh_finding(context: Context, node: NodeFacts) -> Finding:
    if node.unreached:
        return Finding("ssh-access", node.rank, "FAIL", node.unreached, ssh_fix(context, node))
    seen = "this machine, no SSH needed" if node.rank == 0 else f"{context.ssh(node.rank)} works without a password"
    return Finding("ssh-access", node.rank, "PASS", seen)


def ssh_fix(context: Context, node: NodeFacts) -> str:
    copy = context.ssh(node.rank, "ssh-copy-id")
    said = node.unreached.lower()
    if "instead of an answer" in said:
        return (
            f"`{context.ssh(node.rank)} true` has to end without a word: look there at the user's login shell, the "
            f"files that it reads first, and a ForceCommand of sshd"
        )
    if "identification has changed" in said:
        return f"if the machine was set up anew: ssh-keygen -R {node.address}; then {context.ssh(node.rank)}"
    if "host key verification failed" in said:
        return f"{context.ssh(node.rank)}, compare the fingerprint and answer yes; then {copy}"
    if "permission denied" in said or "too many authentication" in said:
        return f"{copy} (without a key yet: ssh-keygen first)"
    if "could not resolve" in said:
        return f"write the node's fabric address, not its name, into the settings; then {copy}"
    return f"see that the node is on, that {node.address} is its address and sshd runs there; then {copy}"


def check_python(context: Context) -> list[Finding]:
    findings = []
    for node in context.facts:
        if node.unprobed:
            fix = f"install Python {NEEDED_PYTHON} or newer on the node as python3 (sudo apt-get install python3)"
            findings.append(Finding("python", node.rank, "FAIL", node.unprobed, fix))
        elif node.unreached:
            findings.append(Finding("python", node.rank, "WARN", NOT_REACHED, "see ssh-access"))
        else:
            seen = f"Python {node.host.python}" if node.host else "Python runs the probe"
            findings.append(Finding("python", node.rank, "PASS", seen))
    return findings


def check_clean_shell(context: Context) -> list[Finding]:
    """Answers are told from what else is said; rsync, whose own protocol it is, has to be kept apart (quiet_ssh.py)."""
    findings = []
    for node in context.facts:
        if node.unreached:
            findings.append(Finding("clean-shell", node.rank, "WARN", NOT_REACHED, "see ssh-access"))
        elif node.noise:
            seen = f'the login shell says "{node.noise}" before it runs a command; it is passed over'
            fix = (
                "let it speak to people only: put `case $- in *i*) ;; *) return ;; esac` at the top of ~/.bashrc there "
                "(or of what else prints it), since rsync and scp from elsewhere fail on it"
            )
            findings.append(Finding("clean-shell", node.rank, "WARN", seen, fix))
        else:
            findings.append(Finding("clean-shell", node.rank, "PASS", "the login shell says nothing of its own"))
    return findings


CHECKS["ssh-access"] = check_ssh_access
CHECKS["clean-shell"] = check_clean_shell
CHECKS["python"] = check_python


# Docker


@each_node("docker", "docker", runtime="docker")
def check_docker(context: Context, node: NodeFacts) -> Verdict:
    docker = node.docker
    if not docker.program:
        return failed("no docker command", "install Docker: sudo apt-get install docker.io (a Spark comes with it)")
    said = docker.error.lower()
    if "permission denied" in said:
        return failed(
            "the user may not talk to Docker's daemon",
            "sudo usermod -aG docker $USER on that node, then log out and in again",
        )
    if docker.error:
        return failed(docker.error, "sudo systemctl enable --now docker on that node")
    return passed(f"Docker {docker.version}")


@each_node("gpu-runtime", "docker", runtime="docker")
def check_gpu_runtime(context: Context, node: NodeFacts) -> Verdict:
    problem = docker_problem(node)
    if problem:
        return warned(f"not looked at: {problem}", "see docker")
    if "gpu_access" in node.errors:
        return failed(
            f"no answer to how containers get the GPU: {node.errors['gpu_access']}",
            "look at nvidia-smi and `docker ps` on that node; if either hangs, reboot it",
        )
    if node.gpu_access is None:
        return untried(context, node)
    if node.gpu_access.way:
        return passed(f"containers get the GPU by {gpu_ways.shown(node.gpu_access.way)}, as tried")
    seen, fix = gpu_ways.refused(node.gpu_access.tried)
    return failed(f"no container gets the GPU: {seen}", fix)


def untried(context: Context, node: NodeFacts) -> Verdict:
    """Without the image only what lies on the node can be told."""
    docker = node.docker
    if "nvidia" in docker.runtimes or docker.gpu_hook or docker.cdi_files:
        return warned(
            f"NVIDIA's toolkit is there; no container was tried, since {context.config['IMAGE']} is not there",
            "see image; then check again",
        )
    return failed(
        f"Docker's runtimes are {', '.join(docker.runtimes) or 'none'}, and NVIDIA's toolkit has left neither a hook "
        f"nor a CDI description",
        gpu_ways.TOOLKIT,
    )


@each_node("foreign-containers", "containers", runtime="docker")
def check_foreign_containers(context: Context, node: NodeFacts) -> Verdict:
    foreign = sorted(one.name for one in node.containers if one.name not in context.ours.containers)
    if not foreign:
        return passed("no containers of others run")
    return warned(
        f"others run: {', '.join(foreign)}; their memory is missing here",
        f"stop what is not needed: docker stop {' '.join(foreign)}",
    )


# GPU


@each_node("gpu-model", "gpus", runtime="docker")
def check_gpu_model(context: Context, node: NodeFacts) -> Verdict:
    names = [gpu.name for gpu in node.gpus]
    if len(names) == 1 and GPU in names[0]:
        return passed(names[0])
    seen = f"GPUs: {', '.join(names)}" if names else "no NVIDIA GPU, or no nvidia-smi"
    return failed(
        f"{seen}; one {GPU} is needed",
        "on a DGX Spark nvidia-smi must list its GPU first (reboot after a driver update); "
        "on another machine use ./start-local.sh",
    )


@over_all("gpu-driver", "gpus", runtime="docker")
def check_gpu_driver(context: Context, nodes: Sequence[NodeFacts]) -> Verdict:
    versions = {node.rank: node.gpus[0].driver for node in nodes if node.gpus}
    if not versions:
        return warned("not looked at: no GPU", "see gpu-model")
    if len(set(versions.values())) == 1:
        return passed(f"driver {next(iter(versions.values()))} on every node")
    seen = ", ".join(f"node {rank}: {version}" for rank, version in versions.items())
    return warned(f"the drivers differ ({seen})", "bring all nodes to the same release: sudo apt-get full-upgrade")


@over_all("gpu-clocks", "gpus", runtime="docker")
def check_gpu_clocks(context: Context, nodes: Sequence[NodeFacts]) -> Iterator[Verdict]:
    limits = {node.rank: node.gpus[0].max_sm_mhz for node in nodes if node.gpus}
    known = {rank: limit for rank, limit in limits.items() if limit}
    fastest = max(known.values(), default=0)
    for node in nodes:
        if not node.gpus:
            yield warned("not looked at: no GPU", "see gpu-model", node.rank)
            continue
        limit, slowdowns = known.get(node.rank), slowdowns_of(node.gpus[0].throttle_reasons)
        if slowdowns:
            yield warned(f"the GPU slows down: {', '.join(slowdowns)}", "check its cooling and its power supply; "
                         "if it stays, unplug it for a minute", node.rank)  # fmt: skip
        elif limit is None:
            yield passed("the driver tells no limit of the clocks", node.rank)
        elif limit < FAULTY_CLOCKS * fastest:
            yield failed(f"SM clock limit {limit:.0f} MHz, {fastest:.0f} MHz elsewhere", CLOCKS_FIX, node.rank)
        elif limit < EQUAL_CLOCKS * fastest:
            yield warned(f"SM clock limit {limit:.0f} MHz, {fastest:.0f} MHz elsewhere: all wait for this node",
                         f"the same limit everywhere, or none: {CLOCKS_FIX}", node.rank)  # fmt: skip
        else:
            yield passed(f"SM clock limit {limit:.0f} MHz", node.rank)


def slowdowns_of(reasons: int | None) -> list[str]:
    return [text for bit, text in SLOWDOWNS.items() if (reasons or 0) & bit]


@each_node("gpu-free", "gpus", "gpu_processes", runtime="docker")
def check_gpu_free(context: Context, node: NodeFacts) -> Verdict:
    if not node.gpus:
        return warned("not looked at: no GPU", "see gpu-model")
    foreign = [one for one in node.gpu_processes if not context.is_ours(node, [one.pid], one.container)]
    if not foreign:
        return passed("nobody else uses the GPU")
    seen = ", ".join(f"{one.name} (pid {one.pid}{held(one.used_bytes)})" for one in foreign)
    if context.ours_runs_on(node) and not any(one.container for one in foreign):
        return passed(f"in use by our own server, as far as can be told: {seen}")
    return warned(f"in use: {seen}", "end what is not needed, a desktop too: sudo systemctl isolate multi-user.target")


def held(size_bytes: int | None) -> str:
    return f", {gib(size_bytes)}" if size_bytes else ""


# Memory and kernel


@each_node("memory-floor", "memory")
def check_memory_floor(context: Context, node: NodeFacts) -> Verdict:
    config, memory = context.config, node.memory
    # vLLM refuses to start when GPU_MEM_UTIL of a GPU's memory is not free; here that is the machine's.
    taken = 0 if context.is_native else float(config["GPU_MEM_UTIL"]) * memory.total_bytes
    needed = taken + float(config["MEMORY_FLOOR_GIB"]) * GIB
    ours = context.bytes_of_ours(node)
    seen = f"{gib(memory.available_bytes)} available of {gib(memory.total_bytes)}"
    if ours:
        seen += f", {gib(ours)} more when our own server has stopped"
    if memory.available_bytes + ours >= needed:
        return passed(f"{seen}, {gib(needed)} needed")
    if context.ours_runs_on(node):
        return warned(f"{seen}, {gib(needed)} needed; what our own running server holds cannot be told",
                      "nothing while it runs; after `stop`, check again")  # fmt: skip
    return failed(
        f"{seen}, {gib(needed)} needed (GPU_MEM_UTIL and MEMORY_FLOOR_GIB)",
        "end other programs and containers, ps aux --sort=-rss | head shows the largest",
    )


@each_node("swap", "memory")
def check_swap(context: Context, node: NodeFacts) -> Verdict:
    used = node.memory.swap_total_bytes - node.memory.swap_free_bytes
    if used <= MOST_SWAP_USED_BYTES:
        return passed(f"{gib(used)} of {gib(node.memory.swap_total_bytes)} in use")
    return warned(
        f"{gib(used)} are swapped out: memory was short, and a node that swaps stalls all others",
        "end other programs, then sudo swapoff -a && sudo swapon -a on that node",
    )


@each_node("cma", "memory", "host")
def check_cma(context: Context, node: NodeFacts) -> Verdict:
    free, total = node.memory.cma_free_bytes, node.memory.cma_total_bytes
    if free <= total + CMA_MARGIN_BYTES:
        return passed(f"CmaFree {gib(free)} of CmaTotal {gib(total)}")
    seen = f"CmaFree {gib(free)}, CmaTotal {gib(total)}, kernel {node.host.kernel}: boot memory was handed over as CMA"
    already = "kho=off" in node.host.cmdline.split()
    fix = "boot kernel 6.17" if already else (
        "add kho=off to GRUB_CMDLINE_LINUX in /etc/default/grub, sudo update-grub, reboot; or boot kernel 6.17"
    )  # fmt: skip
    return failed(f"{seen}, and NCCL will not be able to register memory", fix)


@each_node("page-size", "host", runtime="docker")
def check_page_size(context: Context, node: NodeFacts) -> Verdict:
    size = node.host.page_size
    if size < SPARK_PAGE_LIMIT_BYTES:
        return passed(f"{size // 1024} KiB")
    return failed(
        f"{size // 1024} KiB pages on kernel {node.host.kernel}: copies from mapped files to the GPU hang there",
        f"boot the kernel with {SMALL_PAGE_BYTES // 1024} KiB pages (its name is without -64k)",
    )


@each_node("nccl-conf", "host")
def check_nccl_conf(context: Context, node: NodeFacts) -> Verdict:
    text = node.host.nccl_conf
    if text is None:
        return passed("no /etc/nccl.conf")
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
    return warned(
        f"/etc/nccl.conf sets {', '.join(lines) or 'nothing'}: NCCL reads it wherever it is visible, unlike the plan",
        "sudo mv /etc/nccl.conf /etc/nccl.conf.off on that node, unless you know what needs it",
    )


@each_node("pci-errors", "host")
def check_pci_errors(context: Context, node: NodeFacts) -> Verdict:
    lines = node.host.fatal_pci_errors
    if lines is None:
        return passed("not told: the kernel's log may not be read by the user who logs in")
    if not lines:
        return passed("no fatal PCIe error since boot")
    return warned(
        f"fatal PCIe errors since boot, the last: {lines[-1]}",
        "reboot that node, and see whether they come back under load; a link that fails stops every rank",
    )


@over_all("wall-clock", "host")
def check_wall_clock(context: Context, nodes: Sequence[NodeFacts]) -> Iterator[Verdict]:
    reference = nodes[0]
    for node in nodes:
        skew = node.clock_offset_s - reference.clock_offset_s
        if abs(skew) <= MOST_CLOCK_SKEW_S:
            yield passed(f"{abs(skew):.1f} s from node {reference.rank}", node.rank)
        else:
            yield failed(
                f"{abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} node {reference.rank}, "
                f"at most {MOST_CLOCK_SKEW_S} s are allowed",
                "sudo timedatectl set-ntp true on both nodes, and look at timedatectl",
                node.rank,
            )


# Ports


@each_node("ports-free", "ports")
def check_ports_free(context: Context, node: NodeFacts) -> Verdict:
    wanted = sorted(context.ports.get(node.rank, ()))
    taken, ours = {}, set()
    for one in node.ports:
        # The owner of a socket of another user, as the containers' root is, cannot be seen.
        unknown_of_ours = one.pid is None and context.ours_runs_on(node)
        if one.port not in wanted:
            continue
        if unknown_of_ours or context.is_ours(node, [one.pid, *one.ancestors], one.container):
            ours.add(one.port)
        else:
            taken[one.port] = f"{one.port} ({owner_of(one)} on {one.address})"
    if taken:
        names = sorted({setting_of(context, port) for port in taken})
        return failed(f"taken: {', '.join(taken.values())}", f"end that program, or change {' and '.join(names)}")
    kept = f"; {', '.join(map(str, sorted(ours)))} held by our own server" if ours else ""
    return passed(f"{len(wanted)} ports free{kept}" if wanted else "this node opens no fixed port")


def owner_of(listener) -> str:
    if listener.pid is None:
        return f"a process of user {listener.user_id}"
    return f"{listener.program or 'unnamed'}, pid {listener.pid}"


def setting_of(context: Context, port: int) -> str:
    for name in ("PORT", "MASTER_PORT"):
        if port == int(context.config[name]):
            return name
    return "RAY_PORT"
