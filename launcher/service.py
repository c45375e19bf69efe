"""Empties the prefix cache of a running server, through the route that the plugin adds to it."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager

from launcher import canary, console, counters
from launcher.errors import Exit, LauncherError

# As overlay/vllm_exl3/service.py has them.
RESET_PATH = "/exl3/cache/reset"
TOKEN_NAME = "EXL3_ADMIN_TOKEN"

WAIT_S, POLL_S = 30, 1
REQUEST_TIMEOUT_S = 20


def reset_cache(host: str, port: int, token: str) -> None:
    """Waits a while for a moment in which no answer holds a part of the cache. Raises LauncherError."""
    deadline = time.monotonic() + WAIT_S
    with console.phase("cache reset") as progress:
        while not is_emptied(host, port, token):
            running = (counters.fetch(host, port, token) or counters.Counters()).of(counters.RUNNING)
            if time.monotonic() > deadline:
                raise LauncherError(
                    f"cache reset: nothing was emptied, since requests were running for {WAIT_S} s ({running:.0f} "
                    f"now); try again when they pause.",
                    Exit.BUSY,
                )
            progress.tick(f"{running:.0f} running")
            time.sleep(POLL_S)


def is_emptied(host: str, port: int, token: str) -> bool:
    with told_as_server_error():
        status, body = canary.request(
            port, "POST", RESET_PATH, headers=canary.headers_with(token), timeout_s=REQUEST_TIMEOUT_S, host=host
        )
        if status == 200:
            return bool(json.loads(body)["emptied"])
    raise LauncherError(f"cache reset: {refusal_of(status)}.", Exit.SERVER)


def refusal_of(status: int) -> str:
    if status == 404:
        return "the server has no route for it, its plugin is another than this checkout's; install that and restart"
    if status == 401:
        return "the server refused the token, so another start made it than this folder's; `restart` makes a new one"
    return f"the server answered with status {status}; look at the log"


@contextmanager
def told_as_server_error() -> Iterator[None]:
    try:
        yield
    except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
        raise LauncherError(
            f"cache reset: no answer ({type(error).__name__}: {error}); `status` tells whether the server runs.",
            Exit.SERVER,
        ) from error
