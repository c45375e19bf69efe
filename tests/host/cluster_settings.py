"""Settings and links of made-up clusters for the tests of commands and plans."""

from __future__ import annotations

from launcher import cluster_plan as plans
from launcher import config as configs
from launcher.discovery import Fabric
from launcher.topology import TOPOLOGIES

SECRET = "sk-do-not-show"
TOKEN = "0123456789abcdef" * 4
ADMIN = "fedcba9876543210" * 4
HOMES = ("/home/spark",) * 4
IMAGE_ID = "sha256:" + "0a1b2c3d" * 8

GPU_WAYS = ("gpus", "cdi", "runtime", "gpus")  # nodes of one cluster may differ

NODES = ("HEAD", "WORKER", "WORKER2", "WORKER3")


def settings(topology: str = "tp2", **changes: object):
    """What a user's file of only the needed settings gives, with `changes` written into it."""
    chosen = TOPOLOGIES[topology]
    values = {f"{node}_IP": f"10.10.0.{rank + 1}" for rank, node in enumerate(NODES[: chosen.nodes])}
    values |= {"MODEL_DIR": "/data/glm", "DRAFT_DIR": "/data/draft", "RUN_DIR": "/srv/run", "CACHE_DIR": "/srv/cache",
               "REMOTE_DIR": "/srv/exl3"}  # fmt: skip
    values |= changes
    if values.get("RUNTIME") == "native":
        values.setdefault("NATIVE_PYTHON", "/opt/env/bin/python")
    text = "".join(f"{name}={quoted(value)}\n" for name, value in values.items())
    return configs.load(chosen, text, chosen.env_file, {})


def quoted(value: object) -> str:
    text = str(int(value)) if isinstance(value, bool) else str(value)
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def fabrics(count: int, gids: tuple[int | None, ...] = (3, 5, 3, 3)) -> list[Fabric]:
    """Every node names its links in its own way and has its own GID index."""
    return [
        Fabric(f"enp{rank}s0", (f"roce{rank}a", f"roce{rank}b"), gids[rank], address_range="10.10.0.0/23")
        for rank in range(count)
    ]


# Plans that are kept as reviewed texts: name -> (settings, whether the nodes have been asked).
CASES = {
    "tp2-ray-docker": (lambda: settings(VLLM_API_KEY=SECRET), False),
    "tp2-mp-docker": (lambda: settings(EXECUTOR="mp", SPEC_METHOD="none", MLA_GEOMETRY="compact"), True),
    "tp2-ray-native": (lambda: settings(RUNTIME="native", REMOTE_DIR="~/.glm53-exl3"), True),
    "tp4-ray-docker": (lambda: settings("tp4", EXTRA_ARGS="--seed 7 --chat-template '/data/my template.jinja'"), True),
    "tp3": (lambda: settings("tp3"), False),
}


def plan_of(config, is_found=True):
    count = config.topology.nodes
    if not is_found:
        return plans.make(config)
    return plans.make(
        config, fabrics(count), homes=HOMES[:count], image_id=IMAGE_ID, ray_token=TOKEN, admin_token=ADMIN,
        gpu_ways=GPU_WAYS[:count] if config["RUNTIME"] == "docker" else (),
    )  # fmt: skip
