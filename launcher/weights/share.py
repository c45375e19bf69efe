"""Lets the other nodes read the first one's weights over NFS instead of holding copies; prints what it would do.

Everything here needs root, so nothing is done unless asked for in so many words. What is mounted is read-only, for the
fabric's addresses only, and in no table: after a reboot of a node it is mounted again by the same command.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher import console, remote
from launcher.errors import Exit, LauncherError
from launcher.remote import Node
from launcher.weights.agent import Agent, label
from launcher.weights.record import FileStat
from launcher.weights.sync import Source, folders_of, source_of

EXPORTS = Path("/etc/exports.d")
MOUNT_OPTIONS = "ro,vers=4.2,noatime,nosuid,nodev,noexec"
TIMEOUT_S = 300


@dataclass(frozen=True)
class Command:
    """What root runs on a node."""

    node: Node
    argv: tuple[str, ...]
    stdin: str = ""

    def __str__(self) -> str:
        typed = f"sudo {remote.quoted(self.argv).decode('utf-8', 'surrogateescape')}"
        return f"printf '%s' {remote.quoted([self.stdin]).decode()} | {typed}" if self.stdin else typed


@dataclass(frozen=True)
class Place:
    """A folder of a node as it is before: where, what is mounted there, how many files a mount would hide."""

    node: Node
    source: Source
    folder: str
    mounted: str  # HOST:/FOLDER when something is mounted right there, else empty
    entries: int
    has_nfs: bool
    user_id: int

    def wanted(self, head: Node) -> str:
        return f"{head.address}:{self.source.folder.resolve()}"


# What root does, in order


def commands(head: Node, places: Sequence[Place], topology: str, has_exportfs: bool) -> list[Command]:
    """Empty where everything is mounted already. Raises LauncherError where a mount would hide something."""
    left = [place for place in places if place.mounted != place.wanted(head)]
    for place in left:
        refuse_hiding(place)
    if not left:
        return []
    found = [] if has_exportfs else [Command(head, ("apt-get", "install", "--yes", "nfs-kernel-server"))]
    found += [
        Command(head, ("mkdir", "-p", str(EXPORTS))),
        Command(head, ("tee", str(exports_file(topology))), exports(places)),
        Command(head, ("exportfs", "-ra")),
    ]
    installed: set[int] = set()
    for place in left:
        if not place.has_nfs and place.node.rank not in installed:
            installed.add(place.node.rank)
            found.append(Command(place.node, ("apt-get", "install", "--yes", "nfs-common")))
        found.append(Command(place.node, ("mkdir", "-p", place.folder)))
        found.append(Command(place.node, ("mount", "-t", "nfs", "-o", MOUNT_OPTIONS, place.wanted(head),
                                          place.folder)))  # fmt: skip
    return found


def refuse_hiding(place: Place) -> None:
    where = f"{label(place.node)}: {place.folder}"
    if place.mounted:
        raise LauncherError(f"{where} is a mount of {place.mounted} already; umount it, or set {place.source.setting}.")
    if place.entries:
        raise LauncherError(
            f"{where} holds {place.entries} files that a mount would hide; move them away to share, or keep the copy "
            f"(`{console.program()} sync`)."
        )


def undo(head: Node, places: Sequence[Place], topology: str) -> list[Command]:
    """Only what this program's own mounts and file are."""
    found = [Command(place.node, ("umount", place.folder)) for place in places if place.mounted == place.wanted(head)]
    if exports_file(topology).exists():
        found += [Command(head, ("rm", str(exports_file(topology)))), Command(head, ("exportfs", "-ra"))]
    return found


def exports_file(topology: str) -> Path:
    return EXPORTS / f"glm53-exl3-{topology}.exports"


def exports(places: Sequence[Place]) -> str:
    """Read-only, to each node's fabric address, and read as the owner of the files, whoever asks."""
    clients: dict[Path, list[str]] = {}
    for place in places:
        clients.setdefault(place.source.folder.resolve(), []).append(place.node.address)
    lines = []
    for folder, addresses in clients.items():
        owner = folder.stat()
        options = f"ro,all_squash,anonuid={owner.st_uid},anongid={owner.st_gid},no_subtree_check"
        lines.append(f'"{folder}" ' + " ".join(f"{address}({options})" for address in addresses))
    return "\n".join(lines) + "\n"


# Looking and doing


def share(config, *, do: bool, take_back: bool) -> Exit:
    nodes = remote.nodes_of(config)
    sources = [source_of(setting, folder) for setting, folder in folders_of(config).items()]
    places = [place for source in sources
              for place in remote.on_all(nodes[1:], lambda node: look(node, source, str(config[source.setting])))]  # noqa: B023 # fmt: skip
    if take_back:
        wanted = undo(nodes[0], places, config.topology.name)
    else:
        has_exportfs = bool(shutil.which("exportfs", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"))
        wanted = commands(nodes[0], places, config.topology.name, has_exportfs)
    if wanted and not do:
        print("\n".join(described(wanted, take_back)))
        return Exit.OK
    users = {0: os.getuid(), **{place.node.rank: place.user_id for place in places}}
    for command in wanted:
        run(command, users)
    if take_back:
        print("Nothing is shared any more." if wanted else "Nothing was shared.")
        return Exit.OK
    for place in places:
        refuse_other_bytes(place, str(config[place.source.setting]))
        print(f"{label(place.node)}: {place.folder} is {place.wanted(nodes[0])}, read-only; nothing has to be copied.")
    print(f"It lasts until a reboot of these nodes. Back: {console.program()} share --undo --yes")
    return Exit.OK


def look(node: Node, source: Source, target: str) -> Place:
    with Agent(node, target) as agent:
        seen = agent.ask("place")
    mounted = seen["mount"][1] if seen["is_mounted"] else ""
    return Place(node, source, seen["folder"], mounted, seen["entries"], seen["has_nfs"], seen["user_id"])


def described(wanted: Sequence[Command], take_back: bool) -> Iterator[str]:
    flag = " --undo" if take_back else ""
    yield "Nothing was changed. Root has to do this, in this order:"
    where = None
    for command in wanted:
        if command.node != where:
            where = command.node
            yield f"\n  on {label(where)}"
        yield f"    {command}"
    yield f"\n`{console.program()} share{flag} --yes` does exactly this, where sudo asks for no password."
    if not take_back:
        yield f"The way back: `{console.program()} share --undo`. A reboot of the other nodes undoes the mounts, too."


def run(command: Command, users: Mapping[int, int]) -> None:
    sudo = () if users[command.node.rank] == 0 else ("sudo", "-n")
    console.say(f"{label(command.node)}: {command}")
    result = remote.run(command.node, [*sudo, *command.argv], stdin=command.stdin.encode(), timeout_s=TIMEOUT_S)
    if not result.ok:
        raise LauncherError(
            f"{label(command.node)}: `{command}` failed ({result.message}); type the commands that "
            f"`{console.program()} share` prints, and see what they say. What ran before stays; share --undo ends it.",
            Exit.SETUP,
        )


def refuse_other_bytes(place: Place, target: str) -> None:
    """What the node reads is what was verified here: the same inodes and times."""
    names = list(place.source.manifest.by_name())
    with Agent(place.node, target) as agent:
        seen = agent.look(names)
    for name in names:
        if seen.stats[name] != FileStat.of(place.source.folder / name):
            raise LauncherError(
                f"{label(place.node)}: {place.folder}/{name} is not the file of node 0; see what is mounted there "
                f"(`findmnt {place.folder}`).",
                Exit.SETUP,
            )
