"""Finds, from each node's address, the interface, the RDMA devices and their GID entries. Pure; settings overrule."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from launcher.facts import Address, Gid, NodeFacts, RdmaPort

# Beginning of the names of the settings that describe one node, by rank.
PREFIXES = ("HEAD", "WORKER", "WORKER2", "WORKER3")


@dataclass(frozen=True)
class Rail:
    """One RDMA device of a node with the address by which the others reach it."""

    device: str
    port: RdmaPort | None  # None: a setting names a device that the node does not have
    interface: str = ""
    address: str = ""
    network: str = ""
    found_index: int | None = None  # of the GID entry that is this address as RoCE v2


@dataclass(frozen=True)
class Fabric:
    interface: str
    hcas: tuple[str, ...]
    gid_index: int | None  # None: to be left unset, NCCL finds it (see address_range), or there is none
    notes: tuple[str, ...] = ()
    rails: tuple[Rail, ...] = ()
    set_index: int | None = None  # the GID index that a setting wants
    set_by: str = ""  # the name of that setting
    address_range: str = ""  # holds all rails' addresses and as few others as possible, for NCCL_IB_ADDR_RANGE

    def index_of(self, rail: Rail) -> int | None:
        """The GID index to use with a rail of this node."""
        return rail.found_index if self.set_index is None else self.set_index

    @property
    def has_unequal_rails(self) -> bool:
        return len({rail.found_index for rail in self.rails if rail.found_index is not None}) > 1


def find_links(config, facts: Sequence[NodeFacts]) -> list[Fabric]:
    """One Fabric per node, in rank order. What was not found is empty, and the checks say what that means."""
    candidates = [[rail_of(node, port) for port in node.rdma or ()] for node in facts]
    shared = shared_networks([rails for node, rails in zip(facts, candidates, strict=True) if node.looked_at])
    return [fabric_of(config, node, rails, shared) for node, rails in zip(facts, candidates, strict=True)]


def setting(config, rank: int, name: str):
    return config[f"{PREFIXES[rank]}_{name}"]


# Rails


def rail_of(node: NodeFacts, port: RdmaPort) -> Rail:
    own = [entry for entry in node.addresses or () if entry.interface == port.interface]
    # An interface may carry several addresses; the one that the node is configured by comes first.
    entry = min(own, key=lambda one: one.address != node.address, default=None)
    if entry is None:
        return Rail(port.device, port, port.interface)
    gid = find_gid(port, entry.address)
    return Rail(port.device, port, port.interface, entry.address, network_of(entry), gid.index if gid else None)


def network_of(entry: Address) -> str:
    return str(ipaddress.ip_interface(f"{entry.address}/{entry.prefix}").network)


def address_of_gid(gid: str) -> str:
    """The IPv4 address that an IPv4-mapped GID stands for, empty for others."""
    try:
        mapped = ipaddress.IPv6Address(gid).ipv4_mapped
    except ValueError:
        return ""
    return str(mapped) if mapped else ""


def is_roce_v2(gid: Gid) -> bool:
    return gid.type.strip().lower() == "roce v2"


def find_gid(port: RdmaPort, address: str) -> Gid | None:
    """The port's RoCE v2 entry for an IPv4 address."""
    return next((gid for gid in port.gids if is_roce_v2(gid) and address_of_gid(gid.gid) == address), None)


def shared_networks(nodes: Sequence[Sequence[Rail]]) -> set[str]:
    """Networks in which every node has an active rail; in a ring there is none, then those that join two nodes."""
    networks = [{rail.network for rail in rails if is_usable(rail)} for rails in nodes]
    if not networks:
        return set()
    of_all = set.intersection(*networks)
    if of_all:
        return of_all
    return {name for own in networks for name in own if sum(name in other for other in networks) > 1}


def is_usable(rail: Rail) -> bool:
    return bool(rail.port and rail.port.is_active and rail.network)


# One node


