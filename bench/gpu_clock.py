"""Times of calls on a GPU, by CUDA events. No call finds in the cache what the one before it left there."""

import statistics
from collections.abc import Callable

import torch

Calls = list[Callable[[], torch.Tensor]]
ROUNDS = 20
FLUSH_BYTES = 2**28  # several times the cache
COPY_BYTES = 2**31


class Gpu:
    """The device and its clock. Times are medians, in microseconds of one call."""

    device = "cuda"

    def __init__(self) -> None:
        self.name, self.major = torch.cuda.get_device_name(), torch.cuda.get_device_capability()[0]
        self.other = torch.zeros(FLUSH_BYTES // 4, device=self.device)

    def replayed(self, calls: Calls) -> tuple[float, list[torch.Tensor]]:
        """For calls captured one after the other in one graph; also what its last replay gave."""
        for call in calls:
            call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = [call() for call in calls]
        for out in outs:
            out.fill_(float("nan"))
        return self._median([graph.replay], ROUNDS) / len(calls), outs

    def called(self, calls: Calls) -> tuple[float, list[torch.Tensor]]:
        """For calls that the host makes one by one; also what they gave."""
        for call in calls:
            call()
        return self._median(calls, max(3, ROUNDS // 2 // len(calls))), [call() for call in calls]

    def copy_rate(self) -> float:
        """Bytes read and written per second by a large copy."""
        source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=self.device)
        target = source.clone()
        return 2 * COPY_BYTES / self._median([lambda: target.copy_(source)], ROUNDS // 2) * 1e6

    def _median(self, calls: list[Callable], rounds: int) -> float:
        spans = []
        for call in calls * rounds:
            # Read, not written: nothing is left to be written back in the time of the call.
            self.other.sum()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            spans.append((start, end))
        torch.cuda.synchronize()
        return 1e3 * statistics.median(start.elapsed_time(end) for start, end in spans)
