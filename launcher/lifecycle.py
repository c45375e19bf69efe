"""Start, stop, status and logs of the local topology: the order of things; effects are in the modules it calls."""

from __future__ import annotations

import json
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from launcher import (
    canary,
    checkpoint,
    console,
    counters,
    environment,
    phases,
    processes,
    reports,
    service,
    system_library,
)
from launcher import plan as plans
from launcher import server as servers
from launcher import status as runs
from launcher.errors import Exit, LauncherError
from launcher.settings import HOST, MODEL_ID
from launcher.state import State, StateFile, process_of, this_process
from launcher.status import Status

STOP_PATIENCE_S = 60
# vLLM does not listen to Ctrl-C while its engine starts, and there is no request yet that could be brought to its end.
STARTING_GRACE_S = 2
SOAK = "soak"  # as a phase of the state: engines of its own, and no server


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, or a signal that means the same."""


def plan_for(values: Mapping[str, object], ambient: Mapping[str, str], admin_token: str = "") -> plans.Plan:
    return plans.make_plan(values, environment.Sources().python, ambient, admin_token)


# start


def start(values: Mapping[str, object], ambient: Mapping[str, str]) -> Exit:
    state_file = StateFile(values["run_dir"])
    with signals_interrupt():
        with state_file.lock():
            refuse_second_start(state_file)
            questions = check_before(values)
            system_library.bring()
            plan = plan_for(values, ambient, secrets.token_hex(32))
            note_ignored(plan)
            server, state = bring_up(values, plan, state_file, questions)
        if values["detach"]:
            return Exit.OK
        return serve(server, state_file, Path(state.log))


def refuse_second_start(state_file: StateFile) -> None:
    state = state_file.read()
    refuse_elsewhere(state, state_file)
    if state and state.is_alive and not state.is_broken_off:
        raise LauncherError(
            f"Already running on http://{HOST}:{state.port} (pid {state.main_process.pid}, phase {state.phase}); "
            f"`./start-local.sh status` tells more, `./start-local.sh stop` ends it.",
            Exit.BUSY,
        )
    clear_remains(state_file)


def refuse_elsewhere(state: State | None, state_file: StateFile) -> None:
    if state and state.main_process.is_elsewhere:
        raise LauncherError(
            f"{state_file.path}: phase {state.phase} runs on {state.main_process.host}, which cannot be seen from "
            f"here; stop it there, or use another --run-dir. If that is this machine's older name, remove the file.",
            Exit.BUSY,
        )


def clear_remains(state_file: StateFile) -> None:
    """Ends what is left of a run whose server or launcher was killed, and forgets it."""
    state = state_file.read()
    left = describe_remains(state) if state else ""
    if left:
        processes.stop_group(state.server.pid, processes.STOP_GRACE_S if state.ready else STARTING_GRACE_S)
    if state and state.is_broken_off:
        done = f"{left} ended" if left else "nothing of it was left"
        console.say(f"Note: an earlier start was broken off in phase {state.phase} ({state.launcher.fate}): {done}.")
    state_file.remove()


def describe_remains(state: State) -> str:
    """Empty where nothing is left."""
    if state.server and state.server.has_remains:
        members = processes.group_members(state.server.pid)
        return f"{len(members)} process{'es' * (len(members) > 1)} of group {state.server.pid}"
    return ""


def check_before(values: Mapping[str, object]) -> list[canary.Question]:
    """Everything that can be known without starting anything."""
    port = values["port"]
    if not processes.port_is_free(port):
        owner = processes.port_owner(port) or "a program of another user"
        raise LauncherError(
            f"port: {HOST}:{port} is taken by {owner}; end that program or choose another port with --port."
        )
    checkpoint.check_checkpoint(values["model"])
    return canary.questions_for_start(values["canary"])


def note_ignored(plan: plans.Plan) -> None:
    for note in ignored_notes(plan):
        console.say(note)


def ignored_notes(plan: plans.Plan) -> list[str]:
    # Python's own names do not reach the launcher either.
    names = [name for name in plan.ignored if not name.startswith("PYTHON")]
    said = f"Ignored from your environment (the server has settings of its own): {', '.join(names)}"
    return [said] if names else []


def bring_up(values, plan: plans.Plan, state_file: StateFile, questions) -> tuple[subprocess.Popen, State]:
    """All or nothing: on any failure or interrupt no process and no state file stays."""
    log = values["run_dir"] / "local.log"
    state = State(
        "environment", plan.port, str(values["model"]), str(log), time.time(), this_process(),
        canary=str(values["canary"]),
    )  # fmt: skip
    state_file.write(state)
    state_file.write_token(plan.settings.get(service.TOKEN_NAME, ""))
    server = None
    try:
        held = environment.make_environment(environment.Sources(), values["run_dir"] / "environment.log")
        plan = replace(plan, argv=(str(environment.Sources().real.python), *plan.argv[1:]))
        console.say(f"Server (log: {log})")

        def record(pid: int) -> None:
            nonlocal state
            state = replace(state, server=process_of(pid))
            entered(phases.PHASES[0].name)

        def entered(phase: str) -> None:
            state_file.write(replace(state, phase=phase))

        server = servers.start_server(plan, log, record, held)
        servers.wait_until_ready(server, plan, log, entered)
        entered("canary")
        with console.phase("canary"):
            canary.refuse_open_door(plan.port, str(values["api_key"]))
            answered = canary.check_answers(plan.port, questions, values["api_key"])
        state = replace(state, phase="ready", ready=True, since=time.time())
        state_file.write(state)
        print_address(plan, answered)
    except BaseException:
        with signals_ignored():
            if server:
                servers.stop_server(server, STARTING_GRACE_S)
            state_file.remove()
        raise
    return server, state


def print_address(plan: plans.Plan, answered) -> None:
    print_answered(f"\n{MODEL_ID} is ready at {plan.url}/v1. It was asked, and answered correctly:", answered)
    needs_key = "VLLM_API_KEY" in plan.settings
    print(f"\nAsk it:\n  {plans.curl(plan.url, answered[0][0].question, needs_key)}")
    print(f"From Python:\n  {plans.openai_client(plan.url, needs_key)}")
    print("End it: ./start-local.sh stop", flush=True)


def print_answered(head: str, answered) -> None:
    print(head)
    for question, answer in answered:
        print(f"  {question.label}\n    {answer.text.strip()}")


def serve(server: subprocess.Popen, state_file: StateFile, log: Path) -> Exit:
    """Until Ctrl-C or `stop`; raises LauncherError if the server dies by itself."""
    console.say("Serving until Ctrl-C.")
    try:
        while server.poll() is None:
            time.sleep(0.5)
        reader = phases.LogReader()
        for line in log.read_text(errors="replace").splitlines():
            reader.feed(line)
        servers.refuse_if_dead(server, reader, log)
    except Interrupted:
        console.say("\nStopping.")
    finally:
        with signals_ignored():
            servers.stop_server(server)
            state_file.remove()
    return Exit.OK


@contextmanager
def signals_interrupt():
    """Ctrl-C, SIGTERM and a closed terminal all end a start the same way."""

    def interrupt(number, frame):
        raise Interrupted

    numbers = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
               if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]  # fmt: skip
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def signals_ignored():
    """While cleaning up: a second Ctrl-C must not leave half of it."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# stop, status, logs


