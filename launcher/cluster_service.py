"""What is done with a cluster that runs and keeps running: questions to it, and emptying its prefix cache."""

from __future__ import annotations

from urllib.parse import urlsplit

from launcher import cached_prefix, canary, console, service
from launcher.cluster_life import CANARY_TOKENS, STOP, files_of, questions_of
from launcher.cluster_state import ClusterState
from launcher.errors import Exit, LauncherError
from launcher.lifecycle import SOAK, print_answered


def reset_cache(config) -> Exit:
    state = running(config)
    if state is None:
        return Exit.NOT_RUNNING
    service.reset_cache(*address_of(state), token_of(state))
    print("The prefix cache is empty; what was cached is read anew when it is asked again.")
    return Exit.OK


def ask(config) -> Exit:
    """The short questions of a start, and one of a few blocks of the cache; the long ones would take too much of it."""
    state = running(config)
    if state is None:
        return Exit.NOT_RUNNING
    door = cached_prefix.Door(
        *address_of(state), str(config["VLLM_API_KEY"] or ""), CANARY_TOKENS, config["CANARY_TIMEOUT_S"],
        canary.IN_SERVICE,
    )  # fmt: skip
    questions = [question for question in questions_of(config) if question.kind != canary.LONG]
    console.say(
        f"Asks two short questions, and one of {cached_prefix.BLOCKS} blocks of the prefix cache twice; each answer is "
        f"cut at {CANARY_TOKENS:,} tokens."
    )
    with console.phase("canary"):
        answered = cached_prefix.ask_all(questions, door)
    print_answered("It was asked, and answered correctly:", answered)
    return Exit.OK


def running(config) -> ClusterState | None:
    """What runs; None, which is then said, where nothing does."""
    state = files_of(config).read_state()
    if state is None:
        print("status:   not running")
    elif state.is_broken_off:
        raise LauncherError(
            f"Phase {state.phase} was broken off ({state.launcher.fate}); `{console.program()}` ends what is left and "
            f"starts.",
            Exit.SERVER,
        )
    elif not state.ready:
        other = state.phase in (STOP, SOAK)
        what = f"A {state.phase} is under way" if other else f"The start is in phase {state.phase}"
        raise LauncherError(f"{what}; wait until it is over.", Exit.STARTING)
    return state


def address_of(state: ClusterState) -> tuple[str, int]:
    door = urlsplit(state.url)
    return door.hostname, door.port


def token_of(state: ClusterState) -> str:
    if not state.token:
        raise LauncherError(
            f"cache reset: {state.env_file or 'the state of the run'} holds no {service.TOKEN_NAME}, which a start "
            f"writes; `restart` makes a new one.",
            Exit.SERVER,
        )
    return state.token
