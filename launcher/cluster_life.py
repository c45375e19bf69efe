"""The life of a cluster: check, start, restart, stop, status and logs, in the order in which things must happen."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from launcher import (
    cached_prefix,
    canary,
    clocks,
    cluster_plan,
    console,
    counters,
    discovery,
    facts,
    images,
    link_runs,
    memory_plan,
    phases,
    preflight,
    processes,
    recipe,
    remote,
    reports,
    running_checks,
    watch,
    weights_checks,
)
from launcher import plan as texts
from launcher import status as runs
from launcher.cluster_state import ClusterState, Files, StartedUnit, files_of, new_state
from launcher.content_checks import RECIPE_LABEL
from launcher.errors import Exit, LauncherError
from launcher.lifecycle import SOAK, print_answered, signals_ignored, signals_interrupt
from launcher.remote import Node
from launcher.settings import MODEL_ID
from launcher.status import LostGpu, Status, UnitStatus
from launcher.vllm_flags import api_host
from launcher.weights import sync as weights_sync

POLL_S = 0.5
# A step of a long prompt takes several seconds, and nothing moves before its end.
STUCK_AFTER_S, LOOK_AGAIN_S = 15, 3
# The real model thinks before it answers.
CANARY_TOKENS = 2048
# What a killed launcher has just told a node to start is there after this, or never.
HELPERS_S = 30
STOP = "stop"  # as a phase of the state
CANARIES = Path(__file__).parent / "canaries"


def door_of(config) -> str:
    """The address under which this machine reaches the API."""
    host = api_host(config)
    return "127.0.0.1" if host in ("0.0.0.0", "::") else host


# Checks


def look(config, state: ClusterState | None) -> preflight.Context:
    """Facts of every node at once, what discovery makes of them, and which of our own things run."""
    nodes = remote.nodes_of(config)
    units = state.units if state else ()
    found = facts.gather(nodes, preflight.request(config))
    states = [(unit.node.rank, watch.state_of(unit)) for unit in units]
    context = preflight.context(
        config, nodes, found, files_of(config).read_record(), states, recipe=recipe.digest(),
        contents=memory_plan.contents_of(config),
    )  # fmt: skip
    return context if link_runs.CHECK in config["SKIP_CHECKS"] else link_runs.with_runs(context)


def check(config, *, as_json: bool = False) -> Exit:
    preflight.refuse_settings(config)
    context = look(config, files_of(config).read_state())
    findings = preflight.run_checks(context, config["SKIP_CHECKS"])
    return reports.tell(preflight.CheckReport(findings), as_json=as_json, notes=config.notes)


def refuse_bad_findings(context) -> None:
    findings = preflight.run_checks(context, context.config["SKIP_CHECKS"])
    shown = [finding for finding in findings if finding.level != "PASS"]
    console.say(f"{len(findings) - len(shown)} checks passed." + ("\n" + preflight.describe(shown) if shown else ""))
    for rank, change in discovery.changes(context.fabrics, context.previous):
        console.say(f"Note: node {rank}: {change}")
    if failed := preflight.failed(findings):
        names = ", ".join(sorted({finding.check for finding in failed}))
        raise LauncherError(f"Nothing was started and nothing was stopped: {names} failed, see above for each fix.")


def refuse_bad_run(findings: Sequence[preflight.Finding], config, phase: str) -> None:
    """As above, of what is under way: the caller ends it."""
    shown = [one for one in findings if one.level != "PASS" and one.check not in config["SKIP_CHECKS"]]
    if shown:
        names = ",".join(sorted({one.check for one in shown}))
        console.say(f"\n{preflight.describe(shown)}")
        raise LauncherError(
            f"phase {phase}: {names} failed, see above for each fix; everything that was started is ended. "
            f"SKIP_CHECKS={names} starts all the same.",
            Exit.SERVER,
        )


def plan_of(context) -> cluster_plan.Plan:
    plan = cluster_plan.make(
        context.config, context.fabrics, homes=[home_of(node) for node in context.facts],
        image_id=preflight.image_id(context), ray_token=secrets.token_hex(32), admin_token=secrets.token_hex(32),
        gpu_ways=preflight.gpu_ways(context),
    )  # fmt: skip
    if plan.unresolved:
        missing = ", ".join(plan.unresolved)
        raise LauncherError(f"The plan still lacks {missing}; set it in {context.config.topology.env_file}.")
    return plan


def home_of(node: facts.NodeFacts) -> str:
    """Of the user who logs in there. No check that is skipped makes up for it."""
    if node.host is None:
        trouble = node.unreached or node.unprobed or node.errors.get("host", "it did not tell its home folder")
        raise LauncherError(
            f"node {node.rank} ({node.address}): {trouble}; nothing can be started on a node that does not answer, "
            f"whatever SKIP_CHECKS leaves out: `{console.program()} check` says what to mend."
        )
    return node.host.home


def questions_of(config) -> list[canary.Question]:
    """A reviewed list comes with the model, or with the launcher for the model that it is made for."""
    beside = Path(str(config["MODEL_DIR"])).expanduser() / "canary.json"
    return canary.questions_for_start(beside if os.path.isfile(beside) else CANARIES / f"{MODEL_ID}.json")


# Start


def start(config) -> Exit:
    return launch(config, may_replace=False)


def restart(config) -> Exit:
    """What runs is stopped only when every check of the new plan has passed."""
    return launch(config, may_replace=True)


def launch(config, *, may_replace: bool) -> Exit:
    if config.topology.refusal:
        raise LauncherError(config.topology.refusal)
    preflight.refuse_settings(config)
    files = files_of(config)
    with signals_interrupt(), files.lock():
        state = after_broken_off(files)
        if state and not may_replace and any((watch.state_of(unit) or {}).get("Running") for unit in state.units):
            raise LauncherError(
                f"{config.topology.name} already runs (phase {state.phase}, {state.url}); `restart` checks first and "
                f"then replaces it, `stop` ends it.",
                Exit.BUSY,
            )
        with console.phase("checks"):
            context = look(config, state)
        context = bring_what_is_missing(context, state)
        refuse_bad_findings(context)
        plan, questions = plan_of(context), questions_of(config)
        if state:
            end_run(state, files)
        bring_up(context, plan, questions)
    return Exit.OK


def after_broken_off(files: Files) -> ClusterState | None:
    """What runs. Of a start, a stop or a soak that did not come to its end, the rest is ended here; holds the lock.

    Whoever of this machine was at it has ended, since the lock is ours.
    """
    state = files.read_state()
    if state is None or state.ready:
        return state
    if state.launcher.is_elsewhere:
        raise LauncherError(
            f"{files.state_path}: phase {state.phase} of {files.topology} runs on {state.launcher.host}, which cannot "
            f"be seen from here; go on there, or `stop` here ends what it started.",
            Exit.BUSY,
        )
    left = "; ".join(unit.label for unit in state.units if (watch.state_of(unit) or {}).get("Running"))
    console.say(f"Note: phase {state.phase} was broken off before; ends what that left ({left or 'nothing runs'}).")
    end_run(state, files)
    return None


def end_run(state: ClusterState, files: Files) -> None:
    """Whatever kills us meanwhile, the state says what is left and that it was being ended."""
    broken_off = not state.ready
    state = files.write_state(state.stopping())
    with console.phase("stop"), signals_ignored():
        if remains_here(state):
            processes.stop_group(state.process.pid, grace_s=1)
        if broken_off:
            wait_for_helpers(state)
        end_units(state)
    files.forget_state()


def wait_for_helpers(state: ClusterState) -> None:
    """A launcher that was killed leaves the command that it had just given: what that starts must be seen here."""
    given = [remote.ending(one.node, one.unit.start) for one in state.units]
    deadline = time.monotonic() + HELPERS_S
    while processes.leading(given) and time.monotonic() < deadline:
        time.sleep(0.1)
    followers = [remote.ending(one.node, one.unit.follow) for one in state.units]
    for pid in processes.leading([*given, *followers]) if given else []:
        processes.send_group(pid, signal.SIGKILL)


def bring_what_is_missing(context, state: ClusterState | None) -> preflight.Context:
    """Copies image and weights that other nodes lack, once nothing else is wrong; then looks at everything again."""
    config, behind = context.config, images.behind(context)
    ranks = [] if weights_checks.NAME in config["SKIP_CHECKS"] else weights_checks.workers_to_fill(context)
    lacking = ["image"] * bool(behind) + [weights_checks.NAME] * bool(ranks)
    if not lacking or preflight.failed(preflight.run_checks(context, [*config["SKIP_CHECKS"], *lacking])):
        return context
    if behind:
        images.copy_to_others(config)
    if ranks:
        copy_weights(context, ranks)
    with console.phase("checks"):
        return look(config, state)


def copy_weights(context, ranks: Sequence[int]) -> None:
    size = weights_sync.spoken(weights_checks.bytes_to_fill(context))
    names = " and ".join(f"node {rank}" for rank in ranks)
    console.say(f"The weights on {names} are not those of node 0: up to {size} are copied first. Ctrl-C keeps what has "
                f"arrived.")  # fmt: skip
    weights_sync.tell(weights_sync.sync(context.config, ranks=ranks), console.say)


def bring_up(context, plan: cluster_plan.Plan, questions: Sequence[canary.Question]) -> None:
    """All or nothing: on any failure or interrupt nothing of it stays on any node."""
    config, files = context.config, files_of(context.config)
    run = Run(config, plan, remote.nodes_of(config), files)
    try:
        files.write_record(record_of(context, plan))
        run.start_ranks()
        if plan.ray_nodes:
            run.wait_for_ray()
            for unit in plan.ranks[0].units[1:]:
                run.start_unit(run.nodes[0], unit)
        run.wait_for_server()
        answered = run.ask(questions)
    except BaseException:
        with signals_ignored():
            keep_logs(run.state, files)
            clear_away(run.state, files)
        raise
    files.write_state(run.state.entered("ready", ready=True))
    print_ready(config, plan, answered)


class Run:
    """A start under way. The state file names every unit before it is started, so that nothing can be forgotten."""

    def __init__(self, config, plan: cluster_plan.Plan, nodes: Sequence[Node], files: Files) -> None:
        self.config, self.plan, self.nodes, self.files = config, plan, nodes, files
        self.state = files.write_state(new_state(plan))
        self.watcher = watch.Watcher()

    def enter(self, phase: str) -> None:
        self.state = self.files.write_state(self.state.entered(phase))

    @contextmanager
    def phase(self, name: str, limit_setting: str):
        """Yields `tick`, which shows progress and ends the phase when its time is over or a rank has died."""
        self.enter(name)
        limit_s, began = self.config[limit_setting], time.monotonic()

        def tick(progress, detail: Callable[[], str]) -> None:
            self.watcher.look()
            if time.monotonic() - began > limit_s:
                raise LauncherError(
                    f"phase {name} is not over after {limit_s} s ({detail()}); `logs` shows what each rank said last, "
                    f"{limit_setting} gives it more time.",
                    Exit.SERVER,
                )
            progress.tick(detail())
            time.sleep(POLL_S)

        with console.phase(name) as progress:
            yield lambda detail=lambda: "": tick(progress, detail)

    def start_ranks(self) -> None:
        with self.phase("containers", "CONTAINERS_TIMEOUT_S"):
            remote.on_all(self.nodes, self.prepare)
            for node, rank in zip(self.nodes, self.plan.ranks, strict=True):
                for unit in (rank.units[0], *rank.guards):
                    self.start_unit(node, unit)
                if rank.list_gpus:
                    fix = "its container sees no GPU, though one of that image did before; look at nvidia-smi there"
                    self.must(node, rank.list_gpus, fix)
            self.refuse_bad_insides()

    def refuse_bad_insides(self) -> None:
        if {running_checks.VERSIONS, running_checks.LIBRARY} <= set(self.config["SKIP_CHECKS"]):
            return
        insides = remote.on_all(self.nodes, self.look_inside)
        record = self.files.read_record()
        for entry, inside in zip(record["ranks"], insides, strict=True):
            entry |= {"packages": inside.packages, "nccl": inside.nccl}
        self.files.write_record(record)
        findings = [
            *running_checks.check_versions(insides, is_native=self.config["RUNTIME"] == "native"),
            *running_checks.check_libraries(insides),
        ]
        refuse_bad_run(findings, self.config, "containers")

    def look_inside(self, node: Node) -> running_checks.Inside:
        result = remote.run(node, self.plan.ranks[node.rank].look_inside, timeout_s=60)
        if not result.ok:
            return running_checks.Inside(node.rank, problem=result.message)
        return running_checks.read_inside(node.rank, result.stdout)

    def prepare(self, node: Node) -> None:
        rank = self.plan.ranks[node.rank]
        for command in rank.units[0].stop:  # an ended container of an earlier start still has the name
            remote.run(node, command, timeout_s=120)
        self.must(node, rank.make_folders, "its folders could not be made")
        for file in rank.files:
            remote.write_file(node, file.path, file.content, file.mode)

    def start_unit(self, node: Node, unit) -> None:
        started = StartedUnit(node, unit)
        self.state = self.files.write_state(self.state.with_unit(started))
        self.must(node, unit.start, f"{unit.name} could not be started", self.config["CONTAINERS_TIMEOUT_S"])
        self.watcher.units.append(started)

    def must(self, node: Node, argv: Sequence[str], what: str, timeout_s: float = 60) -> None:
        result = remote.run(node, argv, timeout_s=timeout_s)
        if not result.ok:
            raise LauncherError(f"node {node.rank} ({node.address}): {what}: {result.message}", Exit.SERVER)

    def wait_for_ray(self) -> None:
        wanted, joined = len(self.nodes), 0
        with self.phase("ray", "RAY_TIMEOUT_S") as tick:
            while joined < wanted:
                joined = watch.gpus_in_ray(self.nodes[0], self.plan.ray_nodes, self.config.addresses)
                tick(lambda: f"{joined} of {wanted} GPUs")  # noqa: B023 - called before the next turn

    @property
    def server(self) -> StartedUnit:
        """What answers, on rank 0."""
        return next(started for started in self.state.units if (started.node.rank, started.unit.name) == (0, "server"))

    def wait_for_server(self) -> None:
        """Follows the server's log by its phases: `load` ends when the weights are there, `warm-up` when it listens."""
        reader, port, host = phases.LogReader(), self.config["PORT"], door_of(self.config)
        with watch.LogFollower(self.server) as log:

            def said() -> str:
                for line in log.new_lines():
                    reader.feed(line)
                return f"{reader.phase}: {reader.last_line[:80]}"

            with self.phase("load", "LOAD_TIMEOUT_S") as tick:
                while reader.phase in ("imports", "weights"):
                    tick(said)
            with self.phase("warm-up", "WARMUP_TIMEOUT_S") as tick:
                while reader.phase != phases.LISTENING or not canary.is_healthy(port, host):
                    tick(said)
        if reader.quantization not in (None, "exl3"):
            raise LauncherError(
                f"server: the engine runs the model with quantization={reader.quantization} where exl3 was expected; "
                f"the plugin is not in {self.config['IMAGE'] or self.config['NATIVE_PYTHON']}.",
                Exit.SERVER,
            )

    def ask(self, questions: Sequence[canary.Question]):
        host, port, key = door_of(self.config), self.config["PORT"], str(self.config["VLLM_API_KEY"] or "")
        watched = [] if running_checks.CLOCKS in self.config["SKIP_CHECKS"] else self.nodes
        with self.phase("canary", "CANARY_TIMEOUT_S"):
            limit_s = self.config["CANARY_TIMEOUT_S"]
            door = cached_prefix.Door(host, port, key, CANARY_TOKENS, limit_s, canary.AT_START)
            canary.refuse_open_door(port, key, host)
            with clocks.sampled(watched) as samples:
                answered = cached_prefix.ask_all(questions, door)
            refuse_bad_run(list(running_checks.check_clocks(samples)), self.config, "canary")
            if self.config["SPEC_METHOD"] != "none":
                refuse_idle_drafts(counters.fetch(host, port, key) or {}, self.config["SPEC_METHOD"])
        return answered


