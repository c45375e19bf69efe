"""The image of the containers: build it here, or fetch or choose one, and give every node the same."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from launcher import console, facts, framing, preflight, recipe, remote
from launcher.cluster_state import files_of
from launcher.commands import REPOSITORY
from launcher.content_checks import MACHINES, drift_of
from launcher.errors import Exit, LauncherError
from launcher.facts import Image, NodeFacts
from launcher.findings import GIB
from launcher.remote import Node

POLL_S = 0.2
INSPECT_TIMEOUT_S = 60
# Older releases cannot save one platform of several, and never have more than one.
SAVES_ONE_PLATFORM = 28
LABELS = {"vLLM": "exl3.vllm", "FlashInfer": "exl3.flashinfer", "Ray": "exl3.ray", "exllamav3": "exl3.exllamav3",
          "GPU": "exl3.architectures"}  # fmt: skip
BASE_NAME, BASE_DIGEST = "org.opencontainers.image.base.name", "org.opencontainers.image.base.digest"


@dataclass(frozen=True)
class Options:
    """Of `image build`."""

    base: str = ""  # empty: the Dockerfile's own
    offline: bool = False
    skip_exllamav3: bool = False
    jobs: int | None = None


# Commands. Pure.


def previous_name(image: str) -> str:
    """Where the image goes that another one takes the place of."""
    return f"{image}-previous"


def default_base(dockerfile: str) -> str:
    return re.search(r"^ARG BASE=(\S+)", dockerfile, re.MULTILINE)[1]


def build_command(options: Options, base: str, base_digest: str, digest: str, platform: str, id_file: str) -> list[str]:
    """`docker build` in the checkout. `platform` is arm64 or amd64."""
    arguments = {"BASE": base, "BASE_DIGEST": base_digest, "RECIPE": digest}
    arguments |= {"OFFLINE": "1"} if options.offline else {}
    arguments |= {"EXLLAMAV3": "skip"} if options.skip_exllamav3 else {}
    arguments |= {"JOBS": str(options.jobs)} if options.jobs else {}
    words = [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
    network = ["--network", "none"] if options.offline else []
    command = ["docker", "build", "--platform", f"linux/{platform}", "--iidfile", id_file]
    return [*command, *network, *words, str(REPOSITORY)]


def save_command(image: str, platform: str, docker_version: str) -> list[str]:
    release = re.match(r"\d+", docker_version)
    one = ["--platform", f"linux/{platform}"] if release and int(release[0]) >= SAVES_ONE_PLATFORM else []
    return ["docker", "save", *one, image]


def digest_of(image: Image) -> str:
    """By which a registry knows the image; its id where it comes from none."""
    return image.digests[0].partition("@")[2] if image.digests else image.id


# Docker on one node


def inspect(node: Node, name: str) -> Image | None:
    """None where the node has no such image; raises where Docker does not answer."""
    command = ["docker", "image", "inspect", "--format", "{{json .}}", name]
    result = remote.run(node, command, timeout_s=INSPECT_TIMEOUT_S)
    if not result.ok:
        if "no such image" in result.message.lower():
            return None
        raise failure(node, f"`docker image inspect {name}` failed: {result.message}")
    found = framing.object_with("Id", result.stdout)
    if found is None:
        raise failure(node, f"`docker image inspect {name}` gave no object with an id")
    layers = tuple((found.get("RootFS") or {}).get("Layers") or ())
    labels = (found.get("Config") or {}).get("Labels") or {}
    digests = tuple(found.get("RepoDigests") or ())
    return Image(name, found["Id"], digests, layers, found.get("Architecture") or "", labels, found.get("Size") or 0)


def tag(node: Node, source: str, target: str) -> None:
    result = remote.run(node, ["docker", "tag", source, target], timeout_s=INSPECT_TIMEOUT_S)
    if not result.ok:
        raise failure(node, f"{source} could not be tagged {target}: {result.message}")


def failure(node: Node, what: str) -> LauncherError:
    return LauncherError(f"image: node {node.rank} ({node.address}): {what}.", Exit.SETUP)


def make_current(node: Node, new: Image, name: str) -> None:
    """Gives an image of the node the name that containers are started with; the one that had it stays as previous."""
    old = inspect(node, name)
    if old and not old.is_same_as(new):
        tag(node, old.id, previous_name(name))
    if old is None or old.id != new.id:
        tag(node, new.id, name)


def show(command: Sequence[str]) -> int:
    """Runs a command of this machine that shows its own progress."""
    return subprocess.run(command, env={**os.environ, "DOCKER_BUILDKIT": "1"}).returncode


# build, pull, use


def build(config, options: Options) -> Exit:
    here = remote.nodes_of(config)[0]
    refuse_digest(config)
    platform = MACHINES.get(os.uname().machine, os.uname().machine)
    name = options.base or default_base((REPOSITORY / "Dockerfile").read_text())
    base = base_image(here, name, platform, offline=options.offline)
    console.say(f"Building on {name}, {digest_of(base)}, from recipe {recipe.digest()[:12]}.")
    with tempfile.TemporaryDirectory() as folder:
        id_file = Path(folder) / "id"
        command = build_command(options, name, digest_of(base), recipe.digest(), platform, str(id_file))
        if code := show(command):
            raise LauncherError(
                f"image: the build ended with {code}; its last lines, above, name the reason. Nothing was replaced.",
                Exit.SETUP,
            )
        made = inspect(here, id_file.read_text().strip())
    return switch(config, made)


def base_image(here: Node, name: str, platform: str, *, offline: bool) -> Image:
    base = inspect(here, name)
    if base is None and not offline and show(["docker", "pull", "--platform", f"linux/{platform}", name]) == 0:
        base = inspect(here, name)
    if base is None:
        raise LauncherError(
            f"image: the base {name} is not on this machine"
            + (" and --offline fetches nothing; " if offline else " and could not be pulled, see above; ")
            + "bring it with `docker save` and `docker load`, or name another with --base.",
            Exit.SETUP,
        )
    return base


def pull(config, name: str) -> Exit:
    """Fetches an image that somebody has built, by default the one that IMAGE names, and makes it the current one."""
    here, name = remote.nodes_of(config)[0], name or str(config["IMAGE"])
    platform = MACHINES.get(os.uname().machine, os.uname().machine)
    if show(["docker", "pull", "--platform", f"linux/{platform}", name]):
        raise LauncherError(f"image: {name} could not be pulled, see above. Nothing was replaced.", Exit.SETUP)
    return switch(config, inspect(here, name))


def use(config, name: str) -> Exit:
    """Makes an image of this machine the current one: the previous one, or one that was loaded from a file."""
    found = inspect(remote.nodes_of(config)[0], name)
    if found is None:
        raise LauncherError(f"image: {name} is not on this machine; `docker images` lists what is.", Exit.USAGE)
    return switch(config, found)


def switch(config, new: Image) -> Exit:
    """What runs keeps its image until it is restarted."""
    refuse_digest(config)
    name = str(config["IMAGE"])
    with files_of(config).lock():
        make_current(remote.nodes_of(config)[0], new, name)
        copy_to_others(config)
    console.say(
        f"{name} is {new.id[:19]} on every node; `{console.program()} restart` runs it. {previous_name(name)} is what "
        f"it was before."
    )
    return Exit.OK


def refuse_digest(config) -> None:
    if "@" in str(config["IMAGE"]):
        raise LauncherError(
            f"image: IMAGE={config['IMAGE']} is a digest, which can be pulled and not given to another image; set "
            f"IMAGE to a name with a tag.",
            Exit.USAGE,
        )


# Copying


def copy(config) -> Exit:
    with files_of(config).lock():
        if not copy_to_others(config):
            console.say(f"{config['IMAGE']} is the same on every node.")
    return Exit.OK


def copy_to_others(config) -> list[int]:
    """Sends node 0's image wherever it is missing or another one; returns the ranks. All at once, all or an error."""
    nodes, name = remote.nodes_of(config), str(config["IMAGE"])
    refuse_digest(config)
    image = inspect(nodes[0], name)
    if image is None:
        raise LauncherError(
            f"image: {name} is not on this machine; `{console.program()} image build` makes it.", Exit.SETUP
        )
    found = remote.on_all(nodes[1:], lambda node: inspect(node, name))
    targets = [node for node, there in zip(nodes[1:], found, strict=True) if not (there and there.is_same_as(image))]
    if targets:
        version = remote.run(nodes[0], ["docker", "version", "--format", "{{.Client.Version}}"]).stdout.decode().strip()
        save = save_command(name, image.architecture, version)
        Sending("image", targets, image.size_bytes, lambda node, moved: send(image, save, node, moved)).run()
    return [node.rank for node in targets]


