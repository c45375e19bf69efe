"""What every rank runs: pure functions from settings and what was found on a node to argument lists and environment."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launcher import door_settings, gpu_ways, service
from launcher.errors import Exit, LauncherError
from launcher.kinds import text_of
from launcher.refusals import refusals
from launcher.table import NODE_NAMES, TABLE, Goes
from launcher.vllm_flags import server_flags

if TYPE_CHECKING:
    from launcher.config import Config
    from launcher.discovery import Fabric

__all__ = [
    "docker_run", "environment_file", "rank_environment", "ray_environment", "ray_nodes", "ray_start", "refusals",
    "runtime_of", "server",
]  # fmt: skip

REPOSITORY = Path(__file__).resolve().parent.parent

# What differs between ranks, or is set on some only. vLLM copies rank 0's environment to the Ray workers wherever they
# have no value of their own, so a name that a worker must do without has to be kept from it by name.
NODE_ENVIRONMENT = (
    "VLLM_HOST_IP", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_NET", "NCCL_IB_GID_INDEX",
    "NCCL_IB_ROCE_VERSION_NUM", "NCCL_IB_ADDR_FAMILY", "NCCL_IB_ADDR_RANGE", "VLLM_API_KEY", "VLLM_CONFIG_ROOT",
    "RAY_TMPDIR", "EXL3_BIND_ADDRESS", "EXL3_BIND_EXCEPT", service.TOKEN_NAME,
    door_settings.NAME, "LD_PRELOAD",
)  # fmt: skip
NOT_CARRIED_FILE = "ray_non_carry_over_env_vars.json"  # vLLM looks for it in VLLM_CONFIG_ROOT

SECRETS = ("VLLM_API_KEY", "RAY_AUTH_TOKEN", service.TOKEN_NAME)

SHARED_ENVIRONMENT = {
    # exllamav3's fused expert kernel needs all its blocks on the GPU at once; a second stream would take their places.
    "VLLM_DISABLE_SHARED_EXPERTS_STREAM": "1",
    # vLLM lets a plugin add routes to the API only where it is named here, which keeps others out.
    "VLLM_PLUGINS": "exl3",
    # Paths of NCCL that hang or want what a GB10 does not have.
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_IB_DISABLE": "0",
    # Everything is on disk: nothing is looked up on, or reported to, the internet.
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # What NVIDIA's driver compiles, such as FlashAttention's PTX on a Spark, it keeps up to this size: its largest.
    "CUDA_CACHE_MAXSIZE": str(4 << 30),
    # The log is followed line by line.
    "PYTHONUNBUFFERED": "1",
}

# For vLLM's CPU build, which would bind two processes on one NUMA node to the same core. The GPU build reads neither.
NATIVE_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}

# Folders of caches by the name of the variable that leads there.
CACHES = {
    "HF_HOME": "huggingface",
    "VLLM_CACHE_ROOT": "vllm",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TILELANG_CACHE_DIR": "tilelang",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "DG_JIT_CACHE_DIR": "deep_gemm",
    "CUDA_CACHE_PATH": "cuda",
    # Of everything that asks nobody else.
    "XDG_CACHE_HOME": "xdg",
}

# Ray keeps only handles and settings of the workers in its store; the rest of a Spark's memory belongs to the model.
RAY_STORE_BYTES = 128 << 20

# Distance of each of Ray's ports from RAY_PORT.
RAY_PORTS = {
    "--node-manager-port": 1,
    "--object-manager-port": 2,
    "--dashboard-agent-listen-port": 3,
    "--dashboard-agent-grpc-port": 4,
    "--runtime-env-agent-port": 5,
    "--metrics-export-port": 6,
    "--min-worker-port": 20,
    "--max-worker-port": 51,
}

# Ray alone would drain its node for half a minute, and has nothing left to do once the server is gone.
STOP_GRACE_S = {"ray": 5, "server": 20, "guard": 1}

# Where a container sees what is mounted into it.
INSIDE = {"model": "/model", "draft": "/draft", "cache": "/cache", "config": "/exl3/config", "log": "/exl3/log"}

RAY_NODES = """\
import json, logging, os, ray
ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False, logging_level=logging.ERROR)
print(json.dumps([{"address": n["NodeManagerAddress"], "alive": n["Alive"], "gpus": n["Resources"].get("GPU", 0)}
                  for n in ray.nodes()]))
