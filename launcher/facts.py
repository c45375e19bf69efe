"""What is known about each node: the probe's JSON as typed facts, gathered from all nodes at once."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import get_args, get_origin, get_type_hints

from launcher import framing, gpu_ways, remote
from launcher.errors import LauncherError
from launcher.remote import Node

PROBE = Path(__file__).with_name("probe.py")
GATHER_TIMEOUT_S = 15
NEEDED_PYTHON = "3.8"
SINGLE_SHARD = "model.safetensors"


@dataclass(frozen=True)
class Host:
    hostname: str
    kernel: str
    cmdline: str
    machine: str
    page_size: int
    python: str
    home: str
    user_id: int
    wall_clock: float  # seconds since 1970, as the node believes
    nccl_conf: str | None  # text of /etc/nccl.conf
    infiniband_files: tuple[str, ...]  # names in /dev/infiniband
    fatal_pci_errors: tuple[str, ...] | None = None  # lines of the kernel's log; None: it may not be read
    ib_write_bw: str = ""  # path of perftest's program; empty: not installed
    rsync: str = ""  # path of the program; empty: not installed


@dataclass(frozen=True)
class Memory:
    total_bytes: int
    available_bytes: int
    free_bytes: int
    swap_total_bytes: int
    swap_free_bytes: int
    # Kernels without CMA have no such lines.
    cma_total_bytes: int = 0
    cma_free_bytes: int = 0


@dataclass(frozen=True)
class Address:
    interface: str
    address: str
    prefix: int


@dataclass(frozen=True)
class Link:
    name: str
    state: str
    carrier: int | None
    mtu: int | None
    speed_mbps: int | None
    pci: str
    pcie_speed: str  # "32.0 GT/s PCIe"
    pcie_width: int | None

    @property
    def is_up(self) -> bool:
        return self.state == "up" and self.carrier == 1


@dataclass(frozen=True)
class Gid:
    index: int
    gid: str
    type: str
    interface: str


@dataclass(frozen=True)
class RdmaPort:
    device: str
    port: int
    state: str
    phys_state: str
    rate: str  # "200 Gb/sec (4X HDR)"
    link_layer: str
    interface: str
    gids: tuple[Gid, ...]  # the entries in use

    @property
    def is_active(self) -> bool:
        return self.state == "ACTIVE"


@dataclass(frozen=True)
class Listener:
    port: int
    address: str
    user_id: int
    pid: int | None  # None: another user's process
    ancestors: tuple[int, ...]
    program: str
    container: str  # id, empty outside of Docker or unknown


@dataclass(frozen=True)
class VerifiedFacts:
    """What a folder's record says was verified there, and what of it looks otherwise now."""

    pack: str
    revision: str
    digest: str  # of names, sizes and hashes: equal where the same bytes were verified
    total_bytes: int
    changed: tuple[str, ...]
    extra: tuple[str, ...]  # files that the engine could read and that nobody verified
    error: str  # why the record cannot be read


@dataclass(frozen=True)
class Checkpoint:
    sizes: Mapping[str, int]
    hashes: Mapping[str, str]
    shards: tuple[str, ...] | None  # None: no readable index
    is_small: bool = False  # then all of it is hashed
    record: VerifiedFacts | None = None  # None: nothing was verified here
    unfinished_bytes: int = 0  # of a download or a copy that is on its way

    @property
    def missing(self) -> list[str]:
        return [name for name in self.shards or () if name not in self.sizes]

    @property
    def lack(self) -> str:
        """What keeps it from being whole, by its own index; empty if nothing."""
        if not self.shard_sizes and self.shards is None:
            return f"no readable model.safetensors.index.json and no {SINGLE_SHARD}"
        if self.missing:
            return f"{len(self.missing)} of {len(self.shards)} shards are missing, first {self.missing[0]}"
        return ""

    @property
    def shard_sizes(self) -> dict[str, int]:
        names = self.shards if self.shards is not None else (SINGLE_SHARD,)
        return {name: self.sizes[name] for name in names if name in self.sizes}

    @property
    def total_bytes(self) -> int:
        """As verified, else of all that is there."""
        return self.record.total_bytes if self.record else sum(self.sizes.values())


@dataclass(frozen=True)
class PathFacts:
    path: str
    exists: bool
    is_folder: bool
    writable: bool
    executable: bool
    free_bytes: int
    disk: int
    checkpoint: Checkpoint | None = None
    packages: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Docker:
    program: str  # empty: not installed
    error: str  # why the daemon does not answer
    version: str
    runtimes: tuple[str, ...]
    folder: str
    gpu_hook: str
    free_bytes: int | None
    cdi_files: tuple[str, ...] = ()  # descriptions of devices for CDI


