"""Runs commands on the nodes: rank 0 is this machine, the others over ssh. The only place that quotes for ssh."""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from launcher import framing
from launcher.errors import Exit, LauncherError
from launcher.framing import Answer

S = TypeVar("S")
T = TypeVar("T")

CONNECT_TIMEOUT_S = 3
SSH_FAILED = 255  # ssh's own exit status when it could not connect or log in, or lost the connection
TIMED_OUT = 124  # as timeout(1) has it
NOT_FOUND = 127  # as a shell has it
# sshd hands the whole command to the login shell as one argument, and Linux takes no longer one than 128 KiB.
LONGEST_LINE_BYTES = 131_000
LONGEST_COMMAND_BYTES = 120_000  # of it; the rest is for the frame
PIECE_BYTES = 1 << 20
LAST_WORDS_S = 5
QUIET_SSH = Path(__file__).with_name("quiet_ssh.py")

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
    noise: bytes = b""  # what the node's login shell wrote to its output around the command's own
    unreached: bool = False  # nothing is known of the command: no login, no answer, or the connection was lost

    @property
    def ok(self) -> bool:
        return self.code == 0

    @property
    def tells_nothing(self) -> bool:
        """Whether it says nothing about what was asked, neither yes nor no."""
        return self.unreached or self.code == TIMED_OUT

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
    return ["--rsh", shlex.join([sys.executable, "-I", str(QUIET_SSH), *ssh_arguments(node), "--"])]


def rsync_target(node: Node, path: str) -> str:
    """A folder on a node, as rsync's last argument. The transport knows the login."""
    return f"[{node.address}]:{path}" if ":" in node.address else f"{node.address}:{path}"


def quoted(argv: Sequence[str]) -> bytes:
    """The line from which a POSIX shell makes exactly this argument list."""
    if not argv:
        raise ValueError("an empty command")
    if any("\0" in argument for argument in argv):
        raise LauncherError(f"{argv[0]}: an argument holds a NUL character, no program can take it; remove it.")
    line = shlex.join(argv).encode("utf-8", "surrogateescape")
    refuse_long(argv[0], line, LONGEST_COMMAND_BYTES)
    return line


def refuse_long(program: str, line: bytes, longest: int) -> None:
    if len(line) > longest:
        raise LauncherError(
            f"{program}: the command is {len(line)} bytes long and ssh takes {longest}; "
            f"shorten EXTRA_ARGS or put what is long into a file."
        )


@dataclass(frozen=True)
class Call:
    """A command as this machine runs it so that a node does, and the mark in its answer: none on this machine."""

    program: str
    command: Sequence[bytes]
    mark: str = ""

    @classmethod
    def to(cls, node: Node, argv: Sequence[str]) -> Call:
        """Text is UTF-8, whatever the locale is."""
        if node.is_here:
            quoted(argv)  # for what it refuses
            return cls(argv[0], [word.encode("utf-8", "surrogateescape") for word in argv])
        return cls.of_line(argv[0], ssh_arguments(node), quoted(argv))

    @classmethod
    def of_line(cls, program: str, ssh: Sequence[str], line: bytes) -> Call:
        """The same of a line that is quoted already, over this ssh."""
        mark = secrets.token_hex(16)
        return cls("ssh", [*map(os.fsencode, ssh), bounded(program, framing.framed(line, mark))], mark)

    def result(self, code: int, output: Answer, answer: bytes, stderr: bytes) -> Result:
        """From what the process on this machine left, `code` being TIMED_OUT if it was ended for its time."""
        if not self.mark:
            return Result(code, answer, stderr)
        errors, said = Answer.of(self.mark, stderr)
        if output.code is not None:
            return Result(output.code, answer, said, output.noise)
        said += errors.noise  # ssh's own words, if it has any, come behind what the command said
        if output.began:
            said = said or b"the connection ended before the answer did"
        elif code not in (SSH_FAILED, TIMED_OUT) or not said:
            said = no_answer(code, output.noise or errors.noise)
        code = TIMED_OUT if code == TIMED_OUT else SSH_FAILED
        return Result(code, answer, said, output.noise, unreached=code != TIMED_OUT or not output.began)


def ending(node: Node, argv: Sequence[str]) -> bytes:
    """How the command line of any call of this command ends in /proc, whatever its mark."""
    if node.is_here:
        return b"".join(b"\0" + word for word in Call.to(node, argv).command[1:]) + b"\0"
    return b" " + framing.word(quoted(argv)) + b"\0"


def no_answer(code: int, noise: bytes) -> bytes:
    said = framing.shown(noise)
    what = f'said "{said}"' if said else f"ended with exit status {code}"
    return f"the node's login shell {what} instead of an answer".encode()


