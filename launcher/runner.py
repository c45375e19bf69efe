"""Runs one command of a rank in the background. Sent to the nodes; standard library only, Python 3.8 or newer.

Keeps FOLDER/NAME.json (who runs, how it ended) and FOLDER/NAME.log. Everything that the command starts, also what
leaves its process group as Ray's processes do, ends with it.
"""

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.1
KILL_LIMIT_S = 20

# What a process keeps of the environment that it was started from; all else comes from the environment file.
INHERITED = ("HOME", "PATH", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TZ")
MARK = "EXL3_UNIT"


def start_time(pid):
    """Clock ticks since boot at which a process began; None if it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def is_same(pid, started):
    return bool(pid) and started is not None and start_time(pid) == started


def children_of(pid):
    """Every living descendant, as /proc tells it now."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents.setdefault(int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1]), []).append(
                    int(entry.name)
                )
            except (OSError, IndexError):
                continue
    found, queue = [], [pid]
    while queue:
        for child in parents.get(queue.pop(), []):
            found.append(child)
            queue.append(child)
    return [child for child in found if start_time(child) is not None]


def marked(mark):
    """Processes whose environment carries the mark of a unit: found even when their supervisor was killed."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if wanted in (entry / "environ").read_bytes().split(b"\0") and start_time(int(entry.name)) is not None:
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def send(pid, number):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


class Unit:
    def __init__(self, folder, name):
        self.folder, self.name = Path(folder), name
        self.file = self.folder / (name + ".json")
        self.log = self.folder / (name + ".log")
        self.mark = f"{self.folder.absolute()}/{name}"

    def read(self):
        try:
            return json.loads(self.file.read_text())
        except (OSError, ValueError):
            return {}

    def write(self, record):
        partial = self.file.with_name(self.file.name + ".partial")
        partial.write_text(json.dumps(record) + "\n")
        partial.replace(self.file)

    def is_running(self):
        record = self.read()
        return is_same(record.get("supervisor"), record.get("started"))

    def state(self):
        """In the words of `docker inspect`, so that both runtimes are read by one function."""
        record = self.read()
        running = self.is_running()
        # A supervisor that was killed leaves no exit code.
        code = 0 if running else record.get("exit_code", -1)
        return {"Exists": bool(record), "Running": running, "ExitCode": code, "Pid": record.get("pid", 0)}


def read_environment(path):
    """Lines NAME=VALUE, as `docker run --env-file` reads them: no quotes, no expansion."""
    lines = Path(path).read_bytes().decode().split("\n")
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def environment_for(unit, env_file):
    if env_file is None:
        environment = dict(os.environ)
    else:
        environment = {name: os.environ[name] for name in INHERITED if name in os.environ}
        environment.update(read_environment(env_file))
    environment[MARK] = unit.mark
    return environment


def start(unit, argv, env_file, grace_s):
    if unit.is_running():
        return f"{unit.name} already runs as process {unit.read()['pid']}; stop it first"
    unit.folder.mkdir(parents=True, exist_ok=True)
    if unit.log.exists():
        unit.log.replace(unit.log.with_name(unit.log.name + ".1"))
    unit.file.unlink(missing_ok=True)
    environment = environment_for(unit, env_file)
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.close(reader)
        os.setsid()
        if os.fork() == 0:
            supervise(unit, argv, environment, grace_s, writer)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        return stream.read()


def supervise(unit, argv, environment, grace_s, writer):
    """Never returns. Adopts orphans, so that the end of the command is the end of all that it started."""
    asked_to_stop = []
    signal.signal(signal.SIGTERM, lambda *_: asked_to_stop.append(True))
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # a handler, since what is ignored stays ignored in the command
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    log = os.open(str(unit.log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    try:
        process = subprocess.Popen(argv, env=environment, start_new_session=True)
    except OSError as error:
        os.write(writer, f"cannot start {argv[0]}: {error.strerror}".encode())
        os._exit(1)
    record = {"supervisor": os.getpid(), "started": start_time(os.getpid()), "pid": process.pid, "argv0": argv[0]}
    unit.write(record)
    os.close(writer)
    code = wait_for(process, asked_to_stop, grace_s)
    kill_all(lambda: children_of(os.getpid()))
    unit.write(dict(record, exit_code=code))
    os._exit(0)


def wait_for(process, asked_to_stop, grace_s):
    deadline = None
    while process.poll() is None:
        if asked_to_stop and deadline is None:
            send(process.pid, signal.SIGTERM)
            deadline = time.monotonic() + grace_s
        if deadline is not None and time.monotonic() > deadline:
            send(process.pid, signal.SIGKILL)
            deadline = float("inf")
        reap_others(process.pid)
        time.sleep(POLL_S)
    # As a shell and Docker count: 128 + the signal.
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def reap_others(main_pid):
    """Collects adopted orphans that ended; the command itself is left to its Popen object."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid == main_pid:
            return
        os.waitpid(ended.si_pid, os.WNOHANG)


def kill_all(find):
    deadline = time.monotonic() + KILL_LIMIT_S
    while time.monotonic() < deadline:
        pids = find()
        if not pids:
            return
        for pid in pids:
            send(pid, signal.SIGKILL)
        time.sleep(POLL_S)
        reap_others(0)


def stop(unit, grace_s):
    record = unit.read()
    if unit.is_running():
        send(record["supervisor"], signal.SIGTERM)
        deadline = time.monotonic() + grace_s + KILL_LIMIT_S
        while unit.is_running() and time.monotonic() < deadline:
            time.sleep(POLL_S)
    kill_all(lambda: marked(unit.mark))
    left = marked(unit.mark)
    return f"processes that would not end: {left}" if left or unit.is_running() else ""


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("start", "state", "stop", "run"))
    parser.add_argument("--folder", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--env-file")
    parser.add_argument("--grace-s", type=float, default=30)
    words = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:words])
    unit, argv = Unit(options.folder, options.name), arguments[words + 1 :]
    if options.command in ("start", "run") and not argv:
        parser.error(f"{options.command} needs a command after --")
    if options.command == "run":  # to its end, in front, with the unit's environment
        os.execvpe(argv[0], argv, environment_for(unit, options.env_file))
    problem = ""
    if options.command == "start":
        problem = start(unit, argv, options.env_file, options.grace_s)
    elif options.command == "stop":
        problem = stop(unit, options.grace_s)
    print(json.dumps(unit.state()))
    if problem:
        print(problem, file=sys.stderr)
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
