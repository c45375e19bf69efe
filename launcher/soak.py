"""The owner's soak: runs tests/soak where a server would run, passes on what it says, and tells what follows."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher import canary, console, counters, memory_guard, processes
from launcher.errors import Exit, LauncherError
from launcher.findings import GIB
from launcher.lifecycle import signals_ignored
from launcher.settings import REPOSITORY

ENGINES = REPOSITORY / "tests" / "soak" / "run.py"
OVER_HTTP = REPOSITORY / "tests" / "soak" / "over_http.py"
# What both need of the checkout.
FOLDERS = ("tests/soak", "tests/gpu/engine", "tools/local_model", "models/local", "models/local-drafts")
MEMINFO = Path("/proc/meminfo")

# Of each engine: its process, its context on the GPU, its kernels and its cache. Not measured on a GB10.
ENGINE_GIB = 6
SIDE_BY_SIDE = 7
# arm.py's gpu_memory_utilization: so much must be free when an engine starts.
SHARE_PER_START = 0.1

# Of the limit, for what comes before the first engine and after the last.
AROUND_S = 30
# The soak keeps its own time; beyond this it hangs.
OVERTIME_S = 90
ENDED_BY_ITSELF = (0, 1, 2, 3)  # nothing found, findings, wrong usage, an arm gave no answer
POLL_S = 0.5
LOW_S = 1.0  # between two looks at the memory that both have to find too little, as memory_guard.py does
DOCKER_S = 60  # a daemon that hangs must not make the command deaf to Ctrl-C
LAST_LINES = 15

COVERING = ("", "pairwise", "all")  # --arms that have every pair of choices
ENOUGH_SESSIONS = 40  # of each arm, for what follows from finding nothing; the soak's own default
# Word of an arm's name -> the setting that would make it the product's way.
FAST_CHOICES = {"async": "ASYNC_SCHEDULING=1", "flashkda": "KDA_PREFILL_BACKEND=flashkda"}


@dataclass(frozen=True)
class Options:
    """What the user typed; None and empty: the soak's own default."""

    minutes: int
    arms: str
    sessions: int | None
    seed: int | None
    bugs: str
    plan: Path | None
    report: Path | None
    running: bool

    @property
    def seconds(self) -> int:
        return self.minutes * 60 - AROUND_S


@dataclass(frozen=True)
class Job:
    """One soak, ready to run. `end`: commands that leave nothing of it, or of one that was killed before."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    folder: Path  # of everything that it writes
    limit_s: float
    guard_gib: float = 0  # it is ended before less memory than this is available
    end: tuple[tuple[str, ...], ...] = ()

    @property
    def report(self) -> Path:
        return self.folder / "soak.json"


# The command line


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--running", action="store_true", help="Ask the server that runs, over its API, instead of engines of its own.")
    add("--minutes", type=int, default=10, metavar="N", help="After so long the rest counts as failed. Default: 10.")
    add("--arms", default="", metavar="WHICH", help="pairwise (default), product, all, or names with commas between.")
    add("--sessions", type=int, metavar="N", help="Of each arm, about three turns each.")
    add("--seed", type=int, metavar="N", help="Other sessions. Default: 0.")
    add("--bugs", nargs="?", const="all", default="", metavar="NAMES", help="Plant bugs instead; each must show.")
    add("--plan", type=Path, metavar="FILE", help="A failure again, from the file that a soak has named.")
    add("--report", type=Path, metavar="FILE", help="Default: soak.json in a folder of this soak beside the state.")


def options_of(parsed: argparse.Namespace) -> Options:
    """Raises LauncherError for what does not fit together, before anything is looked at."""
    names = ("minutes", "arms", "sessions", "seed", "bugs", "plan", "report", "running")
    options = Options(**{name: getattr(parsed, name) for name in names})
    if not 2 <= options.minutes <= 1440:
        raise LauncherError(f"soak: --minutes is {options.minutes}, it must be from 2 to 1440.", Exit.USAGE)
    if options.sessions is not None and options.sessions < 1:
        raise LauncherError(f"soak: --sessions is {options.sessions}, it must be 1 or more.", Exit.USAGE)
    if options.running and (options.arms or options.bugs):
        raise LauncherError(
            "soak: --arms and --bugs are about engines that the soak starts itself; leave them or --running out.",
            Exit.USAGE,
        )
    if options.plan and not options.plan.is_file():
        raise LauncherError(f"soak: --plan {options.plan}: no such file; a soak that found something names one.",
                            Exit.USAGE)  # fmt: skip
    refuse_unwritable(options.report)
    return options


def refuse_unwritable(report: Path | None) -> None:
    if report is None:
        return
    folder = report.absolute().parent
    if report.is_dir() or not folder.is_dir() or not os.access(report if report.exists() else folder, os.W_OK):
        raise LauncherError(
            f"soak: --report {report} cannot be written; name a file in a folder that is there and yours.", Exit.USAGE
        )


def words(options: Options, folder: Path, **more: object) -> list[str]:
    """Arguments of both modes; `more` are those of one."""
    given = {"seconds": options.seconds, "report": folder / "soak.json", "sessions": options.sessions,
             "seed": options.seed, "plan": options.plan and options.plan.absolute(), **more}  # fmt: skip
    return [word for name, value in given.items() if value not in (None, "")
            for word in ("--" + name.replace("_", "-"), str(value))]  # fmt: skip


def engine_words(options: Options, folder: Path) -> list[str]:
    return words(options, folder, work=folder, arms=options.arms, bugs=options.bugs, parallel=SIDE_BY_SIDE)


# Before it starts


def refuse_missing_folders() -> None:
    missing = [name for name in FOLDERS if not (REPOSITORY / name).is_dir()]
    if missing:
        raise LauncherError(
            f"soak: {REPOSITORY / missing[0]} is not there, and the soak is in it; get the whole checkout again.",
            Exit.SETUP,
        )


def refuse_little_memory(engines: int, engine_gib: float, left_free_gib: float) -> None:
    """By what is available, since a Spark's GPU has no memory of its own."""
    rows = {name: int(rest.split()[0]) << 10 for name, rest in
            (line.split(":", 1) for line in MEMINFO.read_text().splitlines() if line.startswith("Mem"))}  # fmt: skip
    needed = engines * engine_gib + left_free_gib + SHARE_PER_START * rows["MemTotal"] / GIB
    available = memory_guard.available_bytes(MEMINFO) / GIB
    if available < needed:
        raise LauncherError(
            f"soak: memory: {available:.1f} GiB are available here and {engines} engines side by side need "
            f"{needed:.1f}; end other programs, or ask a server that runs with --running."
        )