def refuse_idle_drafts(found: Mapping[str, float], method: str) -> None:
    drafted, accepted = found.get(counters.DRAFTED, 0), found.get(counters.ACCEPTED, 0)
    if not accepted:
        raise LauncherError(
            f"canary: SPEC_METHOD={method} drafted {drafted:.0f} tokens and none was accepted, so the draft does not "
            f"fit the model; check DRAFT_DIR, or set SPEC_METHOD=none.",
            Exit.WRONG_ANSWER,
        )


def record_of(context, plan: cluster_plan.Plan) -> dict:
    """What was started, and why so: for `status`, for the next start, and for a report."""
    config = context.config
    return {
        "topology": config.topology.name,
        "image": str(config["IMAGE"]),
        "image_id": preflight.image_id(context),
        "image_recipe": context.facts[0].image.labels.get(RECIPE_LABEL, "") if context.facts[0].image else "",
        "image_digests": list(context.facts[0].image.digests) if context.facts[0].image else [],
        "fabrics": discovery.record_of(context.fabrics),
        "sources": {name: source for name, source in sorted(config.sources.items()) if source != "built-in"},
        "ranks": [
            {
                "rank": rank.rank,
                "address": rank.address,
                "environment": {name: cluster_plan.shown(name, value) for name, value in rank.environment.items()},
                "commands": [list(unit.start) for unit in rank.units],
            }
            for rank in plan.ranks
        ],
    }