"""


def found_at_start(rank: int, what: str) -> str:
    return f"<found at start: node {rank} {what}>"


@dataclass(frozen=True)
class Found:
    """What only a start knows; what is empty appears in a plan as a placeholder."""

    home: str = ""  # of the user who logs in on this node
    image_id: str = ""  # sha256:..., the same on every node
    ray_token: str = ""
    admin_token: str = ""  # for the server's own routes (service.py)
    gpu_way: str = ""  # of gpu_ways.WAYS; nodes may differ


@dataclass(frozen=True)
class Place:
    """Where a rank keeps things on its node."""

    config: Config
    rank: int
    found: Found = Found()

    @property
    def name(self) -> str:
        return container_name(self.config, self.rank)

    @property
    def is_docker(self) -> bool:
        return self.config["RUNTIME"] == "docker"

    @property
    def folder(self) -> str:
        """On rank 0 beside the checkout, elsewhere where the user says."""
        base = self.on_node(str(self.config["REMOTE_DIR" if self.rank else "RUN_DIR"]))
        if self.rank == 0 and not base.startswith(("/", "<")):
            base = str(REPOSITORY / base)
        return f"{base.rstrip('/')}/{self.name}"

    @property
    def env_file(self) -> str:
        return f"{self.folder}/environment"

    @property
    def cache(self) -> str:
        """Compiled kernels of one image must not meet those of another."""
        image = self.found.image_id.removeprefix("sha256:")[:12] or "<found at start: image id>"
        return f"{self.on_node(str(self.config['CACHE_DIR']))}/{image if self.is_docker else 'native'}"

    def on_node(self, path: str) -> str:
        home = self.found.home or found_at_start(self.rank, "home")
        return home + path[1:] if path == "~" or path.startswith("~/") else path

    def seen(self, what: str) -> str:
        """Path of one of INSIDE's names as the rank's own processes see it."""
        return INSIDE[what] if self.is_docker else self.outside(what)

    def outside(self, what: str) -> str:
        if what == "cache":
            return self.cache
        if what in ("model", "draft"):
            return self.on_node(str(self.config[{"model": "MODEL_DIR", "draft": "DRAFT_DIR"}[what]]))
        return f"{self.folder}/{what}"


def container_name(config, rank: int) -> str:
    return f"{config['CONTAINER_NAME_PREFIX']}-{config.topology.name}-rank{rank}"


def host_port(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


# Environment


def rank_environment(config, fabric: Fabric | None, rank: int, found: Found = Found()) -> dict[str, str]:
    """Everything that a rank's processes are given; names that a rank must do without are absent, never empty."""
    place = Place(config, rank, found)
    environment = {
        **SHARED_ENVIRONMENT,
        **table_environment(config),
        # Longer than the launcher waits itself: its message says more.
        "VLLM_ENGINE_READY_TIMEOUT_S": str(config["LOAD_TIMEOUT_S"] + config["WARMUP_TIMEOUT_S"]),
        "VLLM_CONFIG_ROOT": place.seen("config"),
        "VLLM_HOST_IP": config.addresses[rank],
        "EXL3_BIND_ADDRESS": config.addresses[rank],
        "EXL3_BIND_EXCEPT": str(config["PORT"]),
        **{name: f"{place.seen('cache')}/{folder}" for name, folder in CACHES.items()},
        **fabric_environment(config, fabric, rank),
    }
    if not place.is_docker:
        environment |= NATIVE_ENVIRONMENT
    if config["EXECUTOR"] == "ray":
        environment |= ray_environment(config, rank, found)
    if rank == 0:
        environment[service.TOKEN_NAME] = found.admin_token or "<made at start>"
        environment[door_settings.NAME] = door_settings.door_rules(config.__getitem__)
    if rank == 0 and config["VLLM_API_KEY"]:
        environment["VLLM_API_KEY"] = str(config["VLLM_API_KEY"])
    return environment


def table_environment(config) -> dict[str, str]:
    """Settings that are variables of every rank."""
    named = {row.name: text_of(row.type, config[row.name]) for row in TABLE if row.goes is Goes.ENVIRONMENT}
    return {name: text for name, text in named.items() if text}


