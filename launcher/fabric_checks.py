"""Checks of the fast network between the nodes: addresses, links, RDMA devices and their GID entries."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from launcher import link_runs
from launcher.discovery import PREFIXES, Rail, address_of_gid, changes, is_roce_v2, network_of
from launcher.facts import Gid, NodeFacts, RdmaPort
from launcher.findings import NOT_NEEDED, Context, Verdict, each_node, failed, over_all, passed, warned

FULL_MTU = 9000
# One PCIe Gen5 x4 link carries half of a QSFP port's 200 Gb/s; below this a rail was trained badly.
LEAST_RAIL_GBPS = 100
# What ib_write_bw must reach on a rail. A cable that was trained badly carries 8 to 25 Gb/s, and nothing reports it.
LEAST_MEASURED_GBPS = 25
SLOW_LINK_FIX = (
    "unplug that cable at both ends and plug it in again; if that changes nothing, shut both nodes down, "
    "take their power away for a minute, and look again"
)


def lacks_rdma_and_may(context: Context, node: NodeFacts) -> bool:
    """A made-up fabric has no RDMA, and the CPU engine no NCCL; what a setting names has to be there all the same."""
    return context.is_native and not context.fabrics[node.rank].rails


# Address and interface


@over_all("address", "addresses")
def check_address(context: Context, nodes: Sequence[NodeFacts]) -> Iterator[Verdict]:
    networks = {}
    for node in nodes:
        entry = next((one for one in node.addresses if one.address == node.address), None)
        wrong = address_problem(context, node, entry)
        if wrong:
            yield wrong
            continue
        networks.setdefault(network_of(entry), []).append(node.rank)
        yield passed(f"{node.address}/{entry.prefix} on {entry.interface}", node.rank)
    if len(networks) > 1:
        seen = "; ".join(f"{network}: node {', '.join(map(str, ranks))}" for network, ranks in networks.items())
        yield warned(f"the nodes' addresses are in different networks ({seen})",
                     "give all nodes addresses of the fast network between them")  # fmt: skip


def address_problem(context: Context, node: NodeFacts, entry) -> Verdict | None:
    name = f"{PREFIXES[node.rank]}_IP"
    own = ", ".join(f"{one.address} ({one.interface})" for one in node.addresses if one.interface != "lo")
    if entry is None:
        return failed(f"{node.address} is not on this node; its addresses: {own or 'none'}",
                      f"write the node's fabric address into {name}", node.rank)  # fmt: skip
    if ipaddress.ip_address(entry.address).is_loopback:
        return failed(f"{node.address} is the loopback address, no other node can reach it",
                      f"write the node's fabric address into {name}; it has {own or 'none'}", node.rank)  # fmt: skip
    others = {other.address: other.rank for other in context.facts if other.rank != node.rank}
    both = [one.address for one in node.addresses if one.address in others]
    if both or node.address in others:
        rank = others[(both or [node.address])[0]]
        return failed(f"has the address of node {rank} too: both are the same machine",
                      f"write the address of another machine into {PREFIXES[max(rank, node.rank)]}_IP",
                      node.rank)  # fmt: skip
    return None


@each_node("interface-up", "links", "addresses")
def check_interface_up(context: Context, node: NodeFacts) -> Iterator[Verdict]:
    name, setting = context.fabrics[node.rank].interface, f"{PREFIXES[node.rank]}_CX7_IF"
    chosen = str(context.config[setting] or "")
    if not name:
        yield warned("not looked at: no interface has the node's address", "see address")
        return
    link = node.link(name)
    if link is None:
        there = ", ".join(one.name for one in node.links)
        yield failed(f"{setting}={chosen}: there is no such interface; there are {there}",
                     f"clear {setting}, the interface is found by the address")  # fmt: skip
        return
    on_it = [one.address for one in node.addresses if one.interface == name]
    if not link.is_up:
        carrier = "no carrier" if link.carrier != 1 else "carrier"
        yield failed(f"{name} is {link.state}, {carrier}", f"check the cable; then sudo ip link set {name} up")
    elif chosen and node.address not in on_it:
        yield warned(f"{setting}={chosen} does not carry {node.address}",
                     f"clear {setting}, or configure the address that {chosen} has: "
                     f"{', '.join(on_it) or 'none'}")  # fmt: skip
    else:
        yield passed(f"{name} is up")


def fabric_interfaces(context: Context, node: NodeFacts) -> list[str]:
    fabric = context.fabrics[node.rank]
    return list(dict.fromkeys(name for name in (fabric.interface, *(rail.interface for rail in fabric.rails)) if name))


@over_all("mtu", "links", "addresses")
def check_mtu(context: Context, nodes: Sequence[NodeFacts]) -> Iterator[Verdict]:
    mtus = {node.rank: {name: node.link(name).mtu for name in fabric_interfaces(context, node) if node.link(name)}
            for node in nodes}  # fmt: skip
    largest = max((mtu or 0 for own in mtus.values() for mtu in own.values()), default=0)
    for node in nodes:
        seen = ", ".join(f"{name} {mtu}" for name, mtu in mtus[node.rank].items())
        small = [name for name, mtu in mtus[node.rank].items() if (mtu or 0) < largest]
        wanted = max(largest, FULL_MTU)
        low = [name for name, mtu in mtus[node.rank].items() if (mtu or 0) < wanted]
        fix = "; ".join(f"sudo ip link set {name} mtu {wanted}" for name in low) + "; and in netplan, to keep it"
        if not seen:
            yield warned("not looked at: no interface of the fabric is known", "see address", node.rank)
        elif small:
            yield failed(f"{seen}, and {largest} elsewhere: large messages get lost", fix, node.rank)
        elif largest < FULL_MTU and not context.is_native:
            yield warned(f"{seen}; {FULL_MTU} is faster", fix, node.rank)
        else:
            yield passed(seen, node.rank)


@each_node("link-speed", "links", "rdma", runtime="docker")
def check_link_speed(context: Context, node: NodeFacts) -> Iterator[Verdict]:
    slow, seen = [], []
    for rail in context.fabrics[node.rank].rails:
        if not rail.port or not rail.port.is_active:  # rdma-device speaks of those
            continue
        link = node.link(rail.interface)
        speeds = {
            "port": rate_gbps(rail.port.rate),
            "PCIe": pcie_gbps(link.pcie_speed, link.pcie_width) if link else None,
        }
        seen += [f"{rail.device} {what} {speed:.0f} Gb/s" for what, speed in speeds.items() if speed]
        slow += [rail.device for speed in speeds.values() if speed and speed < LEAST_RAIL_GBPS]
    if slow:
        yield warned(f"{', '.join(seen)}; below {LEAST_RAIL_GBPS} something was trained badly",
                     "reboot that node; if it stays, reseat or change the cable")  # fmt: skip
    else:
        yield passed(", ".join(seen) or "no active device tells its speed")


def rate_gbps(text: str) -> float | None:
    match = re.match(r"([\d.]+) Gb/sec", text)
    return float(match.group(1)) if match else None


def pcie_gbps(speed: str, width: int | None) -> float | None:
    match = re.match(r"([\d.]+) GT/s", speed)
    return float(match.group(1)) * width if match and width else None


@over_all(link_runs.CHECK, "rdma", "addresses", "host", runtime="docker")
def check_link_bandwidth(context: Context, nodes: Sequence[NodeFacts]) -> Iterator[Verdict]:
    for node in nodes:
        if node.rank == 0:  # the other end of every link
            continue
        if node.link_runs is None:
            yield replace(link_runs.obstacle(context, node) or passed("not measured"), node=node.rank)
            continue
        slow = [run for run in node.link_runs if run.gbps is not None and run.gbps < LEAST_MEASURED_GBPS]
        seen = ", ".join(f"{run.device} {run.gbps:.0f} Gb/s" for run in node.link_runs if run.gbps is not None)
        if slow:
            yield failed(f"{seen} to node 0 by ib_write_bw, at least {LEAST_MEASURED_GBPS} needed", SLOW_LINK_FIX,
                         node.rank)  # fmt: skip
        elif seen:
            yield passed(f"{seen} to node 0 by ib_write_bw", node.rank)
        for run in node.link_runs:
            if run.problem:
                yield warned(
                    f"{run.device} to node 0's {run.other} could not be measured: {run.problem}",
                    f"{link_runs.by_hand(context, node.rank, run.device)}; a firewall must let its port through",
                    node.rank,
                )


# RDMA


@each_node("rdma-device", "rdma", "addresses", "host")
def check_rdma_device(context: Context, node: NodeFacts) -> Iterator[Verdict]:
    fabric = context.fabrics[node.rank]
    if lacks_rdma_and_may(context, node):
        yield passed(NOT_NEEDED)
        return
    if not fabric.rails:
        yield failed(
            f"no RDMA device belongs to {fabric.interface or node.address}; there are: {device_list(node)}",
            "connect the QSFP ports and give their interfaces addresses; ibdev2netdev shows which belongs to which",
        )
        return
    for rail in fabric.rails:
        yield rail_verdict(context, node, rail)
    if not context.is_native and not any(name.startswith("uverbs") for name in node.host.infiniband_files):
        yield failed("/dev/infiniband has no uverbs device, containers get RDMA through it",
                     "sudo apt-get install rdma-core && sudo modprobe ib_uverbs on that node")  # fmt: skip
    if fabric.interface and all(rail.interface != fabric.interface for rail in fabric.rails):
        yield warned(
            f"{node.address} is on {fabric.interface}, which has no RDMA device: images and control messages go there",
            f"write an address of {fabric.rails[0].interface or 'the fast network'} into {PREFIXES[node.rank]}_IP",
        )


def rail_verdict(context: Context, node: NodeFacts, rail: Rail) -> Verdict:
    setting = f"{PREFIXES[node.rank]}_CX7_IB"
    if rail.port is None:
        return failed(f"{setting} names {rail.device}, and there are: {device_list(node)}",
                      f"clear {setting}, the devices are found by the address")  # fmt: skip
    if rail.port.is_active:
        return passed(f"{rail.device} is ACTIVE on {rail.interface or 'no interface'}")
    clear = f"; or clear {setting}" if context.config[setting] else ""
    return failed(f"{rail.device} is {rail.port.state or 'in no state'} ({rail.port.phys_state}); "
                  f"there are: {device_list(node)}",
                  f"check the cable; then sudo ip link set {rail.interface} up{clear}")  # fmt: skip


def device_list(node: NodeFacts) -> str:
    return ", ".join(f"{one.device} ({one.state or 'in no state'}, {one.interface or 'no interface'})"
                     for one in node.rdma) or "none"  # fmt: skip


@each_node("second-rail", "rdma", "addresses")
def check_second_rail(context: Context, node: NodeFacts) -> Verdict:
    rails = context.fabrics[node.rank].rails
    if lacks_rdma_and_may(context, node):
        return passed(NOT_NEEDED)
    if not rails:
        return warned("not looked at: no RDMA device", "see rdma-device")
    if len(rails) > 1:
        return passed(", ".join(f"{rail.device} ({rail.address or 'no address'})" for rail in rails))
    used = {rail.port for rail in rails}
    spare = [port for port in node.rdma if port.is_active and port not in used]
    addressed = {one.interface for one in node.addresses}
    bare = [port for port in spare if port.interface not in addressed]
    if context.config[f"{PREFIXES[node.rank]}_CX7_IB"]:
        fix = f"clear {PREFIXES[node.rank]}_CX7_IB, then every active device is used"
    elif bare:
        fix = f"give {bare[0].interface} ({bare[0].device}) an address of a network of its own on every node"
    elif spare:
        fix = f"put {spare[0].interface} of every node into one network, apart from the first rail's"
    else:
        fix = "bring up the port's second interface: one QSFP port is two devices, ibdev2netdev lists them"
    return warned(f"only {rails[0].device} is used, about half of the cable's bandwidth", fix)


@each_node("rdma-gid", "rdma", "addresses")
def check_rdma_gid(context: Context, node: NodeFacts) -> Iterator[Verdict]:
    fabric = context.fabrics[node.rank]
    if lacks_rdma_and_may(context, node):
        yield passed(NOT_NEEDED)
        return
    rails = [rail for rail in fabric.rails if rail.port]
    if not rails:
        yield warned("not looked at: no RDMA device", "see rdma-device")
        return
    problems = [problem for rail in rails if (problem := gid_problem(context, node, rail))]
    yield from problems
    if problems:
        return
    found = ", ".join(f"{rail.device}: index {fabric.index_of(rail)} is {rail.address} as RoCE v2"
                      for rail in rails)  # fmt: skip
    changed = [text for rank, text in changes(context.fabrics, context.previous) if rank == node.rank]
    yield passed("; ".join([found, *changed]))
    if fabric.set_index is None and fabric.has_unequal_rails:
        yield warned(
            f"the rails have different indexes and a process has one value: {', '.join(found_indexes(rails))}",
            f"nothing: NCCL_IB_GID_INDEX stays unset, and NCCL_IB_ROCE_VERSION_NUM=2 with "
            f"NCCL_IB_ADDR_RANGE={fabric.address_range} lets NCCL find each; a reboot may make them equal",
        )


def found_indexes(rails: Sequence[Rail]) -> list[str]:
    return [f"{rail.device} {rail.found_index}" for rail in rails]


def gid_problem(context: Context, node: NodeFacts, rail: Rail) -> Verdict | None:
    fabric = context.fabrics[node.rank]
    if not rail.address:
        return failed(f"{rail.device}: {rail.interface or 'its interface'} has no IPv4 address; {table_of(rail.port)}",
                      f"give {rail.interface or 'it'} its address: sudo netplan apply, or ip addr add")  # fmt: skip
    if fabric.set_index is not None:
        return set_index_problem(fabric.set_by, fabric.set_index, rail)
    if rail.found_index is None:
        return failed(
            f"{rail.device} has no RoCE v2 entry for its own address ::ffff:{rail.address}; {table_of(rail.port)}",
            f"make the kernel enter it anew: sudo netplan apply on that node, or at its console take {rail.interface} "
            f"down and up",
        )
    return None


def set_index_problem(name: str, index: int, rail: Rail) -> Verdict | None:
    entry = next((one for one in rail.port.gids if one.index == index), None)
    if entry and is_roce_v2(entry) and address_of_gid(entry.gid) == rail.address:
        return None
    if entry is None:
        what = "all zeros"
    elif address_of_gid(entry.gid) != rail.address:
        what = f"{short_gid(entry)}, not this node's own ::ffff:{rail.address}"
    else:
        what = f"{entry.type}, and RoCE v2 is needed"
    found = f"index {rail.found_index} is found by itself" if rail.found_index is not None else "it is found by address"
    return failed(f"{name}={index}: that entry of {rail.device} is {what}; {table_of(rail.port)}",
                  f"clear {name}, {found} at every start")  # fmt: skip


def short_gid(entry: Gid) -> str:
    mapped = address_of_gid(entry.gid)
    return f"::ffff:{mapped}" if mapped else str(ipaddress.IPv6Address(entry.gid))


def table_of(port: RdmaPort) -> str:
    rows = [f"{entry.index} {short_gid(entry)} {entry.type or 'without a type'}" for entry in port.gids]
    return f"GID table of {port.device}: {', '.join(rows) or 'empty'}; all others are zero"
