import pytest
from recorded import context, give, interface

from launcher import discovery
from launcher.discovery import Fabric, address_of_gid, covering_range, find_links

FIRST, SECOND = "rocep1s0f1", "roceP2p1s0f1"


def fabrics(name="good_tp2", change=None, **changes) -> list[Fabric]:
    made = context(name, change, **changes)
    return find_links(made.config, made.facts)


def test_pair_is_found_from_two_addresses():
    found = fabrics()
    assert [fabric.interface for fabric in found] == ["enp1s0f1np1"] * 2
    assert [fabric.hcas for fabric in found] == [(FIRST, SECOND)] * 2
    assert [fabric.gid_index for fabric in found] == [3, 5]
    assert [fabric.notes for fabric in found] == [(), ()]


def test_four_nodes_are_found():
    found = fabrics("good_tp4")
    assert [(fabric.hcas, fabric.gid_index) for fabric in found] == [((FIRST, SECOND), 3)] * 4
    assert [rail.address for rail in found[3].rails] == ["192.168.100.13", "192.168.101.13"]


def test_device_without_a_peer_in_its_network_is_no_rail():
    def elsewhere(records):
        for entry in records[1]["probe"]["addresses"]:
            if entry["address"] == "192.168.101.11":
                entry["address"] = "192.168.102.11"

    assert [fabric.hcas for fabric in fabrics(change=elsewhere)] == [(FIRST,)] * 2


def test_rails_have_the_same_order_of_networks_whatever_the_devices_are_called():
    def swap_names(records):
        for port in records[1]["probe"]["rdma"]:
            port["device"] = {FIRST: "mlx5_9", SECOND: "mlx5_0"}.get(port["device"], port["device"])

    assert [fabric.hcas for fabric in fabrics(change=swap_names)] == [(FIRST, SECOND), ("mlx5_9", "mlx5_0")]


def test_device_that_is_down_stays_the_first_rail_so_that_checks_can_tell():
    found = fabrics("bad_cable")
    assert found[1].hcas == (FIRST,)
    assert found[1].rails[0].port.state == "DOWN"


def test_address_on_no_interface_finds_nothing():
    found = fabrics("bad_node")
    assert found[1] == Fabric("", (), None)


def test_node_that_was_not_reached_leaves_the_others_whole():
    found = fabrics("bad_unreached")
    assert (found[0].hcas, found[0].gid_index) == ((FIRST, SECOND), 3)
    assert found[1] == found[2] == Fabric("", (), None)


def test_fabric_without_rdma_has_its_interface():
    assert [(fabric.interface, fabric.hcas) for fabric in fabrics("good_native")] == [("veth0", ())] * 2


def test_ring_uses_the_rails_to_each_neighbour():
    """Three nodes, a cable between each two: no network holds all of them, and the addresses are on the LAN."""

    def ring(records):
        edges = {0: ("01", "02"), 1: ("01", "12"), 2: ("02", "12")}
        for rank, record in enumerate(records):
            record["address"] = f"192.168.1.{60 + rank}"
            for entry in record["probe"]["addresses"]:
                for name, edge in zip(("enp1s0f1np1", "enP2p1s0f1np1"), edges[rank], strict=True):
                    if entry["interface"] == name:
                        entry["address"] = f"10.0.{int(edge)}.{rank + 1}"
            for device, edge in zip((FIRST, SECOND), edges[rank], strict=True):
                give(records, rank, device, f"10.0.{int(edge)}.{rank + 1}", 3)

    def three(records):
        del records[3]
        ring(records)

    found = fabrics("good_tp4", three)
    assert [fabric.interface for fabric in found] == ["enP7s7"] * 3
    assert [[rail.network for rail in fabric.rails] for fabric in found] == [
        ["10.0.1.0/24", "10.0.2.0/24"], ["10.0.1.0/24", "10.0.12.0/24"], ["10.0.2.0/24", "10.0.12.0/24"]
    ]  # fmt: skip
    assert found[0].notes == (f"192.168.1.60 is on enP7s7, the data goes over {FIRST}, {SECOND}",)


# GID entries