def fabric_environment(config, fabric: Fabric | None, rank: int) -> dict[str, str]:
    if fabric is None:
        interface, devices, gid = fabric_of_settings(config, rank)
    else:
        interface, devices, gid = fabric.interface, ",".join(fabric.hcas), fabric.gid_index
    # Without the equals sign, NCCL takes every name that begins like this one. Gloo knows whole names only.
    environment = {"NCCL_SOCKET_IFNAME": f"={interface}", "GLOO_SOCKET_IFNAME": interface} if interface else {}
    if not devices:
        return environment
    # Named, so that NCCL fails where it would otherwise fall back to slow sockets without a word.
    environment |= {"NCCL_NET": "IB", "NCCL_IB_HCA": f"={devices}"}
    if gid is not None:
        return {**environment, "NCCL_IB_GID_INDEX": str(gid)}
    # The rails differ and NCCL takes one index per process: it finds the entry of each by version and address.
    return {
        **environment,
        "NCCL_IB_ROCE_VERSION_NUM": "2",
        "NCCL_IB_ADDR_FAMILY": "AF_INET",
        "NCCL_IB_ADDR_RANGE": fabric.address_range or "0.0.0.0/0",
    }


def fabric_of_settings(config, rank: int) -> tuple[str, str, str]:
    """(interface, devices, GID index) as set, placeholders for what is to be found."""

    def chosen(names: Sequence[str], what: str) -> str:
        values = [config[name] for name in names if config[name] not in ("", None, ())]
        if not values:
            return found_at_start(rank, what)
        return ",".join(map(str, values[0])) if isinstance(values[0], list | tuple) else str(values[0])

    node = NODE_NAMES[rank]
    return (
        chosen([f"{node}_CX7_IF"], "interface"),
        chosen([f"{node}_CX7_IB"], "RDMA devices"),
        chosen([f"{node}_GID", "NCCL_IB_GID_INDEX"], "GID"),
    )


