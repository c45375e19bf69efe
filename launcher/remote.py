"""Runs commands on the nodes: rank 0 is this machine, the others over ssh. The only place that quotes for ssh."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from launcher.errors import Exit, LauncherError

S = TypeVar("S")
T = TypeVar("T")

CONNECT_TIMEOUT_S = 3
SSH_FAILED = 255  # ssh's own exit status when it could not connect or log in, or lost the connection
TIMED_OUT = 124  # as timeout(1) has it
NOT_FOUND = 127  # as a shell has it
# sshd hands the whole command to the login shell as one argument, and Linux takes no longer one than 128 KiB.
LONGEST_COMMAND_BYTES = 120_000
PIECE_BYTES = 1 << 20
LAST_WORDS_S = 5

# Who waits for a password or for a dead link waits for ever. Host keys are judged as the user's own configuration says.
SSH_OPTIONS = (
    "BatchMode=yes",
    f"ConnectTimeout={CONNECT_TIMEOUT_S}",
    "ServerAliveInterval=5",
    "ServerAliveCountMax=3",
    "LogLevel=ERROR",
)


@dataclass(frozen=True)
class Node:
    rank: int
    address: str
    user: str = ""  # empty: as the user's ssh configuration says
    port: int = 22
    key: str = ""  # file of the private key; empty: as the user's ssh configuration says

    @property
    def is_here(self) -> bool:
        return self.rank == 0

    @property
    def login(self) -> str:
        return f"{self.user}@{self.address}" if self.user else self.address


@dataclass(frozen=True)
class Result:
    code: int
    stdout: bytes
    stderr: bytes

    @property
    def ok(self) -> bool:
        return self.code == 0

    @property
    def message(self) -> str:
        """What a failed command said, in one line."""
        lines = (self.stderr or self.stdout).decode("utf-8", "replace").split("\n")
        said = [line.strip() for line in lines if line.strip()]
        return " / ".join(said[-3:]) if said else f"exit status {self.code}, and it said nothing"


def nodes_of(config) -> list[Node]:
    """The nodes of a configuration, in rank order."""
    return [
        Node(rank, address, str(config["SSH_USER"] or ""), int(config["SSH_PORT"]), str(config["SSH_KEY"] or ""))
        for rank, address in enumerate(config.addresses)
    ]


def ssh_arguments(node: Node, *, terminal: bool = False) -> list[str]:
    """How to reach a node, without a command."""
    argv = ["ssh", "-t"] if terminal else ["ssh"]
    for option in SSH_OPTIONS:
        argv += ["-o", option]
    if node.port != 22:
        argv += ["-p", str(node.port)]
    if node.key:
        argv += ["-i", os.path.expanduser(node.key), "-o", "IdentitiesOnly=yes"]
    return [*argv, "--", node.login]


def rsync_transport(node: Node) -> list[str]:
    """rsync's arguments that make it log in as everything else does."""
    return ["--rsh", shlex.join(ssh_arguments(node)[:-2])]  # rsync adds the login itself


def rsync_target(node: Node, path: str) -> str:
    """A folder on a node, as rsync's last argument."""
    address = f"[{node.address}]" if ":" in node.address else node.address
    return f"{node.user}@{address}:{path}" if node.user else f"{address}:{path}"


def quoted(argv: Sequence[str]) -> bytes:
    """The line from which a POSIX login shell makes exactly this argument list."""
    if not argv:
        raise ValueError("an empty command")
    if any("\0" in argument for argument in argv):
        raise LauncherError(f"{argv[0]}: an argument holds a NUL character, no program can take it; remove it.")
    line = shlex.join(argv).encode("utf-8", "surrogateescape")
    if len(line) > LONGEST_COMMAND_BYTES:
        raise LauncherError(
            f"{argv[0]}: the command is {len(line)} bytes long and ssh takes {LONGEST_COMMAND_BYTES}; "
            f"shorten EXTRA_ARGS or put what is long into a file."
        )
    return line


def command_for(node: Node, argv: Sequence[str], *, terminal: bool = False) -> list[bytes]:
    """What to run on this machine so that `argv` runs on the node. Text is UTF-8, whatever the locale is."""
    line = quoted(argv)
    if node.is_here:
        return [word.encode("utf-8", "surrogateescape") for word in argv]
    return [*(os.fsencode(word) for word in ssh_arguments(node, terminal=terminal)), line]


def run(node: Node, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float = 30) -> Result:
    """Runs one command to its end. A failing command is a Result with its code, never an exception.

    A command over ssh that runs out of time loses its connection; whether it ends on the other side is its own affair.
    """
    command = command_for(node, argv)
    try:
        # In a session of its own: Ctrl-C reaches the launcher only, which decides what becomes of what it began.
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )  # fmt: skip
    except FileNotFoundError:
        program = argv[0] if node.is_here else "ssh"
        return Result(NOT_FOUND, b"", f"{program}: command not found on this machine".encode())
    except OSError as error:
        return Result(126, b"", f"{argv[0]}: {error}".encode("utf-8", "surrogateescape"))
    return finish(process, stdin, timeout_s)


