"""Fills one image's folder of compiled kernels on this node, and gives the other nodes the same folder, whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from launcher import console, facts, images, preflight, remote, watch
from launcher.cluster_state import files_of
from launcher.commands import CACHES, INSIDE, SHARED_ENVIRONMENT, Found, Place, comma_separated, gpu_words
from launcher.errors import Exit, LauncherError
from launcher.remote import Node

# What a container writes belongs to root on the host, so that containers read and write these folders, too.
PLAIN_RUN = ("docker", "run", "--rm", "--pull", "never", "--network", "none")
CACHES_INSIDE = "/caches"
MARK = ".complete"

# The mark comes last, so that what was cut off lacks it.
READ = f"touch /tmp/{MARK} && exec tar -cf - -C {INSIDE['cache']} . -C /tmp {MARK}"
# $1 the folder's name. Nothing takes the old one's place before all of the new one is there.
WRITE = f"""\
set -eu
cd {CACHES_INSIDE}
rm -rf -- "$1.partial" "$1.old"
mkdir -- "$1.partial"
tar -xf - -C "$1.partial"
[ -e "$1.partial/{MARK}" ] || {{ echo "it was cut off" >&2; exit 1; }}
[ ! -e "$1" ] || mv -T -- "$1" "$1.old"
mv -T -- "$1.partial" "$1"
rm -rf -- "$1.old"
"""


# Commands. Pure.


def mount(source: str, target: str, *, writable: bool) -> list[str]:
    fields = ["type=bind", f"source={source}", f"target={target}"]
    return ["--mount", comma_separated(fields if writable else [*fields, "readonly"])]


def warm_command(place: Place) -> list[str]:
    named = {name: f"{INSIDE['cache']}/{folder}" for name, folder in CACHES.items()}
    named["CUDA_CACHE_MAXSIZE"] = SHARED_ENVIRONMENT["CUDA_CACHE_MAXSIZE"]
    words = [word for name, value in sorted(named.items()) for word in ("--env", f"{name}={value}")]
    cache = mount(place.outside("cache"), INSIDE["cache"], writable=True)
    image = str(place.config["IMAGE"])
    return [*PLAIN_RUN, *gpu_words(place), *cache, *words, "--entrypoint", "python3", image, "-m", "vllm_exl3.warm_up"]


def read_command(place: Place) -> list[str]:
    cache = mount(place.outside("cache"), INSIDE["cache"], writable=False)
    return [*PLAIN_RUN, *cache, "--entrypoint", "sh", str(place.config["IMAGE"]), "-c", READ]


def write_command(place: Place) -> list[str]:
    folder, _, name = place.outside("cache").rpartition("/")
    caches = mount(folder, CACHES_INSIDE, writable=True)
    image = str(place.config["IMAGE"])
    return [*PLAIN_RUN, "--interactive", *caches, "--entrypoint", "sh", image, "-c", WRITE, "sh", name]


# Doing it


def warm(config) -> Exit:
    files = files_of(config)
    with files.lock():
        state = files.read_state()
        if state and any((watch.state_of(unit) or {}).get("Running") for unit in state.units):
            raise LauncherError(
                f"image warm: {config.topology.name} runs and uses these caches; `{console.program()} stop` first.",
                Exit.BUSY,
            )
        places = places_of(config)
        nodes = remote.nodes_of(config)
        for node, place in zip(nodes, places, strict=True):
            must(node, ["mkdir", "-p", "--", place.outside("cache")], "its cache folder could not be made")
        console.say(f"Compiling into {places[0].outside('cache')}; the first time takes minutes.")
        code = images.show(warm_command(places[0]))
        send_to_others(nodes, places)
    if code:
        raise LauncherError(
            "image warm: not everything could be compiled, see above. What was is on every node; a start compiles the "
            "rest by itself, or fails saying why.",
            Exit.SETUP,
        )
    console.say("The caches are the same on every node.")
    return Exit.OK


def places_of(config) -> list[Place]:
    """Where each node's folder for the image is. Raises unless all nodes have the same image: that is its name."""
    nodes = remote.nodes_of(config)
    found = facts.gather(nodes, preflight.request(config))
    first = found[0].image
    for node in found:
        trouble = node.unreached or node.unprobed or node.errors.get("image", "") or node.errors.get("host", "")
        if trouble or node.host is None or not (node.image and first and node.image.is_same_as(first)):
            raise LauncherError(
                f"image warm: node {node.rank} ({node.address}): {trouble or 'the image is missing or another one'}; "
                f"`{console.program()} image status` tells more.",
                Exit.SETUP,
            )
    # Only the first node compiles; the others are sent what it made.
    way = preflight.way_of(found[0], str(config["IMAGE"]))
    return [Place(config, node.rank, Found(node.host.home, first.id, gpu_way=way)) for node in found]


def send_to_others(nodes: Sequence[Node], places: Sequence[Place]) -> None:
    def send(node: Node, moved: Callable[[int], bool]) -> None:
        result = remote.pipe(read_command(places[0]), node, write_command(places[node.rank]), moved)
        if not result.ok:
            raise images.failure(node, f"the caches did not arrive, and what was there is as before: {result.message}")

    images.Sending("caches", nodes[1:], 0, send).run()


def must(node: Node, argv: Sequence[str], what: str) -> None:
    result = remote.run(node, argv)
    if not result.ok:
        raise images.failure(node, f"{what}: {result.message}")
