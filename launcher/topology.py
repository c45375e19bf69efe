"""The clusters that can be served: how many nodes, which file, and the defaults that differ from the table's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True)
class Topology:
    name: str
    nodes: int
    env_file: str
    script: str
    defaults: Mapping[str, object] = field(default_factory=dict)
    refusal: str = ""  # with which `start` is refused; plan and checks work all the same

    @property
    def example(self) -> str:
        return f"{self.env_file}.example"


TOPOLOGIES: Mapping[str, Topology] = MappingProxyType({
    topology.name: topology
    for topology in (
        Topology("tp2", 2, ".env", "start.sh"),
        Topology(
            "tp3", 3, ".env.tp3", "start-tp3.sh",
            MappingProxyType({
                "EXPERT_PARALLEL": True,
                "GPU_MEM_UTIL": 0.8,
                "KV_CACHE_GIB": 32.0,
                "MAX_MODEL_LEN": 1_048_576,
            }),
            "start-tp3.sh cannot start yet: 64 attention heads do not divide by 3, and the plugin's padding for three "
            "nodes is not there; `plan` and `check` work, ./start.sh serves on two nodes and ./start-tp4.sh on four.",
        ),
        Topology(
            "tp4", 4, ".env.tp4", "start-tp4.sh",
            MappingProxyType({"GPU_MEM_UTIL": 0.75, "KV_CACHE_GIB": 32.0, "MAX_MODEL_LEN": 1_048_576}),
        ),
    )
})  # fmt: skip