def stop(values: Mapping[str, object]) -> Exit:
    """Ends a run and whatever is left of one; fine when there is none."""
    state_file = StateFile(values["run_dir"])
    state = state_file.read()
    refuse_elsewhere(state, state_file)
    if state is None or not (state.is_alive or state.launcher.is_alive or describe_remains(state)):
        state_file.remove()
        print("Not running.")
        return Exit.OK
    if state.launcher.is_alive:
        # It is starting or serving in the foreground: it tidies up itself.
        processes.send(state.launcher.pid, signal.SIGTERM)
        wait_for_end(state)
        state = state_file.read() or state
    clear_remains(state_file) if state_file.path.exists() else None
    if describe_remains(state):
        raise LauncherError(
            f"stop: processes of group {state.server.pid} are still there after being killed; "
            f"`ps -g {state.server.pid}` shows them.",
            Exit.SERVER,
        )
    print("Stopped.")
    return Exit.OK


def wait_for_end(state: State) -> None:
    deadline = time.monotonic() + STOP_PATIENCE_S
    while state.launcher.is_alive and time.monotonic() < deadline:
        time.sleep(0.1)


def status(values: Mapping[str, object], *, as_json: bool = False) -> Exit:
    return reports.tell(status_of(StateFile(values["run_dir"])), as_json=as_json)


