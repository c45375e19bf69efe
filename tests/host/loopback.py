"""Another node on this machine: a real sshd on loopback with a home folder of its own, behind a link that counts."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import socket
import subprocess
import threading
import time
from pathlib import Path

from launcher import config, topology
from launcher.weights import hashing, record
from launcher.weights.record import FileEntry, FileStat, Manifest, Verified

NEEDS = ("sshd", "ssh", "rsync", "setpriv")
BUFFER_BYTES = 16 << 10
MIB = 1 << 20
REVISION = "1" * 40


class Link:
    """Forwards a port to sshd and counts what goes there; `bytes_per_s` slows it, None does not."""

    def __init__(self, target: int) -> None:
        self.target, self.sent, self.bytes_per_s = target, 0, None
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self.target))
            # Small buffers, so that little is on its way when a side is killed.
            for one in (near, far):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
                one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
            threading.Thread(target=self.forward, args=(near, far, True), daemon=True).start()
            threading.Thread(target=self.forward, args=(far, near, False), daemon=True).start()

    def forward(self, source: socket.socket, target: socket.socket, counted: bool) -> None:
        try:
            while block := source.recv(BUFFER_BYTES):
                target.sendall(block)
                if counted:
                    self.sent += len(block)
                    if self.bytes_per_s:
                        time.sleep(len(block) / self.bytes_per_s)
        except OSError:
            pass
        for one in (source, target):
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def close(self) -> None:
        self.listener.close()


class Loopback:
    """`head` and `worker` are two home folders; `environment` makes this process, or another, the head.

    A second other node, `other`, is there for who wants three.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.head, self.worker, self.other = folder, folder / "head", folder / "worker", folder / "other"
        for name in ("head", "worker", "other", "bin", "worker-bin"):
            (folder / name).mkdir()
        for name in ("host_key", "key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
        (folder / "authorized").write_text((folder / "key.pub").read_text())
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)
        ports = unused_ports(2)
        self.sshds = [self.start_sshd(home, port) for home, port in zip((self.worker, self.other), ports, strict=True)]
        self.link = Link(ports[0])
        self.make_ssh(ports[1])
        self.environment = {"HOME": str(self.head), "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}
        self.settings = {
            "HEAD_IP": "10.0.0.1", "WORKER_IP": "10.0.0.2", "SSH_USER": getpass.getuser(),
            "SSH_KEY": str(folder / "key"), "MODEL_DIR": "~/model", "SPEC_METHOD": "none",
            "RUN_DIR": str(folder / "run"),
        }  # fmt: skip

    def start_sshd(self, home: Path, port: int) -> subprocess.Popen:
        config = self.folder / f"sshd_config_{home.name}"
        config.write_text(
            f"ListenAddress 127.0.0.1\nPort {port}\nHostKey {self.folder}/host_key\nPidFile none\nUsePAM no\n"
            f"AuthorizedKeysFile {self.folder}/authorized\nStrictModes no\nPasswordAuthentication no\n"
            f"SetEnv HOME={home} PATH={self.folder}/worker-bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin\n"
        )
        log = self.folder / f"sshd_{home.name}.log"
        return subprocess.Popen(["/usr/sbin/sshd", "-D", "-f", str(config), "-E", str(log)], start_new_session=True)

    def make_ssh(self, other_port: int) -> None:
        """ssh itself, led to the link, or to the other node, and kept from the user's own files.

        With a quick exchange of keys, since these tests log in hundreds of times.
        """
        wrapper = self.folder / "bin" / "ssh"
        wrapper.write_text(
            f'#!/bin/sh\ncase "$*" in *10.0.0.3*) port={other_port} ;; *) port={self.link.port} ;; esac\n'
            f"exec {shutil.which('ssh')} -F none -o HostName=127.0.0.1 -o Port=$port -o ConnectTimeout=30 "
            f'-o UserKnownHostsFile=/dev/null -o StrictHostKeyChecking=no -o KexAlgorithms=curve25519-sha256 "$@"\n'
        )
        wrapper.chmod(0o755)

    def close(self) -> None:
        self.link.close()
        for sshd in self.sshds:
            sshd.terminate()
            sshd.wait()


def unused_ports(count: int) -> list[int]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


def fill(folder: Path, shards: int = 4, size: int = MIB, revision: str = REVISION) -> Verified:
    """A verified folder of random shards."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"model-{number:05}-of-{shards:05}.safetensors" for number in range(1, shards + 1)]
    for name in names:
        (folder / name).write_bytes(os.urandom(size))
    (folder / "config.json").write_text(json.dumps({"revision": revision}))
    return verify(folder, [*names, "config.json"], revision)


def verify(folder: Path, names: list[str], revision: str = REVISION) -> Verified:
    digests = hashing.hash_files([folder / name for name in names], 2)
    entries = tuple(FileEntry(name, (folder / name).stat().st_size, digests[folder / name]) for name in names)
    verified = Verified(Manifest("owner/pack", revision, entries), {name: FileStat.of(folder / name) for name in names})
    record.write(folder, verified)
    return verified


def settings(node: Loopback, name: str = "tp2", **changes: str) -> config.Config:
    return config.load(topology.TOPOLOGIES[name], None, ".env", node.settings | changes)