def bounded(program: str, line: bytes) -> bytes:
    refuse_long(program, line, LONGEST_LINE_BYTES)
    return line


def terminal_command(node: Node, argv: Sequence[str]) -> list[bytes]:
    """What a person at this terminal runs so that `argv` runs on the node; what the login shell says, he reads."""
    if node.is_here:
        return list(Call.to(node, argv).command)
    return [*map(os.fsencode, ssh_arguments(node, terminal=True)), bounded(argv[0], framing.unframed(quoted(argv)))]


def run(node: Node, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float = 30) -> Result:
    """Runs one command to its end. A failing command is a Result with its code, never an exception.

    A command over ssh that runs out of time loses its connection; whether it ends on the other side is its own affair.
    """
    call = Call.to(node, argv)
    try:
        # In a session of its own: Ctrl-C reaches the launcher only, which decides what becomes of what it began.
        process = subprocess.Popen(
            call.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )  # fmt: skip
    except FileNotFoundError:
        said = f"{call.program}: command not found on this machine".encode()
        return Result(NOT_FOUND, b"", said, unreached=not node.is_here)
    except OSError as error:
        said = f"{call.program}: {error}".encode("utf-8", "surrogateescape")
        return Result(126, b"", said, unreached=not node.is_here)
    code, stdout, stderr = finish(process, stdin, timeout_s)
    return call.result(code, *Answer.of(call.mark, stdout), stderr)


class Talk:
    """A command on a node whose answer is read line by line, as it comes."""

    def __init__(self, node: Node, argv: Sequence[str], stdin: int = subprocess.DEVNULL) -> None:
        self.call = Call.to(node, argv)
        self.answer = Answer(self.call.mark)
        self.errors = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            self.call.command, stdin=stdin, stdout=subprocess.PIPE, stderr=self.errors, start_new_session=True
        )  # fmt: skip

    def lines(self) -> Iterator[bytes]:
        """Without their ends, until the command has ended."""
        rest = b""
        while piece := self.process.stdout.read1(PIECE_BYTES):
            *lines, rest = (rest + self.answer.feed(piece)).split(b"\n")
            yield from lines
        self.answer.finish()
        if rest:
            yield rest

    def result(self) -> Result:
        """Of what has ended; its output has gone by."""
        self.process.wait()
        self.errors.seek(0)
        return self.call.result(self.process.returncode, self.answer, b"", self.errors.read())


def show(node: Node, argv: Sequence[str]) -> int:
    """Runs a command whose output is for the user, as it comes; returns its exit status."""
    call = Call.to(node, argv)
    return show_marked(call, subprocess.DEVNULL) if call.mark else subprocess.run(call.command).returncode


def show_marked(call: Call, stdin: int | None) -> int:
    """Passes on what a command over ssh says on each stream, and nothing of the login shell's."""
    process = subprocess.Popen(call.command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    output, errors = Answer(call.mark), Answer(call.mark)
    beside_it = threading.Thread(target=pump, args=(process.stderr, errors, sys.stderr), daemon=True)
    try:
        beside_it.start()
        pump(process.stdout, output, sys.stdout)
        beside_it.join()
        process.wait()
    finally:
        process.kill()
        process.wait()
    result = call.result(process.returncode, output, b"", errors.noise)
    if result.unreached:
        print(result.message, file=sys.stderr)
    return result.code


def pump(source, answer: Answer, target) -> None:
    while piece := source.read1(PIECE_BYTES):
        target.buffer.write(answer.feed(piece))
        target.flush()
    answer.finish()


@contextmanager
def beside(argv: Sequence[str]) -> Iterator[subprocess.Popen]:
    """Runs a command of this machine beside the block and ends it with the block."""
    process = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
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
    call = Call.to(node, argv)
    with tempfile.TemporaryFile() as problem, tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        reader = subprocess.Popen(
            source, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=problem, start_new_session=True
        )
        writer = subprocess.Popen(
            call.command, stdin=subprocess.PIPE, stdout=output, stderr=errors, start_new_session=True
        )
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
        for file in (problem, output, errors):
            file.seek(0)
        if complete and reader.returncode:
            return Result(reader.returncode, b"", problem.read())
        return call.result(writer.returncode, *Answer.of(call.mark, output.read()), errors.read())


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


def finish(process: subprocess.Popen, stdin: bytes, timeout_s: float) -> tuple[int, bytes, bytes]:
    """(exit status, stdout, stderr)"""
    try:
        stdout, stderr = process.communicate(stdin, timeout_s)
    except subprocess.TimeoutExpired as expired:
        kill(process)
        stderr = (expired.stderr or b"") + f"\nno end after {timeout_s:g} s".encode()
        return TIMED_OUT, expired.stdout or b"", stderr
    except BaseException:
        kill(process)
        raise
    return process.returncode, stdout, stderr


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