def print_ready(config, plan: cluster_plan.Plan, answered) -> None:
    script = console.program()
    print_answered(f"\n{MODEL_ID} is ready at {plan.url}/v1. It was asked, and answered correctly:", answered)
    needs_key = bool(config["VLLM_API_KEY"])
    print(f"\nAsk it:\n  {texts.curl(plan.url, answered[0][0].question, needs_key)}")
    print(f"From Python:\n  {texts.openai_client(plan.url, needs_key)}")
    print(f"End it: {script} stop", flush=True)


def sync(config, *, full: bool) -> Exit:
    with signals_interrupt(), files_of(config).lock():
        weights_sync.tell(weights_sync.sync(config, full=full))
    return Exit.OK


# Stop


def stop(config) -> Exit:
    files = files_of(config)
    with signals_interrupt(), files.lock():
        state = files.read_state()
        if state is None:
            print("Not running.")
            return Exit.OK
        end_run(state, files)
        print("Stopped.")
    return Exit.OK


def end_units(state: ClusterState) -> None:
    """Last started, first ended; nodes at once. Raises when something is left, naming it."""
    order: dict[Node, list[StartedUnit]] = {}
    for started in reversed(state.units):
        order.setdefault(started.node, []).append(started)
    # The server goes before what it runs on, and rank 0 before the others, so that nobody sees a lost rank.
    left: list[str] = []
    for nodes in ([node for node in order if node.rank == 0], [node for node in order if node.rank]):
        for names in remote.on_all(nodes, lambda node: end_on(order[node])):
            left += names
    if left:
        raise LauncherError(
            f"stop: still there: {'; '.join(left)}. Try `stop` again when the node answers; what to end is in the "
            f"state file.",
            Exit.SERVER,
        )


