"""Recorded clusters of data/facts for tests of discovery and checks: read, changed in places, put into a context."""

from __future__ import annotations

import copy
import json
from pathlib import Path

from cluster_settings import NODES, settings

from launcher import facts, preflight, remote
from launcher.weights.contents import Contents, Share

# What the headers of the full-size checkpoint say (test_weights_headers.py), in round numbers.
GIB = 1 << 30
CONTENTS = Contents(
    {4: 37_152}, {"mcg": 37_152}, tuple(range(3, 46)), 0,
    {Share("main", 16, 288): 142 * GIB, Share("main", 64): 14 * GIB, Share("main", 1): 2 * GIB,
     Share("mtp", 16, 288): 4 * GIB, Share("vision", 1): GIB}, True, 86,
)  # fmt: skip
FOLDER = Path(__file__).with_name("data") / "facts"


def records(name: str) -> list[dict]:
    return copy.deepcopy(json.loads((FOLDER / f"{name}.json").read_text())["nodes"])


def settings_for(count: int, **changes):
    """Settings with the addresses that the recorded nodes have."""
    own = {f"{NODES[rank]}_IP": f"192.168.100.{10 + rank}" for rank in range(count)}
    return settings(f"tp{count}", **{**own, "CACHE_DIR": "~/.cache/glm53-exl3", **changes})


def context(name: str, change=None, previous=None, units=(), contents=CONTENTS, **changes) -> preflight.Context:
    """`change` is called with the records before they are read."""
    found = records(name)
    if change:
        change(found)
    if "native" in name:
        changes = {"RUNTIME": "native", "SPEC_METHOD": "none", **changes}
        contents = None
    config = settings_for(len(found), **changes)
    nodes = remote.nodes_of(config)
    return preflight.context(config, nodes, [facts.from_record(one) for one in found], previous, units, contents)


def interface(records: list[dict], rank: int, device: str) -> dict:
    """The RDMA port of a device, to be changed."""
    return next(port for port in records[rank]["probe"]["rdma"] if port["device"] == device)


def give(records: list[dict], rank: int, device: str, address: str, index: int, kind: str = "RoCE v2") -> None:
    """Gives a device the GID entry of an address at an index."""
    port = interface(records, rank, device)
    first, second = (bytes(map(int, address.split("."))).hex()[i : i + 4] for i in (0, 4))
    gid = f"0000:0000:0000:0000:0000:ffff:{first}:{second}"
    port["gids"] = [entry for entry in port["gids"] if entry["gid"] != gid and entry["index"] != index]
    port["gids"].append({"index": index, "gid": gid, "type": kind, "interface": port["interface"]})