def ray_environment(config, rank: int, found: Found = Found()) -> dict[str, str]:
    environment = {
        "RAY_ADDRESS": host_port(config.addresses[0], config["RAY_PORT"]),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": found.ray_token or "<made at start>",
        # Ray counts the GPU's memory as the machine's and would kill workers at 95 %.
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    if config["RUNTIME"] != "docker":
        environment["RAY_TMPDIR"] = ray_folder(config, rank)
    return environment


def ray_folder(config, rank: int) -> str:
    """Short, since a socket's path ends at 107 bytes; by rank, since hosts may share a file system."""
    return f"/tmp/{container_name(config, rank)}-ray"


def environment_file(environment: dict[str, str]) -> bytes:
    """NAME=VALUE lines as `docker run --env-file` and runner.py read them: no quotes, no expansion, no line breaks."""
    for name, value in environment.items():
        if any(sign in value for sign in "\n\r\0"):
            raise LauncherError(
                f"{name}: the value holds a line break, an environment file carries one line per name; remove it.",
                Exit.USAGE,
            )
    return "".join(f"{name}={value}\n" for name, value in sorted(environment.items())).encode()


def not_carried_file() -> bytes:
    return (json.dumps(sorted(NODE_ENVIRONMENT), indent=1) + "\n").encode()


# Ray and the server


def ray_start(config, rank: int) -> list[str]:
    """Ray's part on one node, in the foreground. Every port is fixed, so that they can be listed and checked."""
    port = config["RAY_PORT"]
    role = ["--address", host_port(config.addresses[0], port)]
    if rank == 0:
        role = ["--head", "--port", str(port), "--include-dashboard", "false"]
    argv = [
        *runtime_of(config).ray(config), "start", *role,
        "--node-ip-address", config.addresses[rank],
        "--num-gpus", "1",
        # Ray keeps an idle Python process for each CPU that it counts; vLLM's workers ask for none.
        "--num-cpus", "1",
        "--object-store-memory", str(RAY_STORE_BYTES),
        "--disable-usage-stats",
    ]  # fmt: skip
    for flag, distance in RAY_PORTS.items():
        argv += [flag, str(port + distance)]
    return [*argv, "--log-style", "record", "--log-color", "false", "--block"]


def ray_nodes(config) -> list[str]:
    """Prints Ray's nodes as JSON: [{"address", "alive", "gpus"}, ...]. For inside of rank 0."""
    return [runtime_of(config).python(config), "-c", RAY_NODES]


def server(config, rank: int, found: Found = Found()) -> list[str]:
    """vLLM. With Ray there is one, on rank 0; with mp every rank has its own, and only rank 0's opens the API."""
    place = Place(config, rank, found)
    flags = server_flags(config, {"model": place.seen("model"), "draft": place.seen("draft")})
    if config["EXECUTOR"] == "ray":
        return [*runtime_of(config).api_server(config), *flags] if rank == 0 else []
    # `vllm serve` wants the model in front, without its flag.
    assert flags[0] == "--model"
    return [
        *runtime_of(config).serve(config), *flags[1:],
        "--nnodes", str(config.topology.nodes),
        "--node-rank", str(rank),
        "--master-addr", config.addresses[0],
        "--master-port", str(config["MASTER_PORT"]),
        *(["--headless"] if rank else []),
    ]  # fmt: skip


def look_inside(place: Place) -> list[str]:
    """Prints what the rank's own Python finds, see inside.py."""
    runtime = runtime_of(place.config)
    return runtime.inside(place, [runtime.python(place.config), f"{place.seen('config')}/inside.py"])


# Docker


def docker_run(config, rank: int, env_file: str, argv: Sequence[str], found: Found = Found()) -> list[str]:
    """A container of one rank with `argv` as its only command."""
    place = Place(config, rank, found)
    return [
        "docker", "run", "--detach", "--init",
        "--name", place.name,
        "--label", f"exl3.topology={config.topology.name}",
        "--label", f"exl3.rank={rank}",
        "--pull", "never",
        "--restart", "no",
        "--stop-timeout", str(max(STOP_GRACE_S.values())),
        "--network", "host",
        "--ipc", "host",
        *gpu_words(place),
        "--device", "/dev/infiniband",
        "--cap-add", "IPC_LOCK",
        "--ulimit", "memlock=-1:-1",
        "--ulimit", "stack=67108864:67108864",
        "--env-file", env_file,
        *mounts(place),
        "--entrypoint", argv[0],
        str(config["IMAGE"]),
        *argv[1:],
    ]  # fmt: skip


def gpu_words(place: Place) -> tuple[str, ...]:
    """Every container that is to see the GPU has these."""
    return gpu_ways.words(place.found.gpu_way or found_at_start(place.rank, "way to the GPU"))


def mounts(place: Place) -> list[str]:
    """`--mount`, unlike `-v`, refuses a folder that is missing, and takes any character in its path."""
    writable = {"cache": True, "log": True, "config": False, "model": False}
    if place.config["SPEC_METHOD"] == "dflash":
        writable["draft"] = False
    words = []
    for what, may_write in sorted(writable.items()):
        fields = ["type=bind", f"source={place.outside(what)}", f"target={INSIDE[what]}"]
        words += ["--mount", comma_separated(fields if may_write else [*fields, "readonly"])]
    return words


def comma_separated(fields: list[str]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(fields)
    return line.getvalue()


# Units: what is started, watched and ended as one


@dataclass(frozen=True)
class Unit:
    """One thing that runs on a node, and the commands that deal with it there.

    `state` prints JSON with Running and ExitCode, or fails where there is nothing.
    """

    name: str
    start: tuple[str, ...]
    state: tuple[str, ...]
    logs: tuple[str, ...]
    follow: tuple[str, ...]
    stop: tuple[tuple[str, ...], ...]  # one after the other; each may fail where there is nothing to stop


@dataclass(frozen=True)
class Runtime:
    """How the same plan is wrapped: in a container for each rank, or as plain processes."""

    python: Callable[[Config], str]
    ray: Callable[[Config], list[str]]
    api_server: Callable[[Config], list[str]]
    serve: Callable[[Config], list[str]]
    main_unit: Callable[[Place, str, Sequence[str]], Unit]  # what a rank lives in
    inner_unit: Callable[[Place, str, Sequence[str]], Unit]  # what is started beside it
    inside: Callable[[Place, Sequence[str]], list[str]]  # a command to run to its end in the rank's surroundings
    list_gpus: Callable[[Place], list[str]]  # empty: nothing stands between the processes and the GPU
    shell: Callable[[Place], list[str]]


def runner(place: Place, inside: bool, *words: str) -> list[str]:
    """runner.py on the node, or in the container on it."""
    python = "python3" if inside else str(place.config["NATIVE_PYTHON"])
    folder = {what: place.seen(what) for what in ("config", "log")}
    return [python, f"{folder['config']}/runner.py", words[0], "--folder", folder["log"], *words[1:]]


def guard_unit(place: Place, end: Sequence[str]) -> Unit:
    """Watches the node's memory beside the rank, outside of any container; `end` ends the rank."""
    log = f"{place.outside('log')}/guard.log"
    python = "python3" if place.is_docker else str(place.config["NATIVE_PYTHON"])
    run = (python, f"{place.outside('config')}/runner.py")
    named = ("--folder", place.outside("log"), "--name", "guard")
    floor_bytes = str(int(float(place.config["MEMORY_GUARD_GIB"]) * (1 << 30)))
    program = (python, f"{place.outside('config')}/memory_guard.py", floor_bytes, *end)
    return Unit(
        name="guard",
        start=(*run, "start", *named, "--", *program),
        state=(*run, "state", *named),
        logs=("cat", log),
        follow=("tail", "-n", "+1", "-F", log),
        stop=((*run, "stop", *named, "--grace-s", str(STOP_GRACE_S["guard"])),),
    )


def bound(place: Place, argv: Sequence[str]) -> list[str]:
    """`argv` with what it would open to every network opened to the fabric alone (fabric_bind.py)."""
    program = f"{place.seen('config')}/fabric_bind.py"
    return [runtime_of(place.config).python(place.config), program, f"{place.seen('log')}/fabric_bind.so", *argv]


def docker_unit(place: Place, unit: str, argv: Sequence[str]) -> Unit:
    start = docker_run(place.config, place.rank, place.env_file, argv, place.found)
    return container_unit(unit, place.name, start, ("docker", "stop", "-t", str(STOP_GRACE_S[unit]), place.name))


def container_unit(unit: str, name: str, start: Sequence[str], *end: tuple[str, ...]) -> Unit:
    """A container by its name; `end` comes before it is removed."""
    return Unit(
        name=unit,
        start=tuple(start),
        state=("docker", "inspect", "--type", "container", "--format", "{{json .State}}", name),
        logs=("docker", "logs", name),
        follow=("docker", "logs", "--follow", name),
        stop=(*end, ("docker", "rm", "--force", "--volumes", name)),
    )


def docker_inner_unit(place: Place, unit: str, argv: Sequence[str]) -> Unit:
    run = ("docker", "exec", place.name)
    log = f"{place.outside('log')}/{unit}.log"
    grace = ("--grace-s", str(STOP_GRACE_S[unit]))
    return Unit(
        name=unit,
        start=(*run, *runner(place, True, "start", "--name", unit, *grace, "--", *argv)),
        state=(*run, *runner(place, True, "state", "--name", unit)),
        logs=("cat", log),
        follow=("tail", "-n", "+1", "-F", log),
        stop=((*run, *runner(place, True, "stop", "--name", unit, *grace)),),
    )


def native_unit(place: Place, unit: str, argv: Sequence[str]) -> Unit:
    log = f"{place.outside('log')}/{unit}.log"
    grace = ("--grace-s", str(STOP_GRACE_S[unit]))
    start = ("start", "--name", unit, *grace, "--env-file", place.env_file, "--", *argv)
    scraps = [("rm", "-rf", "--", ray_folder(place.config, place.rank))] if unit == "ray" else []
    return Unit(
        name=unit,
        start=tuple(runner(place, False, *start)),
        state=tuple(runner(place, False, "state", "--name", unit)),
        logs=("cat", log),
        follow=("tail", "-n", "+1", "-F", log),
        stop=(tuple(runner(place, False, "stop", "--name", unit, *grace)), *scraps),
    )


def native_inside(place: Place, argv: Sequence[str]) -> list[str]:
    return [*runner(place, False, "run", "--name", "command", "--env-file", place.env_file, "--"), *argv]


def native_module(config, *words: str) -> list[str]:
    return [str(config["NATIVE_PYTHON"]), "-m", *words]


RUNTIMES = {
    "docker": Runtime(
        python=lambda config: "python3",
        ray=lambda config: ["ray"],
        api_server=lambda config: ["python3", "-m", "vllm.entrypoints.openai.api_server"],
        serve=lambda config: ["vllm", "serve"],
        main_unit=docker_unit,
        inner_unit=docker_inner_unit,
        inside=lambda place, argv: ["docker", "exec", place.name, *argv],
        list_gpus=lambda place: ["docker", "exec", place.name, "nvidia-smi", "-L"],
        shell=lambda place: ["docker", "exec", "--interactive", "--tty", place.name, "bash"],
    ),
    "native": Runtime(
        python=lambda config: str(config["NATIVE_PYTHON"]),
        ray=lambda config: native_module(config, "ray.scripts.scripts"),
        # vLLM's CPU package has no working `vllm` command: that looks for a distribution of its own name.
        api_server=lambda config: native_module(config, "vllm.entrypoints.openai.api_server"),
        serve=lambda config: native_module(config, "vllm.entrypoints.cli.main", "serve"),
        main_unit=native_unit,
        inner_unit=native_unit,
        inside=native_inside,
        list_gpus=lambda place: [],
        shell=lambda place: native_inside(place, ["bash", "-i"]),
    ),
}


def runtime_of(config) -> Runtime:
    return RUNTIMES[config["RUNTIME"]]