def edges_of(host: str, port: int, key: str) -> dict[str, int]:
    """What the server itself tells, so that a wrong key is told before anything starts."""
    try:
        code, body = canary.request(port, "GET", "/v1/models", headers=canary.headers_with(key), host=host)
        longest = json.loads(body)["data"][0]["max_model_len"] if code == 200 else 0
        block = counters.block_tokens(counters.fetch(host, port, key) or counters.Counters())
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise LauncherError(f"soak: the server does not answer ({error}); `{console.program()} status` tells more.",
                            Exit.SERVER) from error  # fmt: skip
    if code != 200 or not block:
        what = "its key is another than VLLM_API_KEY" if code == 401 else f"/v1/models: {code}, state block: {block}"
        raise LauncherError(f"soak: the server does not tell what a soak has to know ({what}).", Exit.SERVER)
    return {"longest": longest, "block": block}


def new_folder(beside: Path) -> Path:
    """Of one soak: a failure that an earlier one found stays where that said."""
    beside.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=time.strftime("%Y%m%d-%H%M%S-"), dir=beside))


# While it runs


def run(job: Job, record: Callable[[int], None] = lambda pid: None) -> tuple[int, list[str]]:
    """(exit code, everything that it said). Ctrl-C and any failure leave no process and no container.

    `record` is given the pid of its session before it begins: what a kill of this process leaves is then known.
    """
    end(job)
    process = processes.start_recorded(
        job.argv, record, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        env=dict(job.environment), cwd=REPOSITORY,
    )  # fmt: skip
    try:
        with console.phase("soak") as progress:
            said = pass_on(process, progress, job)
            return process.wait(), said
    finally:
        with signals_ignored():
            end(job)
            if process.poll() is None or processes.group_members(process.pid):
                processes.stop_group(process.pid, grace_s=1)
                end(job)  # it may have been about to start what the first one looked for
            process.stdout.close()


def end(job: Job) -> None:
    for command in job.end:
        run_briefly(command)


def run_briefly(command: Sequence[str]) -> None:
    """For tidying up: a failure is not told over the reason why it is needed, but a hanging daemon is."""
    try:
        subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=DOCKER_S)
    except subprocess.TimeoutExpired:
        console.say(f"soak: no answer in {DOCKER_S} s, left undone: {' '.join(command)}")