@dataclass(frozen=True)
class Image:
    name: str
    id: str
    digests: tuple[str, ...]
    layers: tuple[str, ...]
    architecture: str
    labels: Mapping[str, str] = field(default_factory=dict)
    size_bytes: int = 0

    def is_same_as(self, other: Image) -> bool:
        """By content: nodes may store the same layers under different ids."""
        return self.id == other.id or bool(self.layers and self.layers == other.layers)


@dataclass(frozen=True)
class GpuAccess:
    """How a container of the image gets the GPU (gpu_ways.py)."""

    way: str  # empty: no way that was tried
    tried: Mapping[str, str] = field(default_factory=dict)  # what Docker said to those that failed


@dataclass(frozen=True)
class Container:
    id: str
    name: str
    image: str


@dataclass(frozen=True)
class Gpu:
    name: str
    driver: str
    sm_mhz: float | None
    max_sm_mhz: float | None
    temperature_c: float | None
    power_w: float | None
    throttle_reasons: int | None


@dataclass(frozen=True)
class GpuProcess:
    pid: int
    name: str
    used_bytes: int | None
    container: str


@dataclass(frozen=True)
class LinkRun:
    """A link to node 0 as ib_write_bw measured it."""

    device: str
    other: str  # node 0's device
    gbps: float | None = None
    problem: str = ""  # why there is no number


@dataclass(frozen=True)
class NodeFacts:
    """A topic that could not be looked at is None, and errors[topic] says why."""

    rank: int
    address: str  # by which the node is configured
    unreached: str = ""  # what ssh said when the node was not reached
    unprobed: str = ""  # what was said when the node was reached, and the probe did not run
    noise: str = ""  # what the login shell said around the probe's answer, in few words
    clock_offset_s: float = 0.0  # this node's wall clock minus this machine's
    host: Host | None = None
    memory: Memory | None = None
    addresses: tuple[Address, ...] | None = None
    links: tuple[Link, ...] | None = None
    rdma: tuple[RdmaPort, ...] | None = None
    ports: tuple[Listener, ...] | None = None
    paths: Mapping[str, PathFacts] | None = None
    docker: Docker | None = None
    # These two are also None where the image is not there; then there is no error.
    image: Image | None = None
    gpu_access: GpuAccess | None = None
    containers: tuple[Container, ...] | None = None
    gpus: tuple[Gpu, ...] | None = None
    gpu_processes: tuple[GpuProcess, ...] | None = None
    link_runs: tuple[LinkRun, ...] | None = None  # None: nothing was measured
    errors: Mapping[str, str] = field(default_factory=dict)

    @property
    def looked_at(self) -> bool:
        return not self.unreached and not self.unprobed

    def checkpoint(self, name: str) -> Checkpoint | None:
        path = (self.paths or {}).get(name)
        return path.checkpoint if path else None

    def link(self, interface: str) -> Link | None:
        return next((link for link in self.links or () if link.name == interface), None)


# topic -> (type of one entry, one | many | named)
TOPICS: dict[str, tuple[type, str]] = {
    "host": (Host, "one"),
    "memory": (Memory, "one"),
    "addresses": (Address, "many"),
    "links": (Link, "many"),
    "rdma": (RdmaPort, "many"),
    "ports": (Listener, "many"),
    "paths": (PathFacts, "named"),
    "docker": (Docker, "one"),
    "image": (Image, "one"),
    "gpu_access": (GpuAccess, "one"),
    "containers": (Container, "many"),
    "gpus": (Gpu, "many"),
    "gpu_processes": (GpuProcess, "many"),
}
MAY_BE_ABSENT = ("image", "gpu_access")
# Fields that hold entries themselves.
INSIDE = {"gids": (Gid, "many"), "checkpoint": (Checkpoint, "one"), "record": (VerifiedFacts, "one")}


# Records: one JSON object per node, as gathered or kept in a file


def from_record(record: object) -> NodeFacts:
    """Facts from {"rank", "address", "noise", "clock_offset_s", "link_runs"; "probe", "unreached" or "unprobed"}.

    A topic that does not look as expected is an error of that topic.
    """
    try:
        rank, address = int(record["rank"]), str(record["address"])
        noise = str(record.get("noise", ""))
        for reason in ("unreached", "unprobed"):
            if record.get(reason):
                return NodeFacts(rank, address, noise=noise, **{reason: str(record[reason])})
        offset, found = float(record.get("clock_offset_s", 0)), record["probe"]
        runs = shaped(LinkRun, "many", record["link_runs"]) if "link_runs" in record else None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise LauncherError(
            f"A node's facts are not readable ({type(error).__name__}: {error}): rank, address and what the probe "
            f"said belong there; gather them again."
        ) from error
    where = f"node {rank} ({address})"
    if not isinstance(found, dict) or not isinstance(found.get("errors"), dict):
        raise LauncherError(f"{where}: the probe's answer is no object with facts and errors; gather the facts again.")
    if "request" in found["errors"]:
        raise LauncherError(f"{where}: the probe did not understand what to look at: {found['errors']['request']}.")
    values, errors = topics_of(found)
    return NodeFacts(rank, address, noise=noise, clock_offset_s=offset, link_runs=runs, errors=errors, **values)