def send(image: Image, save: Sequence[str], node: Node, moved: Callable[[int], bool]) -> None:
    """Nothing is sent where the node has the image under another name."""
    for other in (image.id, previous_name(image.name)):
        there = inspect(node, other)
        if there and there.is_same_as(image):
            make_current(node, there, image.name)
            return
    if old := inspect(node, image.name):
        tag(node, old.id, previous_name(image.name))
    result = remote.pipe(save, node, ["docker", "load"], moved)
    if not result.ok:
        raise failure(node, f"the image did not arrive: {result.message}")
    arrived = inspect(node, image.name)
    if arrived is None or not arrived.is_same_as(image):
        raise failure(node, f"what arrived as {image.name} has other layers than node 0's; remove it there, try again")


class Sending:
    """Something on its way to several nodes at once. `send(node, moved)` tells `moved` the bytes of each piece."""

    def __init__(self, what: str, targets: Sequence[Node], total_bytes: int, send: Callable) -> None:
        self.what, self.targets, self.total_bytes, self.send = what, targets, total_bytes, send
        self.moved = {node.rank: 0 for node in targets}
        self.over = threading.Event()

    def run(self) -> None:
        """Every node comes to its end, also when another one fails; then the first failure is raised."""
        began = time.monotonic()
        with console.phase(self.what) as progress, ThreadPoolExecutor(len(self.targets)) as pool:
            waiting = [pool.submit(self.send, node, partial(self.count, node)) for node in self.targets]
            try:
                while not all(one.done() for one in waiting):
                    progress.tick(self.detail(time.monotonic() - began))
                    time.sleep(POLL_S)
            except BaseException:
                self.over.set()
                raise
            for one in waiting:
                one.result()

    def detail(self, seconds: float) -> str:
        total = f" of about {self.total_bytes / GIB:.1f}" if self.total_bytes else ""
        return ", ".join(f"node {rank}: {moved / GIB:.1f}{total} GiB, {moved / GIB / max(seconds, 1):.2f} GiB/s"
                         for rank, moved in self.moved.items())  # fmt: skip

    def count(self, node: Node, count: int) -> bool:
        self.moved[node.rank] += count
        return not self.over.is_set()