def clear_away(state: ClusterState, files: Files) -> None:
    """After a failed start, whose own reason matters more: what could not be ended is told, and stays in the state."""
    try:
        end_units(state)
        files.forget_state()
    except LauncherError as left:
        console.say(f"\n{left}")


def end_on(units: Sequence[StartedUnit]) -> list[str]:
    left = []
    for started in units:
        for command in started.unit.stop:
            result = remote.run(started.node, command, timeout_s=120)
        state = watch.state_of(started)
        if state is None:
            left.append(f"{started.label} (node not reached: {result.message})")
        elif state.get("Running"):
            left.append(f"{started.label} ({result.message})")
    return left


def keep_logs(state: ClusterState, files: Files) -> None:
    """What each unit said, saved before its container is removed. That it cannot be saved keeps nothing running."""
    try:
        with files.usable():
            files.logs.mkdir(parents=True, exist_ok=True)
            for started in state.units:
                lines = watch.log_of(started)
                log_path(files, started.node.rank, started.unit.name).write_text("\n".join([*lines, ""]))
    except LauncherError as error:
        console.say(f"\nNote: the logs of the ranks are not kept: {error}")


def log_path(files: Files, rank: int, unit: str) -> Path:
    return files.logs / f"rank{rank}-{unit}.log"


