"""Switches the guards of a running engine on and off, and proves that it does. Each way has CUDA graphs of its own."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

WAYS = {"on": True, "off": False, "again": True}  # name -> with guards? "again" shows what two equal ways differ by


class SwitchError(RuntimeError):
    """One sentence: the engine is not as the switch needs it, or switching changed nothing."""


@dataclass(frozen=True)
class Place:
    """An attribute by which guards go on and off."""

    guards: tuple[str, ...]
    holder: Any
    attribute: str
    values: dict[str, Any]  # by way


def by_guards(on: Any, off: Any) -> dict[str, Any]:
    return {way: on if with_guards else off for way, with_guards in WAYS.items()}


# Where a guard's function is found: name -> (object, attribute)
Functions = dict[str, tuple[Any, str]]


@contextmanager
def counted(functions: Functions) -> Iterator[Counter]:
    """Counts calls by name. Not by sys.setprofile: what torch compiled might run another way under it."""
    counts = Counter(dict.fromkeys(functions, 0))
    with ExitStack() as stack:
        for name, (holder, attribute) in functions.items():
            raw = vars(holder)[attribute] if isinstance(holder, type) else getattr(holder, attribute)
            stack.callback(setattr, holder, attribute, raw)
            setattr(holder, attribute, counting(name, raw, counts))
        yield counts


def counting(name: str, raw: Any, counts: Counter) -> Any:
    is_static = isinstance(raw, staticmethod)
    function = raw.__func__ if is_static else raw

    def call(*args, **kwargs):
        counts[name] += 1
        return function(*args, **kwargs)

    return staticmethod(call) if is_static else call


class Switch:
    """`places` are what differs, `functions` are called where guards work and never where they do not."""

    def __init__(self, places: list[Place], functions: Functions) -> None:
        self.places, self.functions = places, functions
        self.holders: list[tuple[Any, str]] = []  # of CUDA graphs: (object, its attribute that is a dict of them)
        self.graphs: dict[str, list[dict]] = {}  # way -> the dict of each holder
        self.called: dict[str, dict[str, int]] = {}

    @property
    def guards(self) -> list[str]:
        return sorted({name for place in self.places for name in place.guards})

    def to(self, way: str) -> None:
        for place in self.places:
            setattr(place.holder, place.attribute, place.values[way])
        for i, (holder, attribute) in enumerate(self.holders):
            setattr(holder, attribute, self.graphs[way][i])

    def capture(self, holders: list[tuple[Any, str]], capture: Callable[[], None], functions: Functions) -> None:
        """Let `capture` fill the holders once for each way. `functions` are those of the guards inside of graphs.

        Raises SwitchError where it captures nothing, or not the same graphs for each way.
        """
        self.holders = holders
        # Not dropped: with its last graph the memory pool would go that the later ones share.
        self.graphs["start"] = [getattr(holder, attribute) for holder, attribute in holders]
        for way in WAYS:
            self.graphs[way] = [{} for _ in holders]
            with self.proof(way, "capturing graphs", functions):
                capture()
        keys = [[set(graphs) for graphs in self.graphs[way]] for way in WAYS]
        if not any(keys[0]) or any(one != keys[0] for one in keys):
            names = ", ".join(type(holder).__name__ for holder, _ in holders) or "no holder"
            raise SwitchError(f"CUDA graphs: captured {self.counts()} in {names}; each way needs the same ones, and "
                              f"some. See capture_model of vLLM's GPU model runner.")  # fmt: skip

    def counts(self) -> dict[str, int]:
        """Way -> number of CUDA graphs; a graph with breaks counts as one."""
        return {way: sum(map(len, graphs)) for way, graphs in self.graphs.items()}

    @contextmanager
    def proof(self, way: str, doing: str, functions: Functions | None = None) -> Iterator[None]:
        """Raises SwitchError if what is done meanwhile calls a guard without guards, or does not call it with them."""
        self.to(way)
        with counted(self.functions if functions is None else functions) as counts:
            yield
        self.called[f"{way}, {doing}"] = dict(counts)
        if wrong := [name for name, count in counts.items() if (count > 0) != WAYS[way]]:
            raise SwitchError(
                f"{way}: {doing} called guards {dict(counts)} times, but {', '.join(wrong)} must be "
                f"{'above ' if WAYS[way] else ''}0. Only contexts of over 2,048 tokens make the indexer select."
            )


# Of vLLM's engine


def of_engine(llm, is_cuda: bool, planted_us: float = 0) -> Switch:
    """Of an engine in this process that started with all guards. Raises SwitchError where they are not found.

    `planted_us` makes each step with guards so many microseconds longer.
    """
    from vllm_exl3.guards.chunk_ends import WholePools

    places = scheduler_places(llm.llm_engine.engine_core.engine_core.scheduler, planted_us)
    functions = {"chunk-ends": (WholePools, "_reserve_prefill_lookahead")}
    if is_cuda:  # the CPU's attention has no indexer
        places += topk_places()
        functions |= topk_functions()
    return Switch(places, functions)


def scheduler_places(scheduler, planted_us: float = 0) -> list[Place]:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm_exl3 import guards
    from vllm_exl3.guards.chunk_ends import WholePools
    from vllm_exl3.guards.state_blocks import ComputedStates

    guarded = type(scheduler)
    *added, own = guarded.__bases__
    if added != [WholePools, ComputedStates] or own not in (Scheduler, AsyncScheduler):
        raise SwitchError(f"scheduler: found {guarded.__mro__[:4]}, needed vLLM's own under both guards of "
                          f"vllm_exl3.guards.chunk_ends.scheduler; start with all guards.")  # fmt: skip
    # An object changes its class only for one of the same layout: below a class as WholePools is, but empty.
    bases = by_guards((delayed(guarded, planted_us) if planted_us else guarded,), (type("Nothing", (), {}), own))
    # A class for each way, since Python is slower for some steps after a change of class: all ways shall have one.
    classes = {way: type(bases[way][-1].__name__, bases[way], {}) for way in WAYS}
    asks = by_guards(True, scheduler.splits_at_blocks)  # state_blocks makes vLLM ask about splits
    return [
        Place((guards.CHUNK_ENDS, guards.STATE_BLOCKS), scheduler, "__class__", classes),
        Place((guards.STATE_BLOCKS,), scheduler, "need_mamba_block_aligned_split", asks),
    ]


def delayed(scheduler: type, microseconds: float) -> type:
    """The scheduler with a planted cost of each step."""

    class Delayed(scheduler):
        def schedule(self, *args, **kwargs):
            end = time.perf_counter() + microseconds / 1e6
            while time.perf_counter() < end:
                pass
            return super().schedule(*args, **kwargs)

    return Delayed


def topk_places() -> list[Place]:
    import torch
    from vllm.models.glm5next.nvidia import sparse_indexer
    from vllm.models.glm5next.nvidia.ops import kpool_compress
    from vllm_exl3 import guards
    from vllm_exl3.guards import topk_ids

    ids, expand = sparse_indexer.torch, kpool_compress.expand_pools_and_append_tail
    # All functions that `bounded` makes have the same code.
    is_bounded = getattr(expand, "__code__", None) is topk_ids.bounded(len).__code__
    if not isinstance(ids, topk_ids.FilledIds) or not is_bounded:
        raise SwitchError(f"topk-ids: found {ids} and {expand}, needed what vllm_exl3.guards.topk_ids puts there; "
                          f"start with all guards.")  # fmt: skip
    name = (guards.TOPK_IDS,)
    return [
        Place(name, sparse_indexer, "torch", by_guards(ids, torch)),
        Place(name, kpool_compress, "expand_pools_and_append_tail", by_guards(expand, expand.__wrapped__)),
    ]


def topk_functions() -> Functions:
    """With the guard in place."""
    from vllm.models.glm5next.nvidia.ops import kpool_compress
    from vllm_exl3.guards import topk_ids

    (original,) = kpool_compress.expand_pools_and_append_tail.__closure__  # what the guard calls, and off does not use
    return {"topk-ids fills": (topk_ids.FilledIds, "empty"), "topk-ids bounds": (original, "cell_contents")}


def capture_graphs(llm, switch: Switch) -> None:
    """Capture the CUDA graphs of each way, as vLLM's worker did at the start. No request may be there."""
    from vllm.utils.gc_utils import freeze_gc_heap

    (worker,) = llm.collective_rpc(lambda worker: worker)
    runner = worker.model_runner

    def capture() -> None:
        with runner.eplb.suppress():
            runner.capture_model()

    switch.to("on")
    switch.capture(graph_holders(runner), capture, topk_functions())
    freeze_gc_heap()  # as after the start: capturing ended that


def graph_holders(runner) -> list[tuple[Any, str]]:
    """(object, its attribute that is a dict of CUDA graphs) of all that hold some.

    By attributes and not by gc.get_objects: that does not know the objects which vLLM froze after its start.
    """
    from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
    from vllm.compilation.cuda_graph import CUDAGraphWrapper
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    owners = [one for one in (runner, getattr(runner, "speculator", None)) if one is not None]
    managers = {id(one): one for owner in owners for one in vars(owner).values() if isinstance(one, CudaGraphManager)}
    return [
        *((one, "graphs") for one in managers.values()),
        *((one, "entries") for one in BreakableCUDAGraphWrapper._all_instances),
        *((one, "concrete_cudagraph_entries") for one in CUDAGraphWrapper._all_instances),
    ]