@pytest.mark.parametrize("gid, address", [
    ("0000:0000:0000:0000:0000:ffff:c0a8:640a", "192.168.100.10"),
    ("::ffff:10.0.0.1", "10.0.0.1"),
    ("fe80:0000:0000:0000:4ebb:47ff:fe00:0001", ""),
    ("0000:0000:0000:0000:0000:0000:0000:0000", ""),
    ("nonsense", ""),
])  # fmt: skip
def test_address_of_a_gid(gid, address):
    assert address_of_gid(gid) == address


def test_first_version_of_roce_does_not_count():
    def only_v1(records):
        give(records, 0, FIRST, "192.168.100.10", 3, "IB/RoCE v1")

    assert fabrics(change=only_v1)[0].rails[0].found_index is None


def test_table_of_an_old_address_does_not_count():
    assert [rail.found_index for rail in fabrics("bad_fabric")[1].rails] == [None]


def test_unequal_rails_leave_the_index_open_and_give_the_range():
    fabric = fabrics(change=lambda records: give(records, 1, SECOND, "192.168.101.11", 7))[1]
    assert fabric.gid_index is None
    assert fabric.has_unequal_rails
    assert fabric.address_range == "192.168.100.0/23"
    assert fabric.notes == (
        f"the GID index differs by rail ({FIRST} 5, {SECOND} 7) and a process has one: it is left unset, NCCL finds it",
    )


@pytest.mark.parametrize("addresses, network", [
    ([], ""),
    (["10.0.0.1"], "10.0.0.1/32"),
    (["10.0.0.1", "10.0.0.2"], "10.0.0.0/30"),
    (["10.0.0.1", "192.168.0.1"], "0.0.0.0/0"),
])  # fmt: skip
def test_covering_range(addresses, network):
    assert covering_range(addresses) == network


# Settings overrule


def test_settings_overrule_what_is_found():
    found = fabrics(WORKER_CX7_IF="enP7s7", WORKER_CX7_IB=f"{SECOND}", WORKER_GID=9)
    assert (found[1].interface, found[1].hcas, found[1].gid_index) == ("enP7s7", (SECOND,), 9)
    assert (found[1].set_by, found[1].set_index) == ("WORKER_GID", 9)
    assert found[1].rails[0].found_index == 5
    assert (found[0].interface, found[0].gid_index) == ("enp1s0f1np1", 3)


def test_node_s_own_index_wins_over_the_one_for_all():
    found = fabrics(NCCL_IB_GID_INDEX=1, WORKER_GID=2)
    assert [(fabric.gid_index, fabric.set_by) for fabric in found] == [(1, "NCCL_IB_GID_INDEX"), (2, "WORKER_GID")]


def test_index_zero_is_an_index():
    assert fabrics(HEAD_GID=0)[0].gid_index == 0


def test_device_with_a_port_is_found_by_its_name():
    found = fabrics(HEAD_CX7_IB=f"{FIRST}:1")[0]
    assert (found.hcas, found.gid_index) == ((f"{FIRST}:1",), 3)


def test_device_that_is_not_there_stays_in_the_list():
    found = fabrics(HEAD_CX7_IB=f"{FIRST},mlx5_7")[0]
    assert found.hcas == (FIRST, "mlx5_7")
    assert found.rails[1].port is None
    assert found.gid_index is None


# From start to start


def test_nothing_changed_is_nothing_said():
    found = fabrics()
    assert discovery.changes(found, {"fabrics": discovery.record_of(found)}) == []
    assert discovery.changes(found, None) == discovery.changes(found, {}) == []


def test_changes_are_said_in_a_line_each():
    previous = {"fabrics": discovery.record_of(fabrics())}
    now = fabrics(change=lambda records: (give(records, 1, FIRST, "192.168.100.11", 4),
                                          interface(records, 1, SECOND).update(state="DOWN")))  # fmt: skip
    assert discovery.changes(now, previous) == [
        (0, f"{SECOND}: GID index none, 3 at the last start"),
        (1, f"{SECOND}: GID index none, 5 at the last start"),
        (1, f"{FIRST}: GID index 4, 5 at the last start"),
    ]
    moved = {"fabrics": {"0": {"interface": "eth9", "gids": previous["fabrics"]["0"]["gids"]}}}
    assert discovery.changes(fabrics(), moved) == [(0, "interface enp1s0f1np1, eth9 at the last start")]