# Status and logs


def status(config, *, as_json: bool = False) -> Exit:
    return reports.tell(status_of(files_of(config)), as_json=as_json, notes=config.notes)


def status_of(files: Files) -> Status:
    state = files.read_state()
    if state is None:
        return Status(runs.NOT_RUNNING)
    found = [unit_status(unit, watch.state_of(unit)) for unit in state.units]
    if state.is_broken_off or state.phase in (STOP, SOAK):
        return unready_status(state, found, files)
    lost = watch.lost_gpus(state, {unit.node for unit in found if unit.state != "runs"})
    alive = bool(found) and all(unit.state == "runs" for unit in found) and not lost
    door = urlsplit(state.url)  # of what runs; the settings may have changed since
    answers = alive and canary.is_healthy(door.port, door.hostname)
    now, silent_s = look_at_progress(door.hostname, door.port, state.token) if answers else (None, 0)
    word = runs.STARTING
    if state.ready:
        word = runs.STUCK if silent_s else runs.READY if answers else runs.NOT_ANSWERING if alive else runs.BROKEN
    return Status(
        word, phase=state.phase, since=state.since, url=f"{state.url}/v1", counters=now, silent_s=silent_s,
        units=found, record=str(files.record_path),
        lost_gpus=[LostGpu(node.rank, node.address, said) for node, said in lost],
    )  # fmt: skip