def behind(context) -> list[int]:
    """Ranks whose image can be made right by copying node 0's."""
    config, first = context.config, context.facts[0].image
    if config["RUNTIME"] != "docker" or first is None or "image" in config["SKIP_CHECKS"] or "@" in first.name:
        return []
    others = [node for node in context.facts[1:] if node.looked_at and "image" not in node.errors]
    return [node.rank for node in others if node.image is None or not node.image.is_same_as(first)]


# Status


def status(config) -> Exit:
    nodes, name = remote.nodes_of(config), str(config["IMAGE"])
    found = facts.gather(nodes, preflight.request(config))
    rows = [("image", name), *node_rows(found)]
    first = found[0].image
    drift = drift_of(first, recipe.digest()) if first else ""
    if first:
        rows += image_rows(first, drift)
        previous = inspect(nodes[0], previous_name(name))
        rows.append(("previous", f"{previous.name} is {previous.id[:19]}" if previous else "none"))
    print("\n".join(f"{label + ':':<12}{text}" for label, text in rows))
    same = all(node.image and first and node.image.is_same_as(first) for node in found)
    return Exit.OK if same and not drift else Exit.REFUSED


def node_rows(found: Sequence[NodeFacts]) -> list[tuple[str, str]]:
    first = found[0].image
    rows = []
    for node in found:
        trouble = node.unreached or node.unprobed or node.errors.get("image", "")
        if trouble:
            text = trouble
        elif node.image is None:
            text = f"missing; `{console.program()} image {'copy' if node.rank and first else 'build'}`"
        elif first is None or node.image.is_same_as(first):
            text = f"{node.image.id[:19]}, {len(node.image.layers)} layers, {node.image.architecture}"
        else:
            text = f"{node.image.id[:19]}, another one than node 0's; `{console.program()} image copy`"
        rows.append((f"node {node.rank}", text))
    return rows


def image_rows(image: Image, drift: str) -> list[tuple[str, str]]:
    labels: Mapping[str, str] = image.labels
    holds = ", ".join(f"{what} {labels[label]}" for what, label in LABELS.items() if labels.get(label))
    sources = f"{drift}; `{console.program()} image build`" if drift else "this checkout"
    base = f"{labels.get(BASE_NAME, 'not told')} {labels.get(BASE_DIGEST, '')}".strip()
    return [("built from", sources), ("base", base), ("holds", holds or "not told")]