def topics_of(found: dict) -> tuple[dict, dict[str, str]]:
    values, errors = {}, {str(topic): str(text) for topic, text in found["errors"].items()}
    for topic, (kind, shape) in TOPICS.items():
        value = found.get(topic)
        try:
            values[topic] = None if value is None else shaped(kind, shape, value)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            values[topic], errors[topic] = None, f"not as expected: {error}"
        if value is None and topic not in MAY_BE_ABSENT:
            errors.setdefault(topic, "the probe did not say")
    return values, errors


def read_file(path: Path) -> list[NodeFacts]:
    """Facts of a recorded cluster: {"nodes": [record, ...]}."""
    try:
        records = json.loads(path.read_text(encoding="utf-8"))["nodes"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LauncherError(f"{path}: not readable as recorded facts ({type(error).__name__}: {error}).") from error
    return [from_record(record) for record in records]


def shaped(kind: type, shape: str, value):
    if shape == "many":
        return tuple(entry(kind, item) for item in value)
    if shape == "named":
        return {name: entry(kind, item) for name, item in value.items()}
    return entry(kind, value)


def entry(kind: type, value: dict):
    """One dataclass from one JSON object: every field without a default is needed, others are ignored."""
    hints = get_type_hints(kind)
    arguments = {}
    for one in fields(kind):
        if one.name not in value:
            if one.default is MISSING and one.default_factory is MISSING:
                raise KeyError(f"{kind.__name__} without {one.name}")
            continue
        inner = value[one.name]
        if one.name in INSIDE and inner is not None:
            inner = shaped(*INSIDE[one.name], inner)
        elif isinstance(inner, list):
            inner = tuple(inner)
        arguments[one.name] = checked(kind, one.name, inner, hints[one.name])
    return kind(**arguments)


def checked(kind: type, name: str, value, hint):
    accepted = accepted_types(hint)
    if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in accepted):
        raise TypeError(f"{kind.__name__}.{name} is {value!r}")
    return value


def accepted_types(hint) -> tuple[type, ...]:
    choices = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    plain = tuple(get_origin(choice) or choice for choice in choices)
    return (*plain, int) if float in plain else plain


# Gathering


def request_for(config, ports: Iterable[int]) -> dict:
    """What the probe is to look at, the same on every node but for its address."""
    paths = {"cache": config["CACHE_DIR"], "model": config["MODEL_DIR"]}
    if config["SPEC_METHOD"] == "dflash":
        paths["draft"] = config["DRAFT_DIR"]
    if config["RUNTIME"] == "native":
        paths["python"] = config["NATIVE_PYTHON"]
    image = config["IMAGE"] if config["RUNTIME"] == "docker" else ""
    return {"ports": sorted(set(ports)), "paths": {name: str(path or "") for name, path in paths.items()},
            "image": str(image or ""), "gpu_ways": gpu_ways.WAYS if image else {}}  # fmt: skip


def gather(nodes: Sequence[Node], request: Mapping[str, object]) -> list[NodeFacts]:
    """Asks all nodes at once. A node that cannot be asked has facts that say so."""
    return [from_record(record) for record in gather_records(nodes, request)]


def gather_records(nodes: Sequence[Node], request: Mapping[str, object]) -> list[dict]:
    source = PROBE.read_bytes()
    return remote.on_all(nodes, lambda node: ask(node, request, source))


def ask(node: Node, request: Mapping[str, object], source: bytes) -> dict:
    argument = json.dumps({**request, "address": node.address})
    record = {"rank": node.rank, "address": node.address}
    sent = time.time()
    result = remote.run(node, ["python3", "-", argument], stdin=source, timeout_s=GATHER_TIMEOUT_S)
    received = time.time()
    if result.unreached:
        return {**record, "unreached": result.message}
    if noise := framing.shown(result.noise):
        record["noise"] = noise
    if not result.ok:
        return {**record, "unprobed": result.message}
    found = framing.object_with("errors", result.stdout)
    if found is None:
        start = framing.shown(result.stdout)
        return {**record, "unprobed": f"the answer is no JSON object with facts and errors, it begins with {start!r}"}
    clock = clock_of(found)
    # Half of the way there and back is the best guess for when the probe read the clock.
    return {**record, "clock_offset_s": clock - (sent + received) / 2 if clock else 0.0, "probe": found}


def clock_of(found: Mapping) -> float:
    """When the probe looked, by the node's own clock; 0: it did not say."""
    clock = found["host"].get("wall_clock") if isinstance(found.get("host"), dict) else None
    return clock if isinstance(clock, int | float) else 0
