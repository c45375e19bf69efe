"""What `status` found of a run, on one machine or several."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import ClassVar

from launcher import counters
from launcher.counters import Counters
from launcher.errors import Exit
from launcher.settings import MODEL_ID

NOT_RUNNING, STARTING, READY = "not running", "starting", "ready"
NOT_ANSWERING, STUCK, BROKEN = "not answering", "stuck", "broken"
STOPPING, SOAK, BROKEN_OFF, ELSEWHERE = "stopping", "soak", "broken off", "elsewhere"
SERVES_NOTHING = (STOPPING, SOAK, BROKEN_OFF, ELSEWHERE)
CODES: Mapping[str, Exit] = {
    NOT_RUNNING: Exit.NOT_RUNNING, STARTING: Exit.STARTING, READY: Exit.OK,
    NOT_ANSWERING: Exit.SERVER, STUCK: Exit.SERVER, BROKEN: Exit.SERVER,
    STOPPING: Exit.STARTING, SOAK: Exit.STARTING, BROKEN_OFF: Exit.SERVER, ELSEWHERE: Exit.SERVER,
}  # fmt: skip


@dataclass(frozen=True)
class UnitStatus:
    """One container or process of a cluster."""

    node: int
    address: str
    name: str
    state: str  # runs, ended, gone or not reached
    exit_code: int | None = None

    def __str__(self) -> str:
        spoken = {"ended": f"ended with exit code {self.exit_code}", "not reached": "node not reached"}
        return f"node {self.node} ({self.address}): {self.name}: {spoken.get(self.state, self.state)}"


@dataclass(frozen=True)
class LostGpu:
    node: int
    address: str
    message: str

    def __str__(self) -> str:
        return f"node {self.node} ({self.address}): its container sees no GPU any more ({self.message}); `restart`"


@dataclass(frozen=True)
class Status:
    """None: there is no such thing for this run. The fields are those of the JSON document, but for three."""

    kind: ClassVar[str] = "status"
    status: str
    phase: str | None = None
    since: float | None = None  # wall clock, of the start or of when it became ready
    url: str | None = None
    model: str | None = None
    pid: int | None = None
    log: str | None = None
    record: str | None = None
    host: str | None = None  # where it runs, if that is not this machine
    why: str | None = None  # it was broken off
    left: str | None = None  # of what was broken off
    next: str | None = None  # what to do
    counters: Counters | None = None  # since the server's start; None where it does not answer
    silent_s: int = 0  # so long nothing moved though requests run
    units: Sequence[UnitStatus] = ()
    lost_gpus: Sequence[LostGpu] = ()

    @property
    def code(self) -> Exit:
        return CODES[self.status]

    @property
    def answers(self) -> bool:
        return self.counters is not None

    @property
    def uptime_s(self) -> float | None:
        return None if self.since is None else max(0.0, time.time() - self.since)

    @property
    def problem(self) -> str:
        wrong = [str(one) for one in self.units if one.state != "runs"] + [str(one) for one in self.lost_gpus]
        return {
            NOT_RUNNING: "Nothing runs.", STARTING: f"A start is under way, in phase {self.phase}.", READY: "",
            NOT_ANSWERING: f"What runs does not answer at {self.url}.",
            STUCK: f"Requests run, and nothing was read or written in {self.silent_s} s.",
            BROKEN: f"It is broken: {'; '.join(wrong)}.", STOPPING: "A stop is under way.",
            SOAK: "A soak is under way.", BROKEN_OFF: f"Phase {self.phase} was broken off: {self.why}; {self.left}.",
            ELSEWHERE: f"Phase {self.phase} runs on {self.host}, which cannot be seen from here.",
        }[self.status]  # fmt: skip

    def body(self) -> Mapping[str, object]:
        own = asdict(replace(self, counters=None))
        del own["since"], own["silent_s"]
        numbers = counters.numbers(self.counters) if self.counters is not None else None
        return {**own, "model_id": MODEL_ID, "answers": self.answers, "uptime_s": self.uptime_s, "counters": numbers}

    def text(self) -> str:
        lines = [f"{name + ':':<10}{value}" for name, value in self.rows()]
        return "\n".join([*lines, *(f"{'':<10}{one}" for one in (*self.units, *self.lost_gpus))])

    def rows(self) -> Iterator[tuple[str, object]]:
        yield "status", self.status
        if self.status == NOT_RUNNING:
            return
        yield "phase", self.phase
        if self.status in SERVES_NOTHING:
            yield from self.known("host")
            if self.uptime_s is not None:
                yield "began", f"{duration(self.uptime_s)} ago"
            yield from self.known("pid", "why", "left", "log", "record", "next")
            return
        yield "model id", MODEL_ID
        yield from self.known("model")
        yield "address", self.url
        yield "answers", "yes" if self.answers else "no"
        yield "uptime", duration(self.uptime_s or 0)
        yield from self.known("pid", "log")
        if self.counters is None:
            yield "progress", "none"
        else:
            silence = f", no token in {self.silent_s} s" if self.silent_s else ""
            yield "progress", counters.progress_row(self.counters) + silence
            yield from counters.rows(self.counters)
        yield from self.known("record")

    def known(self, *names: str) -> Iterator[tuple[str, object]]:
        return ((name, getattr(self, name)) for name in names if getattr(self, name) is not None)


def duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else (f"{minutes} min {rest} s" if minutes else f"{rest} s")
