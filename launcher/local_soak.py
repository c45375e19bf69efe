"""The soak of the local topology: the CPU engine's arm, or the server that runs here."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from launcher import console, environment, soak, system_library
from launcher import plan as plans
from launcher.errors import Exit, LauncherError
from launcher.lifecycle import SOAK, clear_remains, ready_state, refuse_elsewhere, signals_interrupt
from launcher.settings import HOST, REPOSITORY
from launcher.soak import Job, Options
from launcher.state import State, StateFile, process_of, this_process

# One arm and its judge; a server with the same model was measured at 2.6 GiB.
ENGINES, ENGINE_GIB = 2, 3
# Of these, more than 200 turns fit into the CPU's contexts.
SESSIONS = 90
# What the server reads in one step: on the CPU, every prompt whole.
CHUNK = 2048


def run(values: Mapping[str, object], ambient: Mapping[str, str], options: Options) -> Exit:
    with signals_interrupt():
        return over_http(values, ambient, options) if options.running else with_engine(values, ambient, options)


def with_engine(values: Mapping[str, object], ambient: Mapping[str, str], options: Options) -> Exit:
    state_file = StateFile(values["run_dir"])
    with state_file.lock():
        refuse_running(state_file)
        soak.refuse_missing_folders()
        soak.refuse_little_memory(ENGINES, ENGINE_GIB, 0)
        folder = prepare(values)
        words = soak.engine_words(options, folder)
        if not options.sessions and not options.plan:
            words += ["--sessions", str(SESSIONS)]
        job = job_of(values, ambient, options, [str(soak.ENGINES), *words], folder)
        state = State(SOAK, values["port"], str(values["model"]), str(folder), time.time(), this_process())
        try:
            return finish(job, options, lambda pid: state_file.write(replace(state, server=process_of(pid))))
        finally:
            state_file.remove()


def refuse_running(state_file: StateFile) -> None:
    refuse_elsewhere(state_file.read(), state_file)
    state = state_file.read_alive()
    if state and not state.is_broken_off:
        raise LauncherError(
            f"soak: a server runs here (port {state.port}) and has the memory; `./start-local.sh stop` first, or "
            f"ask it with `./start-local.sh soak --running`.",
            Exit.BUSY,
        )
    clear_remains(state_file)


def over_http(values: Mapping[str, object], ambient: Mapping[str, str], options: Options) -> Exit:
    state = ready_state(StateFile(values["run_dir"]))
    if state is None:
        return Exit.NOT_RUNNING
    soak.refuse_missing_folders()
    edges = soak.edges_of(HOST, state.port, str(values["api_key"]))
    folder = prepare(values)
    words = http_words(options, folder, state, edges)
    return finish(job_of(values, ambient, options, [str(soak.OVER_HTTP), *words], folder), options)


def http_words(options: Options, folder, state: State, edges: Mapping[str, int]) -> list[str]:
    return soak.words(options, folder, url=f"http://{HOST}:{state.port}/v1", model=state.model, chunk=CHUNK, **edges)


def prepare(values: Mapping[str, object]):
    """The environment, and a folder for what the soak writes."""
    folder = soak.new_folder(values["run_dir"] / "local-soak")
    system_library.bring()
    environment.make_environment(environment.Sources(), values["run_dir"] / "environment.log")
    return folder


def job_of(values, ambient: Mapping[str, str], options: Options, argv: list[str], folder) -> Job:
    inherited, _ = plans.split_environment(ambient)
    settings = plans.serve_environment(values)
    if not options.running:
        settings = {name: value for name, value in settings.items() if name not in plans.secret_names()}
    python = environment.Sources().python
    more = {"PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1"}
    return Job((str(python), "-u", *argv), inherited | settings | more, folder, options.seconds)


def finish(job: Job, options: Options, record: Callable[[int], None] = lambda pid: None) -> Exit:
    console.say(f"Soak, {options.minutes} minutes at most; logs: {job.folder}")
    code, said = soak.run(job, record)
    return soak.conclude(job, options, code, said, {"topology": "local"})