def pass_on(process: subprocess.Popen, progress: console.Progress, job: Job) -> list[str]:
    """Prints each line as it comes, in the words of this launcher; the clock goes on where none comes."""
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=read_lines, args=(process.stdout, lines), daemon=True).start()
    said: list[str] = []
    low_since = None
    while True:
        if memory_guard.available_bytes(MEMINFO) >= job.guard_gib * GIB:
            low_since = None
        elif low_since is None:
            low_since = time.monotonic()
        elif time.monotonic() - low_since >= LOW_S:
            raise LauncherError(
                f"soak: less than the {job.guard_gib:g} GiB of MEMORY_GUARD_GIB were available, so it was ended before "
                f"the machine hangs; end other programs first.",
                Exit.SERVER,
            )
        if progress.elapsed_s > job.limit_s + OVERTIME_S:
            raise LauncherError(
                f"soak: no end {OVERTIME_S} s after its time was over; it was ended, its logs are kept.", Exit.SERVER
            )
        with contextlib.suppress(queue.Empty):
            line = lines.get(timeout=POLL_S)
            if line is None:
                return said
            said.append(in_our_words(line))
            console.say(said[-1])
        progress.tick(f"of {job.limit_s:.0f} s")


def read_lines(stream, lines: queue.SimpleQueue) -> None:
    try:
        for line in stream:
            lines.put(line.rstrip("\n"))
    except ValueError:  # closed from the other side, after an interrupt
        pass
    lines.put(None)


def in_our_words(line: str) -> str:
    """The commands that the soak names, as this user types them."""
    return line.replace("python3 tests/soak/run.py", f"{console.program()} soak")


# After it


def conclude(job: Job, options: Options, code: int, said: Sequence[str], about: Mapping[str, object]) -> Exit:
    """Completes the report, puts it where it was asked for, and says what it comes to."""
    if code not in ENDED_BY_ITSELF:
        last = "\n".join(f"    {line}" for line in said[-LAST_LINES:])
        raise LauncherError(f"{last}\nsoak: it ended with {code}; the lines above say why, logs are in {job.folder}.",
                            Exit.SERVER)  # fmt: skip
    if not job.report.is_file():
        if code in (0, 1):  # Python's own code for a program that fell over is 1, too
            raise LauncherError(f"soak: it ended with {code} and left no {job.report}; the lines above may say why.",
                                Exit.SERVER)  # fmt: skip
        return Exit(code)
    report = json.loads(job.report.read_text()) | {"launcher": dict(about)}
    allowed = settings_allowed(report, options, code)
    report["launcher"]["may_be_set"] = allowed
    place = options.report.absolute() if options.report else job.report
    for path in dict.fromkeys((job.report, place)):
        partial = path.with_name(path.name + ".partial")
        partial.write_text(in_our_words(json.dumps(report, indent=1)) + "\n")
        partial.replace(path)
    print(f"soak: {summary(report, code)} The report is {place}; logs and plans are in {job.folder}.")
    if allowed:
        print(f"soak: every arm with these fast choices passed here, so you may set {' and '.join(allowed)}.")
    return Exit(code)


def summary(report: Mapping, code: int) -> str:
    arms = report.get("arms")
    many = list(arms.values()) if arms is not None else [report]
    turns, hits = (sum(one[name] for one in many) for name in ("turns", "hits"))
    where = f" in {len(many)} arm{'s' * (len(many) != 1)}" if arms is not None else ""
    found = sum(len(one["findings"]) + len(one.get("misshapen", ())) + len(one.get("states", {}).get("findings", ()))
                for one in many)  # fmt: skip
    failed = [line.split()[1].rstrip(":") for line in report.get("verdicts", ()) if line.startswith("FAIL")]
    unplanted = sum(" in " in what for what in report.get("not_run", ()))  # "BUG in ARM"
    planted = "every planted bug that must show did" + (f", {unplanted} could not be planted here" if unplanted else "")
    good = planted if report.get("settings", {}).get("bugs") else "nothing was found"
    what = {0: good, 1: f"{found} findings", 3: "not every arm gave an answer"}[code]
    failing = f", failed: {', '.join(failed)}" if failed else ""
    return f"{turns:,} turns{where}, {hits:,} of them from the prefix cache: {what}{failing}."


def settings_allowed(report: Mapping, options: Options, code: int) -> list[str]:
    """Settings whose every arm passed, in a soak that found nothing: an arm among them must have had the cache.

    Arms that the user chose by name may leave out those that would fail, and few sessions what would fail in them.
    """
    is_part = options.arms not in COVERING or options.bugs or options.plan or options.running
    is_part = is_part or (options.sessions or ENOUGH_SESSIONS) < ENOUGH_SESSIONS
    if code or is_part or report["platform"]["name"] == "cpu":
        return []
    passed = {line.split()[1].rstrip(":") for line in report["verdicts"] if line.startswith("PASS")}
    allowed = []
    for word, setting in FAST_CHOICES.items():
        having = [name for name in report["arms"] if word in name.split("@")[0].split("-")]
        if any(name.startswith("cache-") for name in having) and passed.issuperset(having):
            allowed.append(setting)
    return allowed