def status_of(state_file: StateFile) -> Status:
    state = state_file.read()
    if state and state.is_broken_off:
        return broken_off_status(state)
    if state and state.main_process.is_elsewhere:
        return Status(runs.ELSEWHERE, phase=state.phase, host=state.main_process.host)
    if state is None or not state.is_alive:
        return Status(runs.NOT_RUNNING)
    if state.phase == SOAK:
        return Status(runs.SOAK, phase=SOAK, since=state.since, pid=state.main_process.pid, log=state.log)
    token = state_file.read_token()
    answers = state.ready and answers_with_model(state.port, token)
    return Status(
        (runs.READY if answers else runs.NOT_ANSWERING) if state.ready else runs.STARTING,
        phase=state.phase, since=state.since, url=f"http://{HOST}:{state.port}/v1", model=state.model,
        pid=state.main_process.pid, log=state.log,
        counters=(counters.fetch(HOST, state.port, token) or counters.Counters()) if answers else None,
    )  # fmt: skip


def broken_off_status(state: State) -> Status:
    what = "soak" if state.phase == SOAK else "start"
    return Status(
        runs.BROKEN_OFF, phase=state.phase, since=state.since, log=state.log,
        why=f"the {what} did not come to its end: {state.launcher.fate}",
        left=describe_remains(state) or "nothing runs any more",
        next="`./start-local.sh` ends what is left and starts; `./start-local.sh stop` only ends it",
    )  # fmt: skip


def answers_with_model(port: int, token: str) -> bool:
    """Whether the server is healthy and offers our model id."""
    if not canary.is_healthy(port):
        return False
    code, body = canary.request(port, "GET", "/v1/models", headers=canary.headers_with(token))
    return code == 200 and MODEL_ID in [entry["id"] for entry in json.loads(body)["data"]]


def reset_cache(values: Mapping[str, object]) -> Exit:
    state_file = StateFile(values["run_dir"])
    state = ready_state(state_file)
    if state is None:
        return Exit.NOT_RUNNING
    service.reset_cache(HOST, state.port, state_file.read_token())
    print("The prefix cache is empty.")
    return Exit.OK


def ask_canary(values: Mapping[str, object]) -> Exit:
    """The questions of the start once more. No prefix is cached on the CPU, so none is compared."""
    state = ready_state(StateFile(values["run_dir"]))
    if state is None:
        return Exit.NOT_RUNNING
    questions = canary.questions_for_start(Path(state.canary or values["canary"]))
    with console.phase("canary"):
        answered = canary.check_answers(state.port, questions, values["api_key"], consequence=canary.IN_SERVICE)
    print_answered("It was asked, and answered correctly:", answered)
    return Exit.OK


def ready_state(state_file: StateFile) -> State | None:
    """Of what runs; None, which is then said, where nothing does."""
    state = state_file.read()
    if state and state.is_broken_off:
        raise LauncherError(
            f"The start was broken off in phase {state.phase} ({state.launcher.fate}); start again.", Exit.SERVER
        )
    if state is None or not state.is_alive:
        print("status:   not running")
        return None
    if not state.ready:
        what = "A soak is under way" if state.phase == SOAK else f"The start is in phase {state.phase}"
        raise LauncherError(f"{what}; wait until it is over.", Exit.STARTING)
    return state


def logs(values: Mapping[str, object], follow: bool) -> Exit:
    """Prints the server's log; with `follow` until the server ends or Ctrl-C."""
    path = values["run_dir"] / "local.log"
    if not path.exists():
        print(f"There is no log yet: {path}", file=sys.stderr)
        return Exit.NOT_RUNNING
    state_file = StateFile(values["run_dir"])
    with path.open(errors="replace") as stream:
        while True:
            is_last = not follow or state_file.read_alive() is None
            sys.stdout.writelines(stream)
            sys.stdout.flush()
            if is_last:
                return Exit.OK
            time.sleep(0.3)
