"""Several hosts on one machine: each with its own network, processes, files, name, sshd and RDMA devices.

A host is a process in new network, mount, process, name and IPC namespaces. Ending that process ends everything on
the host, and with the host its interfaces and mounts; it ends by itself when the process that made it does. So
nothing is left over, whatever becomes of the tests. Needs root and Debian's iproute2, openssh-server and
openssh-client. Addresses: 10.77.0.1, .2, ... on the fabric and 10.78.0.1, .2, ... on the LAN; no way leads out.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
SSH_TIMEOUT_S = 10
# As sshd reads them, whatever the environment says.
USER, HOME = pwd.getpwuid(os.geteuid()).pw_name, Path(pwd.getpwuid(os.geteuid()).pw_dir)


@dataclass(frozen=True)
class Link:
    """An interface that every host has, and the network that joins them."""

    interface: str
    network: str  # the first three bytes of its addresses
    mtu: int


# As a Spark calls them. The way to elsewhere leads over the LAN, so who asks for "my address" gets that one.
FABRIC = Link("enp1s0f0np0", "10.77.0", 9000)
LAN = Link("enP7s7", "10.78.0", 1500)


@dataclass(frozen=True)
class Rdma:
    """One RDMA device as /sys/class/infiniband shows it. GIDs: index -> (address or raw GID, type)."""

    name: str
    interface: str
    gids: Mapping[int, tuple[str, str]]
    state: str = "4: ACTIVE"
    rate: str = "200 Gb/sec (4X HDR)"
    gid_count: int = 16

    def files(self) -> dict[str, str]:
        port = f"{self.name}/ports/1"
        files = {
            f"{self.name}/device/net/{self.interface}/dev_port": "0\n",
            f"{self.name}/node_type": "1: CA\n",
            f"{port}/state": f"{self.state}\n",
            f"{port}/phys_state": "5: LinkUp\n" if "ACTIVE" in self.state else "3: Disabled\n",
            f"{port}/link_layer": "Ethernet\n",
            f"{port}/rate": f"{self.rate}\n",
        }
        for index in range(self.gid_count):
            address, kind = self.gids.get(index, ("", ""))
            files[f"{port}/gids/{index}"] = f"{gid(address)}\n"
            # The kernel answers "invalid argument" for an empty entry; an empty file is the nearest thing here.
            files[f"{port}/gid_attrs/types/{index}"] = f"{kind}\n" if kind else ""
            files[f"{port}/gid_attrs/ndevs/{index}"] = f"{self.interface}\n" if kind else ""
        return files


def gid(address: str) -> str:
    """A GID as the kernel writes it; an IPv4 address is mapped, empty is all zeros."""
    if address.count(".") == 3:
        raw = bytes(10) + b"\xff\xff" + socket.inet_aton(address)
    else:
        raw = socket.inet_pton(socket.AF_INET6, address or "::")
    return ":".join(raw[i : i + 2].hex() for i in range(0, 16, 2))


def usual_rdma(address: str) -> tuple[Rdma, ...]:
    """A device as a healthy Spark has it: link-local and mapped entries, each in both RoCE versions."""
    gids = {
        0: ("fe80::1", "IB/RoCE v1"),
        1: ("fe80::1", "RoCE v2"),
        2: (address, "IB/RoCE v1"),
        3: (address, "RoCE v2"),
    }
    return (Rdma("rocep1s0f0", FABRIC.interface, gids),)


@dataclass
class Host:
    rank: int
    name: str
    folder: Path  # what this host writes is below: home, tmp, run, changes/etc
    links: tuple[Link, ...]
    keeper: subprocess.Popen
    pid: int  # the first process of the host, seen from outside
    sshd: subprocess.Popen | None = None
    children: list[subprocess.Popen] = field(default_factory=list)

    @property
    def address(self) -> str:
        """On the first link, the fabric."""
        return self.address_on(self.links[0])

    def address_on(self, link: Link) -> str:
        return f"{link.network}.{self.rank + 1}"

    @property
    def home(self) -> Path:
        """Where this host's home folder is seen from outside."""
        return self.folder / "home"

    # Running something on it

    def argv(self, argv: Sequence[str | Path], cwd: str | Path = "/") -> list[str]:
        """The command that runs `argv` on this host."""
        enter = ("nsenter", f"--target={self.pid}", "--mount", "--net", "--pid", "--uts", "--ipc", f"--wdns={cwd}")
        return [*enter, "--", *map(str, argv)]

    def run(
        self,
        argv: Sequence[str | Path],
        *,
        environment: Mapping[str, str] | None = None,
        cwd: str | Path = "/",
        stdin: str = "",
        timeout_s: float = 60,
    ) -> subprocess.CompletedProcess:
        """Runs to the end, whatever the exit code. `environment` is added to that of a fresh login."""
        return subprocess.run(
            self.argv(argv, cwd), env=login_environment(environment), input=stdin,
            capture_output=True, text=True, timeout=timeout_s,
        )  # fmt: skip

    def check(self, argv: Sequence[str | Path], **options) -> str:
        """Output of a command that has to succeed."""
        done = self.run(argv, **options)
        if done.returncode != 0:
            raise RuntimeError(f"{self.name}: {argv} ended with {done.returncode}: {done.stderr or done.stdout}")
        return done.stdout

    def start(
        self, argv: Sequence[str | Path], log: Path, environment: Mapping[str, str] | None = None, cwd: str | Path = "/"
    ) -> subprocess.Popen:
        """Starts it in the background, its output into `log`; ended with the host at the latest.

        To end it earlier use `kill`: a signal to what is returned does not reach the host.
        """
        with log.open("ab") as stream:
            child = subprocess.Popen(
                self.argv(argv, cwd), env=login_environment(environment), stdin=subprocess.DEVNULL,
                stdout=stream, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self.children.append(child)
        return child

    # Looking at it, breaking it

    def processes(self) -> dict[int, str]:
        """pid on this host -> command line, but for its first process and its sshd."""
        return {pid: command for pid, command in self._all_processes().items() if pid != 1 and not is_sshd(command)}

    def _all_processes(self) -> dict[int, str]:
        lines = self.check(["ps", "-e", "-o", "pid=,args="]).splitlines()
        pairs = (line.strip().partition(" ") for line in lines)
        return {int(pid): command.strip() for pid, _, command in pairs if not command.lstrip().startswith("ps -e -o")}

    def kill(self, words: str, number: signal.Signals = signal.SIGKILL) -> list[str]:
        """Signals every process of this host whose command line holds `words`; returns their command lines."""
        hit = {pid: command for pid, command in self.processes().items() if words in command}
        for pid in hit:
            self.run(["kill", f"-{number.value}", str(pid)])
        return list(hit.values())

    def listening(self) -> set[tuple[str, int]]:
        """(address, port) of every TCP socket that listens."""
        found = set()
        for line in self.check(["ss", "-Hltn"]).splitlines():
            address, _, port = line.split()[3].rpartition(":")
            found.add((address, int(port)))
        return found

    def write(self, path: str | Path, content: str, mode: int = 0o644) -> None:
        """Writes a file as this host sees paths."""
        script = 'umask 077; mkdir -p "${1%/*}"; cat > "$1"; chmod "$2" "$1"'
        self.check(["sh", "-c", script, "sh", path, f"{mode:o}"], stdin=content)

    def cover(self, path: str | Path, content: str) -> None:
        """Shows other content in place of a file that exists, also in /proc and /sys."""
        stand_in = self.folder / "covers" / str(path).strip("/").replace("/", "_")
        stand_in.parent.mkdir(exist_ok=True)
        stand_in.write_text(content)
        self.check(["mount", "--bind", stand_in, path])

    def uncover(self, path: str | Path) -> None:
        self.check(["umount", path])

    def limit_disk(self, path: str | Path, size_bytes: int) -> None:
        """Puts a disk of its own, empty and that small, at a folder."""
        self.check(["mkdir", "-p", path])
        self.check(["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", path])

    def set_rdma(self, devices: Sequence[Rdma]) -> None:
        """Changes what /sys/class/infiniband shows."""
        folder = self.folder / "infiniband"
        for entry in folder.iterdir():
            shutil.rmtree(entry)
        for device in devices:
            for name, content in device.files().items():
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(content)

    def set_link(self, link: Link, state: str) -> None:
        """up or down"""
        self.check(["ip", "link", "set", link.interface, state])

    # sshd

    def start_sshd(self) -> None:
        if self.sshd is None:
            self.sshd = self.start(["/usr/sbin/sshd", "-D", "-e"], self.folder / "sshd.log")
            wait_for(lambda: ("0.0.0.0", 22) in self.listening(), f"{self.name}: sshd listens")

    def stop_sshd(self) -> None:
        """Ends it and every connection that it serves."""
        if self.sshd is not None:
            for pid in [pid for pid, command in self._all_processes().items() if is_sshd(command)]:
                self.run(["kill", "-KILL", str(pid)])
            self.sshd.wait()
            self.sshd = None

    def forget_keys(self) -> None:
        """Nobody's key opens this host any more."""
        (self.home / ".ssh/authorized_keys").write_text("")

    def stop(self) -> None:
        """Ends the host and all that runs on it."""
        self.keeper.stdin.close()
        self.keeper.wait()
        for child in self.children:
            child.wait()


# The first process of a host: collects orphans, and ends when whoever made the host closes its input or dies.
KEEPER = """
import os, signal
def collect(*_):
    try:
        while os.waitpid(-1, os.WNOHANG)[0]: pass
    except ChildProcessError: pass
signal.signal(signal.SIGCHLD, collect)
print("up", flush=True)
while os.read(0, 1): pass
"""


def start_keeper(*namespaces: str) -> tuple[subprocess.Popen, int]:
    """(the process to end, the first process inside as seen from here)"""
    keeper = subprocess.Popen(
        ["unshare", *namespaces, "--", sys.executable, "-I", "-c", KEEPER],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    if keeper.stdout.readline() != b"up\n":
        raise RuntimeError("hosts: unshare did not start; namespaces need root and a machine that permits them.")
    children = Path(f"/proc/{keeper.pid}/task/{keeper.pid}/children").read_text().split()
    return keeper, int(children[0]) if children else keeper.pid


def is_sshd(command: str) -> bool:
    return command.startswith(("sshd: ", "/usr/sbin/sshd "))


def login_environment(added: Mapping[str, str] | None) -> dict[str, str]:
    return {
        "HOME": str(HOME), "USER": USER, "LOGNAME": USER, "SHELL": "/bin/bash", "LANG": "C.UTF-8",
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        **(added or {}),
    }  # fmt: skip


def wait_for(condition, what: str, timeout_s: float = SSH_TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s} s: {what}")
        time.sleep(0.05)


class Hosts:
    """N hosts that reach each other by SSH without a password. Use it in a `with` statement.

    `shared`: what all hosts see at the same place although it lies in a folder that each has for itself (home,
    /tmp). `private`: folders of this machine of which each host has a copy to write to, for example a checkout.
    """

    def __init__(
        self,
        count: int,
        folder: Path,
        links: tuple[Link, ...] = (FABRIC, LAN),
        shared: Sequence[Path] = (),
        private: Sequence[Path] = (),
    ) -> None:
        self.count, self.folder, self.links = count, folder.resolve(), links
        self.shared = (Path(sys.base_prefix), Path(sys.prefix), REPOSITORY, *map(Path, shared))
        self.shared = tuple(path.resolve() for path in self.shared)
        self.private = tuple(Path(path).resolve() for path in private)
        self.hosts: list[Host] = []
        self._ending = ExitStack()

    def __getitem__(self, rank: int) -> Host:
        return self.hosts[rank]

    def __iter__(self):
        return iter(self.hosts)

    def __len__(self) -> int:
        return len(self.hosts)

    def __enter__(self) -> Hosts:
        try:
            self._make()
        except BaseException:
            self._ending.close()
            raise
        return self

    def __exit__(self, *_) -> None:
        self._ending.close()

    def _make(self) -> None:
        switch, switch_pid = start_keeper("--net")
        self._ending.callback(switch.wait)
        self._ending.callback(switch.stdin.close)
        for number, link in enumerate(self.links):
            inside(switch_pid, ["ip", "link", "add", f"net{number}", "mtu", str(link.mtu), "type", "bridge"])
            inside(switch_pid, ["ip", "link", "set", f"net{number}", "up"])
        for rank in range(self.count):
            self._make_host(rank, switch_pid)
        self._introduce()
        for host in self.hosts:
            host.start_sshd()

    def _make_host(self, rank: int, switch: int) -> None:
        folder = self.folder / f"spark{rank}"
        for name in ("home", "tmp", "run/sshd", "infiniband", "covers", "class/infiniband"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / "tmp").chmod(0o1777)
        keeper, pid = start_keeper("--net", "--mount", "--pid", "--uts", "--ipc", "--kill-child", "--mount-proc")
        host = Host(rank, f"spark{rank}", folder, self.links, keeper, pid)
        self.hosts.append(host)
        self._ending.callback(host.stop)
        host.check(["hostname", host.name])
        self._connect(host, switch)
        self._mount(host)
        host.set_rdma(usual_rdma(host.address))

    def _connect(self, host: Host, switch: int) -> None:
        host.check(["ip", "link", "set", "lo", "up"])
        for number, link in enumerate(self.links):
            plug = f"h{host.rank}n{number}"
            inside(switch, ["ip", "link", "add", plug, "mtu", str(link.mtu), "type", "veth",
                            "peer", "name", link.interface, "mtu", str(link.mtu), "netns", str(host.pid)])  # fmt: skip
            inside(switch, ["ip", "link", "set", plug, "master", f"net{number}", "up"])
            host.check(["ip", "address", "add", f"{host.address_on(link)}/24", "dev", link.interface])
            host.check(["ip", "link", "set", link.interface, "up"])
        # Nobody is at that address: "my address" is on the last link, as on a machine with a LAN.
        host.check(["ip", "route", "add", "default", "via", f"{self.links[-1].network}.254"])

    def _mount(self, host: Host) -> None:
        """Own /sys, /etc, home, /tmp, /run and /dev/shm. Sources are staged in /mnt before anything is hidden."""
        own = {"home": HOME, "tmp": Path("/tmp"), "run": Path("/run")}
        hidden = tuple(own.values())
        seen = [path for path in (*self.shared, host.folder) if any(path.is_relative_to(top) for top in hidden)]
        folders = [(host.folder / name, path) for name, path in own.items()] + [(path, path) for path in seen]

        host.check(["mount", "-t", "tmpfs", "tmpfs", "/mnt"])
        for number, (source, _) in enumerate(folders):
            host.check(["mkdir", f"/mnt/{number}"])
            host.check(["mount", "--rbind", source, f"/mnt/{number}"])
        changed = [stage_overlay(host, path) for path in (Path("/etc"), *self.private)]
        for number, (_, target) in enumerate(folders):
            host.check(["mkdir", "-p", target])
            host.check(["mount", "--rbind", f"/mnt/{number}", target])
        for staged, target in changed:
            host.check(["mkdir", "-p", target])
            host.check(["mount", "--bind", staged, target])
        host.check(["umount", "--recursive", "--lazy", "/mnt"])

        host.check(["mount", "-t", "tmpfs", "tmpfs", "/dev/shm"])
        host.check(["mount", "-t", "sysfs", "sysfs", "/sys"])
        layers = f"lowerdir={host.folder}/class:/sys/class"
        host.check(["mount", "-t", "overlay", "overlay", "-o", layers, "/sys/class"])
        host.check(["mount", "--bind", host.folder / "infiniband", "/sys/class/infiniband"])

    def _introduce(self) -> None:
        """Every host knows every other by key, under each of its addresses."""
        known, allowed = "", ""
        for host in self.hosts:
            host.write("/etc/ssh/sshd_config", SSHD_CONFIG)
            host.write("/etc/hosts", f"127.0.0.1 localhost\n127.0.1.1 {host.name}\n")
            names = ",".join(host.address_on(link) for link in host.links)
            known += f"{names} {make_key(host, '/etc/ssh/ssh_host_ed25519_key')}"
            allowed += make_key(host, HOME / ".ssh/id_ed25519")
        for host in self.hosts:
            host.write(HOME / ".ssh/known_hosts", known, 0o600)
            host.write(HOME / ".ssh/authorized_keys", allowed, 0o600)


SSHD_CONFIG = """\
ListenAddress 0.0.0.0
HostKey /etc/ssh/ssh_host_ed25519_key
PasswordAuthentication no
PermitRootLogin prohibit-password
UsePAM no
Subsystem sftp internal-sftp
"""


def make_key(host: Host, path: str | Path) -> str:
    """Makes a new key pair on a host; returns the public half's line."""
    host.check(["mkdir", "-p", "-m", "700", Path(path).parent])
    host.check(["rm", "-f", path])
    host.check(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", host.name, "-f", path])
    return host.check(["cat", f"{path}.pub"])


def stage_overlay(host: Host, path: Path) -> tuple[str, Path]:
    """A copy of a folder that takes this host's changes, mounted below /mnt, and where it belongs."""
    name = str(path).strip("/").replace("/", "_")
    changes = host.folder / "changes" / name
    for part in ("upper", "work"):
        (changes / part).mkdir(parents=True, exist_ok=True)
    staged = f"/mnt/changes_{name}"
    layers = f"lowerdir={path},upperdir={changes}/upper,workdir={changes}/work"
    host.check(["mkdir", staged])
    host.check(["mount", "-t", "overlay", "overlay", "-o", layers, staged])
    return staged, path


def inside(pid: int, argv: Sequence[str]) -> None:
    """Runs a command in another process's network, and in nothing else of it."""
    subprocess.run(["nsenter", f"--target={pid}", "--net", "--", *argv], check=True, capture_output=True, text=True)