def fabric_of(config, node: NodeFacts, candidates: Sequence[Rail], shared: set[str]) -> Fabric:
    set_interface = str(setting(config, node.rank, "CX7_IF") or "")
    interface = set_interface or interface_of(node)
    chosen = set_devices(config, node.rank)
    rails = named_rails(chosen, candidates) if chosen else found_rails(interface, candidates, shared)
    set_by, set_index = index_setting(config, node.rank)
    found = {rail.found_index for rail in rails}
    gid_index = set_index if set_index is not None else (found.pop() if len(found) == 1 else None)
    fabric = Fabric(
        interface, tuple(rail.device for rail in rails), gid_index if rails else None, (), tuple(rails),
        set_index, set_by, covering_range([rail.address for rail in rails if rail.address]),
    )  # fmt: skip
    return fabric_with_notes(config, node, fabric)


def interface_of(node: NodeFacts) -> str:
    return next((entry.interface for entry in node.addresses or () if entry.address == node.address), "")


def set_devices(config, rank: int) -> list[str]:
    value = setting(config, rank, "CX7_IB") or ""
    names = value.split(",") if isinstance(value, str) else value
    return [str(name).strip() for name in names if str(name).strip()]


def index_setting(config, rank: int) -> tuple[str, int | None]:
    """The setting that fixes the GID index, the node's own before the one for all."""
    for name in (f"{PREFIXES[rank]}_GID", "NCCL_IB_GID_INDEX"):
        if config[name] not in ("", None):
            return name, int(config[name])
    return "", None


def named_rails(devices: Sequence[str], candidates: Sequence[Rail]) -> list[Rail]:
    # "device:port" is NCCL's way of naming one of several ports.
    by_name = {name: rail for rail in candidates for name in (f"{rail.device}:{rail.port.port}", rail.device)}
    return [replace(by_name.get(name, Rail(name, None)), device=name) for name in devices]


def found_rails(interface: str, candidates: Sequence[Rail], shared: set[str]) -> list[Rail]:
    """The device of the interface first, also when it is down; then the active ones that lead to the other nodes."""
    first = [rail for rail in candidates if interface and rail.interface == interface]
    others = [rail for rail in candidates if rail not in first and is_usable(rail) and rail.network in shared]
    # NCCL pairs the devices of two nodes by their place in the list, so networks have the same order everywhere.
    others.sort(key=lambda rail: (ipaddress.ip_network(rail.network), rail.device))
    return first + others


def covering_range(addresses: Sequence[str]) -> str:
    """The smallest network that holds all the addresses."""
    if not addresses:
        return ""
    network = ipaddress.ip_network(addresses[0])
    while not all(ipaddress.ip_address(address) in network for address in addresses):
        network = network.supernet()
    return str(network)


def fabric_with_notes(config, node: NodeFacts, fabric: Fabric) -> Fabric:
    notes = []
    if fabric.set_index is None and fabric.has_unequal_rails:
        found = ", ".join(f"{rail.device} {rail.found_index}" for rail in fabric.rails)
        notes.append(f"the GID index differs by rail ({found}) and a process has one: it is left unset, NCCL finds it")
    if fabric.rails and fabric.interface and all(rail.interface != fabric.interface for rail in fabric.rails):
        notes.append(f"{node.address} is on {fabric.interface}, the data goes over {', '.join(fabric.hcas)}")
    return replace(fabric, notes=tuple(notes))


# From start to start


def record_of(fabrics: Sequence[Fabric]) -> dict:
    """What the next start compares with; goes into the run record as "fabrics"."""
    return {
        str(rank): {
            "interface": fabric.interface,
            "gids": {rail.device: rail.found_index for rail in fabric.rails},
        }
        for rank, fabric in enumerate(fabrics)
    }


def changes(fabrics: Sequence[Fabric], previous: Mapping | None) -> list[tuple[int, str]]:
    """(rank, one line) for everything that is not as at the last start."""
    then = (previous or {}).get("fabrics") or {}
    found = []
    for rank, now in record_of(fabrics).items():
        before = then.get(rank)
        if not before:
            continue
        if before["interface"] != now["interface"]:
            found.append((int(rank), f"interface {now['interface']}, {before['interface']} at the last start"))
        for device in sorted({*before["gids"], *now["gids"]}):
            old, new = before["gids"].get(device), now["gids"].get(device)
            if old != new:
                found.append((int(rank), f"{device}: GID index {spoken(new)}, {spoken(old)} at the last start"))
    return found


def spoken(index: int | None) -> str:
    return "none" if index is None else str(index)