def unready_status(state: ClusterState, found: Sequence[UnitStatus], files: Files) -> Status:
    """Of what was broken off; of a stop or a soak that is under way."""
    if not state.is_broken_off:
        word = {STOP: runs.STOPPING, SOAK: runs.SOAK}[state.phase]
        return Status(word, phase=state.phase, since=state.since, pid=state.launcher.pid, units=found)
    running = sum(unit.state == "runs" for unit in found) + remains_here(state)
    unreached = sum(unit.state == "not reached" for unit in found)
    left = [f"{running} of {len(found) + bool(state.process)}"] * bool(running)
    left += [f"{unreached} on nodes that were not reached"] * bool(unreached)
    return Status(
        runs.BROKEN_OFF, phase=state.phase, since=state.since, units=found, record=str(files.record_path),
        why=f"the launcher did not come to its end: {state.launcher.fate}",
        left=f"runs: {', '.join(left)}" if left else "nothing runs any more",
        next=f"`{console.program()}` ends what is left and starts; `{console.program()} stop` only ends it",
    )  # fmt: skip


def remains_here(state: ClusterState) -> bool:
    return bool(state.process and state.process.has_remains)


def unit_status(started: StartedUnit, found: dict | None) -> UnitStatus:
    """As Docker, or the runner in its words, tells of it. None: the node was not reached."""
    state, code = "not reached", None
    if found is not None:
        code = None if found.get("Running") else found.get("ExitCode")
        state = "runs" if found.get("Running") else "gone" if code is None else "ended"
    return UnitStatus(started.node.rank, started.node.address, started.unit.name, state, code)


def look_at_progress(host: str, port: int, token: str) -> tuple[counters.Counters, int]:
    """(counters, seconds in which nothing moved though requests run; 0: it moves). /health is 200 also when every rank
    waits for another."""
    before = after = counters.fetch(host, port, token) or counters.Counters()
    waited_s = 0
    while before.get(counters.RUNNING) and waited_s < STUCK_AFTER_S:
        time.sleep(LOOK_AGAIN_S)
        waited_s += LOOK_AGAIN_S
        after = counters.fetch(host, port, token) or counters.Counters()
        if not counters.is_stuck(before, after):
            break
    return after, waited_s if counters.is_stuck(before, after) else 0


def logs(config, rank: int, follow: bool) -> Exit:
    """The log of the rank's server, or of its Ray; of the last failed start when nothing runs."""
    files = files_of(config)
    state = files.read_state()
    units = [one for one in state.units if one.node.rank == rank and one.unit.name != "guard"] if state else []
    if units:
        unit = units[-1]
        command = unit.unit.follow if follow else unit.unit.logs
        return Exit.OK if remote.show(unit.node, command) == 0 else Exit.SERVER
    saved = sorted(files.logs.glob(f"rank{rank}-*.log"))
    if not saved:
        print(f"There is no log of rank {rank} yet.", file=sys.stderr)
        return Exit.NOT_RUNNING
    for path in saved:
        print(f"==> {path} <==\n{path.read_text()}", end="")
    return Exit.OK


def shell(config, rank: int) -> Exit:
    """A shell where the rank runs."""
    state = files_of(config).read_state()
    if state is None:
        print("status:   not running", file=sys.stderr)
        return Exit.NOT_RUNNING
    command = remote.terminal_command(remote.nodes_of(config)[rank], state.shells[rank])
    return Exit.OK if subprocess.run(command).returncode == 0 else Exit.SERVER