@contextmanager
def beside(node: Node, argv: Sequence[str]) -> Iterator[subprocess.Popen]:
    """Runs a command beside the block and ends it with the block; over ssh it has to end by itself, too."""
    process = subprocess.Popen(
        command_for(node, argv), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        kill(process)


def pipe(source: Sequence[str], node: Node, argv: Sequence[str], moved: Callable[[int], bool]) -> Result:
    """Runs `source` on this machine and `argv` on the node, and feeds what the first prints to the second.

    `moved` is told the bytes of each piece; a no ends both. The result is the first failure of the two. What does not
    come whole must not count on the other side: its input ends before the failure is known there.
    """
    with tempfile.TemporaryFile() as problem, tempfile.TemporaryFile() as output:
        reader = subprocess.Popen(
            source, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=problem, start_new_session=True
        )
        writer = subprocess.Popen(
            command_for(node, argv), stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            complete = feed(reader.stdout, writer.stdin, moved)
            if complete is None:  # its own reason tells more than that we stopped
                with contextlib.suppress(subprocess.TimeoutExpired):
                    writer.wait(LAST_WORDS_S)
            if complete and reader.wait() == 0:
                writer.stdin.close()
            else:
                kill(writer)  # before its input ends, so that half of it is never taken for the whole
            writer.wait()
        finally:
            kill(reader)
            kill(writer)
        for file in (problem, output):
            file.seek(0)
        if complete and reader.returncode:
            return Result(reader.returncode, b"", problem.read())
        return Result(writer.returncode, output.read(), b"")


def feed(source, target, moved: Callable[[int], bool]) -> bool | None:
    """Whether all of it was passed on; None where the target does not listen any more."""
    while piece := source.read1(PIECE_BYTES):
        try:
            target.write(piece)
            target.flush()
        except BrokenPipeError:
            return None
        if not moved(len(piece)):
            return False
    return True


def said_by(process: subprocess.Popen) -> str:
    """Ends what `beside` started; what it said, in one line."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    output, _ = process.communicate()
    return Result(process.returncode, output, b"").message


def finish(process: subprocess.Popen, stdin: bytes, timeout_s: float) -> Result:
    try:
        stdout, stderr = process.communicate(stdin, timeout_s)
    except subprocess.TimeoutExpired as expired:
        kill(process)
        stderr = (expired.stderr or b"") + f"\nno end after {timeout_s:g} s".encode()
        return Result(TIMED_OUT, expired.stdout or b"", stderr)
    except BaseException:
        kill(process)
        raise
    return Result(process.returncode, stdout, stderr)


def kill(process: subprocess.Popen) -> None:
    """Ends the command with everything it started on this machine."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
    for stream in filter(None, (process.stdin, process.stdout, process.stderr)):
        try:
            stream.close()
        except OSError:  # what was left to write has no reader any more
            pass


def on_all(nodes: Sequence[S], function: Callable[[S], T]) -> list[T]:
    """Calls function(node) for every node, or whatever is given, at once; results in the order of the nodes.

    All calls come to their end, also when one raises or Ctrl-C is pressed: nobody is left halfway. Then the first
    exception is raised.
    """
    if not nodes:
        return []
    with ThreadPoolExecutor(len(nodes)) as pool:
        futures = [pool.submit(function, node) for node in nodes]
        wait(futures)  # in here, Ctrl-C is raised only after the pool's end has waited for the rest
    return [future.result() for future in futures]


# $1 path, $2 mode, $3 size. What a broken connection left incomplete never takes the file's place.
WRITE = """\
set -eu
case $1 in "~/"*) path=$HOME/${1#"~/"} ;; *) path=$1 ;; esac
umask 077
mkdir -p -- "$(dirname -- "$path")"
partial=$(mktemp -- "$path.XXXXXX")
trap 'rm -f -- "$partial"' EXIT
trap 'exit 1' HUP INT TERM
cat > "$partial"
size=$(wc -c < "$partial")
[ "$size" -eq "$3" ] || { echo "only $size of $3 bytes arrived" >&2; exit 1; }
chmod -- "$2" "$partial"
mv -fT -- "$partial" "$path"
"""


def write_file(node: Node, path: str, content: bytes, mode: int = 0o600) -> None:
    """Writes a file whole or not at all. The content travels by stdin, so a secret is in no argument list.

    A leading ~/ is the home folder on that node. Missing folders are made, for their owner only.
    """
    result = run(node, ["sh", "-c", WRITE, "sh", path, f"{mode:o}", str(len(content))], stdin=content)
    if not result.ok:
        raise LauncherError(
            f"node {node.rank} ({node.address}): {path} could not be written ({result.message}); "
            f"give its folder to the user who logs in, and see that the disk is not full.",
            Exit.SETUP,
        )
