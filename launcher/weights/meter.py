"""Progress of bytes: how much of how much, how fast lately, how long still; and work in threads under it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

from launcher import console

WINDOW_S = 20.0
TICK_S = 0.5
UNITS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


class Meter:
    """Counts bytes from any thread."""

    def __init__(self, total: int, done: int = 0, clock: Callable[[], float] = time.monotonic):
        self.total = total
        self.done = done
        self.clock = clock
        self.mutex = threading.Lock()
        self.note = lambda: ""  # what is to be said behind the numbers
        self.marks: deque[tuple[float, int]] = deque([(clock(), done)])

    def add(self, count: int) -> None:
        with self.mutex:
            self.done += count

    def text(self) -> str:
        now = self.clock()
        self.marks.append((now, self.done))
        while len(self.marks) > 2 and now - self.marks[1][0] > WINDOW_S:
            self.marks.popleft()
        began, before = self.marks[0]
        rate = (self.done - before) / (now - began) if now > began else 0.0
        left = f", {duration((self.total - self.done) / rate)} left" if rate > 0 else ""
        return f"{size(self.done)} of {size(self.total)}, {size(rate)}/s{left}{self.note()}"


def size(count: float) -> str:
    for word, unit in UNITS:
        if abs(count) >= unit:
            return f"{count / unit:.1f} {word}"
    return f"{count:.0f} B"


def duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min" if minutes else f"{seconds:.0f} s"


def work(name: str, meter: Meter, jobs: Sequence[Callable], workers: int, stop: threading.Event) -> list:
    """Results of the jobs, `workers` at a time, under a line of progress. The first error stops the others."""
    pool = ThreadPoolExecutor(max(1, workers))
    with console.phase(name) as progress:
        futures = [pool.submit(job) for job in jobs]
        try:
            waiting = set(futures)
            while waiting:
                done, waiting = wait(waiting, TICK_S, FIRST_EXCEPTION)
                progress.tick(meter.text())
                for future in done:
                    future.result()
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
    return [future.result() for future in futures]
