"""Samples the SM clock of every node's GPU while something else goes on."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from launcher import remote
from launcher.probe import number
from launcher.remote import Node
from launcher.running_checks import ClockSample

SAMPLE_EVERY_S = 0.5
FIELDS = "clocks.sm,clocks.max.sm,utilization.gpu"
QUERY = ("nvidia-smi", f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits")


@contextmanager
def sampled(nodes: Sequence[Node]) -> Iterator[Mapping[int, Sequence[ClockSample]]]:
    """Yields rank -> samples, which grow until the block ends; ranks without nvidia-smi stay without samples."""
    samples: dict[int, list[ClockSample]] = {}
    over = threading.Event()

    def sample_until_over(node: Node) -> None:
        while not over.is_set():
            result = remote.run(node, QUERY, timeout_s=5)
            if result.code == remote.NOT_FOUND:
                return
            if result.ok:
                samples.setdefault(node.rank, []).append(read_sample(result.stdout.decode(errors="replace")))
            over.wait(SAMPLE_EVERY_S)

    threads = [threading.Thread(target=sample_until_over, args=(node,), daemon=True) for node in nodes]
    for thread in threads:
        thread.start()
    try:
        yield samples
    finally:
        over.set()
        for thread in threads:
            thread.join()


def read_sample(text: str) -> ClockSample:
    """Of the first GPU; a Spark has one."""
    values = [number(value.strip()) for value in text.partition("\n")[0].split(",")]
    return ClockSample(*(values if len(values) == 3 else (None, None, None)))
