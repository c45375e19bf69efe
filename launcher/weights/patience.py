"""Waiting for the Hub: how long it asks for, all streams together, said once, with what is left of it on the screen."""

from __future__ import annotations

import email.utils
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timezone

from launcher import console
from launcher.weights.meter import duration

ATTEMPTS = 8  # without a byte between them
LIST_ATTEMPTS = 5  # of what sends no bytes
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0
LONGEST_NAMED_WAIT_S = 900.0  # three of the Hub's windows; what is longer is asked again then
TICK_S = 0.5
LIMITED = (429, 503)  # of which all streams learn at once

# An item of RateLimit (draft-ietf-httpapi-ratelimit-headers) and its parameters; names may hold commas.
ITEM = re.compile(r'(?:"(?:[^"\\]|\\.)*"|[^,"])+')
PARAMETER = re.compile(r';\s*([a-z]+)\s*=\s*"?([^";,\s]+)"?')


class Passing(Exception):
    """Something that another attempt may cure, after `wait` where the server named one."""

    def __init__(self, what: str, status: int = 0, wait: Wait | None = None):
        super().__init__(what)
        self.status = status
        self.wait = wait or Wait()


class Stopped(Exception):
    """The whole download ends; the part stays."""


# What a server asks for. Pure.


@dataclass(frozen=True)
class Wait:
    """`seconds`: None where nothing usable was named; `said`: what was, and what became of it."""

    seconds: float | None = None
    said: str = ""


def wait_of(status: int, headers: Mapping[str, str]) -> Wait:
    """From Retry-After (seconds or a date) and, where a limit is used up, RateLimit; the longer of both."""
    named = {"Retry-After": retry_after(headers)}
    if status in LIMITED:
        named["RateLimit"] = until_reset(headers.get("RateLimit", ""))
    seconds = [one for one in named.values() if one is not None]
    if not seconds:
        unread = headers.get("Retry-After", "")
        return Wait(None, f"its Retry-After {unread[:40]!r} is no time" if unread else "")
    if max(seconds) > LONGEST_NAMED_WAIT_S:
        asked = f"it asks for {duration(max(seconds))}, and is asked again after {duration(LONGEST_NAMED_WAIT_S)}"
        return Wait(LONGEST_NAMED_WAIT_S, asked)
    return Wait(max(seconds), policy_of(headers.get("RateLimit-Policy", "")))


def retry_after(headers: Mapping[str, str]) -> float | None:
    text = headers.get("Retry-After", "").strip()
    if re.fullmatch(r"\d{1,12}(\.\d{1,6})?", text):
        return float(text)
    then, now = (seconds_of(one) for one in (text, headers.get("Date", "")))
    # By the server's own clock, where it tells it: this machine's may be wrong.
    return None if then is None else max(0.0, then - (time.time() if now is None else now))


def seconds_of(date: str) -> float | None:
    try:
        found = email.utils.parsedate_to_datetime(date)
        return (found if found.tzinfo else found.replace(tzinfo=timezone.utc)).timestamp()
    except (ValueError, TypeError, OverflowError, IndexError):
        return None


def until_reset(text: str) -> float | None:
    """Seconds until the last of the limits with nothing left lets requests through; None where none is used up."""
    limits = [dict(PARAMETER.findall(item)) for item in ITEM.findall(text)]
    resets = [limit.get("t", "") for limit in limits if limit.get("r") == "0"]
    # A second more, since the header rounds.
    return max((float(reset) + 1 for reset in resets if re.fullmatch(r"\d{1,12}", reset)), default=None)


def policy_of(text: str) -> str:
    """The limit in words: its quota in its window."""
    for item in ITEM.findall(text):
        limit = dict(PARAMETER.findall(item))
        if limit.get("q", "").isdigit() and limit.get("w", "").isdigit():
            return f"its limit is {limit['q']} requests in {duration(int(limit['w']))}"
    return ""


# Waiting


class Gate:
    """Until when nobody asks, since the Hub said so to one of the streams."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.clock = clock
        self.until = 0.0
        self.mutex = threading.Lock()

    @property
    def left_s(self) -> float:
        return max(0.0, self.until - self.clock())

    def shut(self, seconds: float) -> bool:
        """Whether that is news: others may have been told the same."""
        with self.mutex:
            until = self.clock() + seconds
            is_news = self.left_s == 0 or until > self.until + 1
            self.until = max(self.until, until)
            return is_news

    def pass_through(self, stop: threading.Event) -> None:
        """Waits as long as it is shut. Raises Stopped."""
        while left := self.left_s:
            if stop.wait(min(left, TICK_S)):
                raise Stopped

    def text(self) -> str:
        left = self.left_s
        return f"; waits for the Hub, {clock_of(left)} left" if left >= 1 else ""


def clock_of(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


GATE = Gate()


def patiently(
    what: str, attempt: Callable[[], None], stop: threading.Event, arrived: Callable[[], int], attempts: int
) -> None:
    """`attempt`, repeated after named waits. Raises its last Passing after `attempts` in a row without more of what
    has `arrived`, and Stopped."""
    failures = 0
    while True:
        GATE.pass_through(stop)
        before = arrived()
        try:
            attempt()
            return
        except Passing as error:
            failures = 1 if arrived() > before else failures + 1
            if failures > attempts:
                raise
            pause(what, error, f"{failures} of {attempts}", own_wait_s(failures), stop)


def own_wait_s(failures: int) -> float:
    return min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** (failures - 1))


def pause(what: str, error: Passing, count: str, own_s: float, stop: threading.Event) -> None:
    wait_s = own_s if error.wait.seconds is None else error.wait.seconds
    said = f" ({error.wait.said})" if error.wait.said else ""
    text = f"{what}: {error}{said}; trying again in {wait_s:.3g} s ({count})"
    if error.status in LIMITED:
        # The others would only be refused, too.
        if GATE.shut(wait_s):
            console.say(text + (", all streams together" if wait_s >= 1 else ""))
        return
    console.say(text)
    if stop.wait(wait_s):
        raise Stopped from error


def seen_waiting(name: str, work: Callable[[], None]) -> None:
    """`work` in a thread, with a line of progress for as long as it waits. Ctrl-C ends both."""
    done, failed = threading.Event(), []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # raised again where Ctrl-C is heard
            failed.append(error)
        done.set()

    threading.Thread(target=run, daemon=True).start()
    if not done.wait(TICK_S) and GATE.left_s:
        with console.phase(name) as progress:
            while not done.wait(TICK_S):
                progress.tick(GATE.text().removeprefix("; "))
    done.wait()
    if failed:
        raise failed[0]
