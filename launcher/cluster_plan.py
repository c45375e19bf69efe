"""The plan of a cluster: what each rank is given and runs, in order. `plan` prints it and `start` runs exactly it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launcher import commands, refusals
from launcher.commands import NOT_CARRIED_FILE, RAY_PORTS, SECRETS, Found, Place, Unit, host_port
from launcher.config import BUILT_IN, REDACTED
from launcher.errors import LauncherError
from launcher.plan import pairs
from launcher.vllm_flags import api_host

if TYPE_CHECKING:
    from launcher.config import Config
    from launcher.discovery import Fabric

PLACEHOLDER = re.compile(r"<(?:found|made) at start[^>]*>")
# Sent to every node as they are.
NAMES = ("runner.py", "memory_guard.py", "fabric_bind.py", "fabric_bind.c", "inside.py")
PROGRAMS = [Path(__file__).with_name(name) for name in NAMES]


@dataclass(frozen=True)
class File:
    path: str
    mode: int
    content: bytes
    shown: bool = True  # whether the plan prints what is in it


@dataclass(frozen=True)
class Port:
    rank: int
    number: str  # one port or FIRST-LAST; empty: the system chooses
    owner: str
    bind: str


@dataclass(frozen=True)
class RankPlan:
    """One rank. In order: make `folders`, write `files`, start the first of `units` and the `guards`; the other units
    only when the first are up."""

    rank: int
    address: str
    name: str
    environment: Mapping[str, str]
    folders: tuple[str, ...]
    files: tuple[File, ...]
    units: tuple[Unit, ...]
    guards: tuple[Unit, ...]  # what ends the rank before its node is out of memory: one, or none
    list_gpus: tuple[str, ...]  # fails where a container lost its GPU; empty without containers
    look_inside: tuple[str, ...]  # prints what the rank's own Python finds
    shell: tuple[str, ...]

    @property
    def env_file(self) -> str:
        return self.files[0].path

    @property
    def make_folders(self) -> list[str]:
        return ["mkdir", "-p", "--", *self.folders]


@dataclass(frozen=True)
class Plan:
    config: Config
    ranks: tuple[RankPlan, ...]
    ports: tuple[Port, ...]
    notes: tuple[str, ...]
    ray_nodes: tuple[str, ...]  # run on rank 0: prints Ray's nodes as JSON; empty where Ray is not used

    @property
    def url(self) -> str:
        """Where the launcher itself reaches the API, on rank 0."""
        host = api_host(self.config)
        return f"http://{host_port('127.0.0.1' if host in ('0.0.0.0', '::') else host, self.config['PORT'])}"

    @property
    def unresolved(self) -> list[str]:
        """What is still to be found, rank by rank. A plan may run only when this is empty."""
        words = (word for rank in self.ranks for word in words_of(rank))
        return sorted({found for word in words for found in PLACEHOLDER.findall(word)})


def make(
    config: Config,
    fabrics: Sequence[Fabric] | None = None,
    *,
    homes: Sequence[str] | None = None,
    image_id: str = "",
    ray_token: str = "",
    admin_token: str = "",
    gpu_ways: Sequence[str] = (),
    more_notes: Iterable[str] = (),
) -> Plan:
    """Refuses forbidden combinations, all of them at once."""
    refused = refusals.refusals(config)
    if refused:
        raise LauncherError("\n".join(refused))
    founds = [
        Found(homes[rank] if homes else "", image_id, ray_token, admin_token, gpu_ways[rank] if gpu_ways else "")
        for rank in range(config.topology.nodes)
    ]
    ranks = tuple(
        rank_plan(config, fabrics[rank] if fabrics else None, rank, found) for rank, found in enumerate(founds)
    )
    notes = [*config.notes, *refusals.notes(config), *geometry_notes(config), *more_notes]
    for rank, fabric in enumerate(fabrics or ()):
        notes += [f"node {rank}: {note}" for note in fabric.notes]
    ray_nodes = ()
    if config["EXECUTOR"] == "ray":
        place = Place(config, 0, founds[0])
        ray_nodes = tuple(commands.runtime_of(config).inside(place, commands.bound(place, commands.ray_nodes(config))))
    return Plan(
        config, ranks, tuple(sorted(ports(config), key=lambda port: port.rank)), tuple(dict.fromkeys(notes)), ray_nodes
    )


def rank_plan(config, fabric: Fabric | None, rank: int, found: Found) -> RankPlan:
    place = Place(config, rank, found)
    environment = commands.rank_environment(config, fabric, rank, found)
    return RankPlan(
        rank=rank,
        address=config.addresses[rank],
        name=place.name,
        environment=environment,
        folders=tuple(place.outside(what) for what in ("config", "log", "cache")),
        files=(
            File(place.env_file, 0o600, commands.environment_file(environment)),
            File(f"{place.outside('config')}/{NOT_CARRIED_FILE}", 0o644, commands.not_carried_file()),
            *(
                File(f"{place.outside('config')}/{program.name}", 0o644, program.read_bytes(), shown=False)
                for program in PROGRAMS
            ),
        ),
        units=tuple(units(config, place, found)),
        guards=tuple(guards(config, place, found)),
        list_gpus=tuple(commands.runtime_of(config).list_gpus(place)),
        look_inside=tuple(commands.look_inside(place)),
        shell=tuple(commands.runtime_of(config).shell(place)),
    )


def units(config, place: Place, found: Found) -> Iterator[Unit]:
    runtime, server = commands.runtime_of(config), commands.server(config, place.rank, found)
    if config["EXECUTOR"] == "mp":
        yield runtime.main_unit(place, "server", commands.bound(place, server))
        return
    yield runtime.main_unit(place, "ray", commands.bound(place, commands.ray_start(config, place.rank)))
    if server:
        yield runtime.inner_unit(place, "server", commands.bound(place, server))


def guards(config, place: Place, found: Found) -> Iterator[Unit]:
    if config["MEMORY_GUARD_GIB"]:
        main = next(units(config, place, found))
        end = ("docker", "kill", place.name) if place.is_docker else main.stop[0]
        yield commands.guard_unit(place, end)


def geometry_notes(config) -> Iterator[str]:
    """Which cache rows the attention reads, why, and what they cost."""
    said = {
        "auto": "656 bytes per token and layer; the 512-wide kernel where the image's FlashInfer has it, else padded "
        "rows; the log of each rank says which",
        "native": "656 bytes per token and layer, FlashInfer's 512-wide kernel",
        "padded": "656 bytes per token and layer, 512 columns padded to 576 with zeros: exact, an eighth more products",
        "compact": "528 bytes per token and layer, the 512-wide kernel; 18.6 % less cache per token with the indexer's "
        "keys; not measured on a Spark",
    }
    if config["MLA_GEOMETRY"] in said:
        yield f"MLA_GEOMETRY={config['MLA_GEOMETRY']}: {said[config['MLA_GEOMETRY']]}."


# Ports


def ports(config) -> Iterator[Port]:
    yield Port(0, str(config["PORT"]), "API", api_host(config))
    if config["EXECUTOR"] == "mp":
        yield Port(0, str(config["MASTER_PORT"]), "PyTorch's rendezvous", config.addresses[0])
    else:
        yield from ray_ports(config)
    for rank in range(config.topology.nodes):
        yield Port(rank, "", "vLLM's messages, NCCL and Gloo", config.addresses[rank])


def ray_ports(config) -> Iterator[Port]:
    first = config["RAY_PORT"]
    at = {flag: str(first + distance) for flag, distance in RAY_PORTS.items()}
    yield Port(0, str(first), "Ray's control store", config.addresses[0])
    for rank, address in enumerate(config.addresses):
        yield Port(rank, at["--node-manager-port"], "Ray's node manager", address)
        yield Port(rank, at["--object-manager-port"], "Ray's object manager", address)
        yield Port(rank, at["--runtime-env-agent-port"], "Ray's environment agent", address)
        agents = f"{at['--dashboard-agent-listen-port']}-{at['--metrics-export-port']}"
        yield Port(rank, agents, "Ray's agents", "nothing listens with plain `ray`; its [default] extra brings them")
        workers = f"{at['--min-worker-port']}-{at['--max-worker-port']}"
        yield Port(rank, workers, "Ray's workers, and the API server as one of them", address)
    client = f"{config.addresses[0]} and 127.0.0.1, port 10001, only where `grpcio` is installed"
    yield Port(0, "", "Ray's client server", client)
    yield Port(0, "", "PyTorch's rendezvous", config.addresses[0])


def fixed_ports(plan: Plan, rank: int) -> list[int]:
    """Every port that must be free on a node before the start."""
    numbers: list[int] = []
    for port in plan.ports:
        if port.rank == rank and port.number:
            first, _, last = port.number.partition("-")
            numbers += range(int(first), int(last or first) + 1)
    return sorted(set(numbers))


# Text


def words_of(rank: RankPlan) -> Iterator[str]:
    yield from rank.environment.values()
    yield from rank.folders
    yield from (file.path for file in rank.files)
    for unit in rank.units:
        yield from unit.start


def shown(name: str, value: str) -> str:
    return REDACTED if name in SECRETS and not PLACEHOLDER.fullmatch(value) else value


def describe(plan: Plan) -> str:
    sections = [
        head(plan), "\n".join(settings(plan.config)), "\n".join(port_lines(plan)), *map(describe_rank, plan.ranks)
    ]  # fmt: skip
    if plan.ray_nodes:
        sections.append(f"# Then, on node 0, until Ray reports {len(plan.ranks)} GPUs\n{block(plan.ray_nodes)}")
    sections += [f"# Then, on node 0: {unit.name}\n{block(unit.start)}" for unit in plan.ranks[0].units[1:]]
    return "\n\n".join(sections) + "\n"


def head(plan: Plan) -> str:
    config = plan.config
    kind = f"{config.topology.nodes} nodes, RUNTIME={config['RUNTIME']}, EXECUTOR={config['EXECUTOR']}"
    return "\n".join([f"# Plan for {config.topology.name}: {kind}", *(f"# Note: {note}" for note in plan.notes)])


def settings(config) -> Iterator[str]:
    """Values that are not built in, with where they come from."""
    yield "# Settings that are not the built-in default"
    for name in sorted(config.values):
        if config.sources[name] != BUILT_IN:
            yield f"{name}={config.text(name)}  ({config.sources[name]})"


def port_lines(plan: Plan) -> Iterator[str]:
    yield "# Ports, and the address on which each listens"
    for port in plan.ports:
        yield f"node {port.rank}  {port.number or 'any':<11}  {port.owner}: {port.bind}"


def describe_rank(rank: RankPlan) -> str:
    lines = [f"# Node {rank.rank} ({rank.address}), {rank.name}", block(rank.make_folders)]
    for file in rank.files:
        lines.append(f"# file {file.path}, mode {file.mode:04o}")
        if file.path.endswith("/environment"):
            lines += [f"{name}={shown(name, value)}" for name, value in sorted(rank.environment.items())]
        elif file.shown:
            lines += file.content.decode().splitlines()
    for unit in (rank.units[0], *rank.guards):
        lines += [f"# start {unit.name}", block(unit.start)]
    return "\n".join(lines)


def body(plan: Plan) -> Mapping[str, object]:
    """The plan for programs; `describe` has the same for people."""
    config = plan.config
    return {
        "topology": config.topology.name,
        "url": f"{plan.url}/v1",
        "settings": [{"name": name, "value": config.text(name), "source": config.sources[name]}
                     for name in sorted(config.values) if config.sources[name] != BUILT_IN],
        "ports": [{"node": port.rank, "number": port.number or None, "owner": port.owner, "bind": port.bind}
                  for port in plan.ports],
        "nodes": [node_body(rank) for rank in plan.ranks],
        "ray_nodes": list(plan.ray_nodes),
        "unresolved": plan.unresolved,
    }  # fmt: skip


def node_body(rank: RankPlan) -> Mapping[str, object]:
    """The environment file is there by its variables, the programs that are sent by their paths."""
    return {
        "rank": rank.rank,
        "address": rank.address,
        "name": rank.name,
        "folders": list(rank.folders),
        "files": [{"path": file.path, "mode": f"{file.mode:04o}"} for file in rank.files],
        "environment": {name: shown(name, value) for name, value in sorted(rank.environment.items())},
        "units": [unit_body(unit) for unit in rank.units],
        "guards": [unit_body(unit) for unit in rank.guards],
    }


def unit_body(unit: Unit) -> Mapping[str, object]:
    return {"name": unit.name, "start": list(unit.start)}


def block(argv: Sequence[str]) -> str:
    """Shell text with a flag and its values to a line."""
    return " \\\n    ".join(pairs(tuple(argv)))
