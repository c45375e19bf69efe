"""bench/guards.py without a GPU: an engine whose steps take given times, in a process as a real one has it."""

import gc
import json
import random
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1] / "bench"), str(HERE)]

import fake_guards_engine
import guard_switch
import guards
import paired
from fake_guards_engine import GUARD, FakeEngine, FakeTexts
from guard_switch import WAYS, Place, Switch, SwitchError, by_guards
from guards_engine import MEASURES, ORDERS, SHORT, TRIED, UNTIMED, Player, Sizes
from paired import LEAST_PAIRS, Comparison, interval


def bench(tmp_path, *arguments, **setting):
    """Exit code of the whole command with fake engines; five rounds are as many pairs as a verdict needs."""
    argv = ["--work", str(tmp_path), "--json", str(tmp_path / "guards.json"), "--rounds", "5", *arguments]
    program = [sys.executable, "-u", str(HERE / "fake_guards_engine.py"), json.dumps(setting)]
    return guards.main(argv, program)


def numbers(tmp_path):
    report = json.loads((tmp_path / "guards.json").read_text())
    return report, {one["name"]: one for one in report["measures"]}


# The command


def test_guards_that_cost_nothing_pass(tmp_path, capsys):
    assert bench(tmp_path, "--seconds", "30", "--commit", "abc123", guard_ms=0.0, cold_ms=5.0) == 0
    said, (report, by_name) = capsys.readouterr().out, numbers(tmp_path)
    assert said.count("PASS decode") == said.count("PASS prefill") == 2 and "FAIL" not in said
    assert [line.split(" | ")[0] for line in said.splitlines() if line.startswith("| ")][2:] == [
        f"| {name}" for name in MEASURES
    ]
    assert {one["ratio"] for one in by_name.values()} == {one["control"] for one in by_name.values()} == {1.0}
    assert by_name["decode 8"]["rates"]["on"] == pytest.approx([8000.0] * 5 * 60)  # a step takes 1 ms
    assert by_name["prefill"]["rates"]["on"] == pytest.approx([2_000_000.0] * 5 * 6)  # not one of them is cold
    assert report["tokens_per_step"]["decode 8"] == {"on": 8.0, "off": 8.0, "again": 8.0}
    assert report["exit_code"] == 0 and report["versions"]["commit"] == "abc123"
    assert report["engine"]["switched"] == ["fake"] and all(report["engine"]["answers_as_on"].values())
    called = {what.split(",")[0]: counts["guard"] for what, counts in report["engine"]["calls"].items()}
    assert called["on"] > 0 and called["again"] > 0 and called["off"] == 0
    assert report["command"].startswith("python3 bench/guards.py --work")


def test_a_guard_that_costs_more_than_a_bar_fails_that_bar_only(tmp_path, capsys):
    """1.5 % more for each step: above decoding's bar, below prefill's."""
    assert bench(tmp_path, "--seconds", "30", guard_ms=0.015) == guards.MISSED
    said, (_, by_name) = capsys.readouterr().out, numbers(tmp_path)
    assert said.count("FAIL decode") == 2 and said.count("PASS prefill") == 2
    assert by_name["decode 1"]["ratio"] == pytest.approx(1 / 1.015)
    assert by_name["decode 1"]["control"] == 1.0


def test_a_guard_that_sleeps_fails_every_bar(tmp_path, capsys):
    sizes = "--rounds", "3", "--prompt-tokens", "4000"
    assert bench(tmp_path, "--seconds", "60", *sizes, step_ms=1.0, guard_ms=1.0, sleeps=True, groups=10) in (1, 3)
    _, by_name = numbers(tmp_path)
    assert {one["verdict"] for one in by_name.values()} <= {"FAIL", "NONE"}
    assert all(0.4 < one["ratio"] < 0.9 for one in by_name.values())


def test_a_time_that_is_too_short_gives_no_verdict(tmp_path, capsys):
    assert bench(tmp_path, "--rounds", "1", "--seconds", "30") == guards.FAILED
    assert f"NONE prefill: 6 pairs, {LEAST_PAIRS} are needed" in capsys.readouterr().out


def test_what_was_timed_before_the_time_was_over_counts(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(guards, "END_S", 0)
    assert bench(tmp_path, "--seconds", "2.5", "--rounds", "9", fail="hang in round 6") == 0
    assert "the time is over within a turn" in capsys.readouterr().out
    assert numbers(tmp_path)[1]["prefill"]["pairs"] == 5 * 6


@pytest.mark.parametrize(
    ("fail", "seconds", "words"),
    [("start", "30", ("the engine ended with 1", "no GPU today")), ("turn", "30", ("ended with 1", "out of memory")),
     ("never up", "1", ("the time is over (--seconds 1)",)),
     ("stuck", "30", ("SwitchError: off: every measure once called guards", "but guard must be 0"))],
)  # fmt: skip
def test_an_engine_that_fails_is_told_with_its_log(tmp_path, capsys, fail, seconds, words):
    assert bench(tmp_path, "--seconds", seconds, fail=fail) == guards.FAILED
    told = capsys.readouterr().err
    assert all(word in told for word in words) and not (tmp_path / "guards.json").exists()


def test_wrong_usage_is_told(tmp_path, capsys, monkeypatch):
    with pytest.raises(SystemExit):
        guards.arguments(["--drafts", "dflash7", "--draft-models", str(tmp_path / "none")])
    assert "none: no such folder" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        guards.arguments(["--json", str(tmp_path)])
    assert "cannot be written" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        guards.arguments(["--drafts", "mtp3"])
    assert "invalid choice: 'mtp3'" in capsys.readouterr().err
    monkeypatch.setenv("EXL3_GUARDS_OFF", "topk-ids")
    with pytest.raises(SystemExit) as ended:
        guards.arguments(["--work", str(tmp_path)])
    assert ended.value.code == guards.USAGE and "EXL3_GUARDS_OFF is topk-ids" in capsys.readouterr().err


# Switching


class FakeGraphs:
    """A holder of graphs, as vLLM's are: a graph is what ran while it was captured."""

    def __init__(self, engine: FakeEngine, sizes=(1, 2, 4)) -> None:
        self.engine, self.sizes, self.graphs = engine, sizes, {}
        self.capture()

    def capture(self) -> None:
        for size in self.sizes:
            assert size not in self.graphs, "captured already"
            self.engine.step()
            self.graphs[size] = f"guarded {self.engine.is_guarded}, of {id(self.graphs)}"


def captured(engine: FakeEngine, graphs: FakeGraphs) -> Switch:
    switch = fake_guards_engine.switch(engine)
    switch.capture([(graphs, "graphs")], graphs.capture, GUARD)
    return switch


def test_each_way_has_graphs_of_its_own():
    engine = FakeEngine()
    graphs = FakeGraphs(engine)
    first, switch = graphs.graphs, captured(engine, graphs)
    found = {}
    for way in (*WAYS, *WAYS):
        switch.to(way)
        assert engine.is_guarded is WAYS[way] and found.setdefault(way, graphs.graphs) is graphs.graphs
        assert {graph.split(",")[0] for graph in graphs.graphs.values()} == {f"guarded {WAYS[way]}"}
    assert len({id(one) for one in found.values()}) == 3 and switch.graphs["start"] == [first]
    assert switch.counts() == {"start": 3, "on": 3, "off": 3, "again": 3}
    assert switch.called["off, capturing graphs"] == {"guard": 0}
    assert switch.called["on, capturing graphs"] == {"guard": 3}


def test_a_capture_that_is_not_the_same_for_all_ways_is_refused():
    engine = FakeEngine()
    graphs = FakeGraphs(engine)
    capture = graphs.capture

    def fewer() -> None:
        graphs.sizes = (1, 2) if not engine.is_guarded else (1, 2, 4)
        capture()

    graphs.capture = fewer
    with pytest.raises(SwitchError, match="'off': 2, 'again': 3"):
        captured(engine, graphs)
    graphs.capture = lambda: engine.step()
    with pytest.raises(SwitchError, match="'on': 0"):
        captured(engine, graphs)


def test_a_switch_that_changes_nothing_is_refused():
    """Planted: off leaves the guard, and on does not bring it back."""
    engine = FakeEngine()
    stuck = fake_guards_engine.switch(engine, off=True)
    with stuck.proof("on", "a step"):
        engine.step()
    with pytest.raises(SwitchError, match=r"off: a step called guards .*'guard': 1"), stuck.proof("off", "a step"):
        engine.step()
    never = Switch([Place(("fake",), engine, "is_guarded", by_guards(False, False))], GUARD)
    with pytest.raises(SwitchError, match=r"on: a step .* but guard must be above 0"), never.proof("on", "a step"):
        engine.step()
    assert FakeEngine.guard.__name__ == "guard"  # nothing counts any longer


@pytest.fixture(scope="module")
def made():
    """Makes schedulers as an engine does, with vLLM's own classes."""
    pytest.importorskip("vllm")
    from schedulers import Case, engine_config, start

    config = engine_config()
    return lambda make, **case: start(make, config, Case(budget=310, **case))


def chunk_ends_of(run) -> list[int]:
    before = len(run.chunks)
    run.add("one", [1] * 1000, 1), run.add("two", [2] * 1000, 1)
    ends = [chunk.start + chunk.count for chunk in run.finish()[before:] if chunk.prefill]
    return [end for end in ends if end < 1000]


def test_the_real_scheduler_changes_its_class(made):
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm_exl3.guards import chunk_ends

    run = made(chunk_ends.scheduler)
    switch = Switch(guard_switch.scheduler_places(run.scheduler),
                    {"chunk-ends": (chunk_ends.WholePools, "_reserve_prefill_lookahead")})  # fmt: skip
    assert switch.guards == ["chunk-ends", "state-blocks"]
    changed = ("_reserve_prefill_lookahead", "_preempt_request", "_mamba_block_aligned_split")
    with switch.proof("off", "prompts"):
        assert all(getattr(type(run.scheduler), name) is getattr(Scheduler, name) for name in (*changed, "schedule"))
        assert any(end % 4 for end in chunk_ends_of(run))
    off = type(run.scheduler)
    with switch.proof("again", "prompts"):
        assert all(getattr(type(run.scheduler), name) is not getattr(off, name) for name in changed)
        ends = chunk_ends_of(run)
    assert ends and not any(end % 4 for end in ends)


def test_off_is_vllm_s_own_without_the_prefix_cache_too(made):
    """There vLLM does not split prompts at blocks, and does not ask."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm_exl3.guards import chunk_ends

    run = made(chunk_ends.scheduler, align=False, block=64)
    switch = Switch(guard_switch.scheduler_places(run.scheduler), {})
    ends = {}
    for way in ("off", "on"):
        switch.to(way)
        ends[way] = chunk_ends_of(run)
    assert ends["off"] == chunk_ends_of(made(Scheduler, align=False, block=64)) != ends["on"]


def test_a_planted_cost_is_in_each_step_with_guards(made):
    from vllm_exl3.guards import chunk_ends

    run = made(chunk_ends.scheduler)
    switch = Switch(guard_switch.scheduler_places(run.scheduler, planted_us=20_000), {})
    took = {}
    for way in WAYS:
        switch.to(way)
        begin = time.perf_counter()
        run.scheduler.schedule()
        took[way] = time.perf_counter() - begin
    assert min(took["on"], took["again"]) >= 0.02 > took["off"]


def test_a_scheduler_without_guards_is_refused(made, monkeypatch):
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm_exl3 import switches
    from vllm_exl3.guards import chunk_ends

    with pytest.raises(SwitchError, match=r"scheduler: found .*Scheduler.*start with all guards"):
        guard_switch.scheduler_places(made(Scheduler).scheduler)
    monkeypatch.setattr(chunk_ends, "switches", lambda: switches.parse({"EXL3_GUARDS_OFF": "state-blocks"}))
    with pytest.raises(SwitchError, match="start with all guards"):
        guard_switch.scheduler_places(made(chunk_ends.scheduler).scheduler)


@pytest.fixture
def selecting(made, monkeypatch):
    """Does what the indexer does in vLLM's own modules with the guard in place: one allocation, one expansion."""
    import torch
    from vllm.models.glm5next.nvidia import sparse_indexer
    from vllm.models.glm5next.nvidia.ops import kpool_compress
    from vllm_exl3.guards import topk_ids

    # For the original, which is a Triton kernel.
    monkeypatch.setattr(kpool_compress, "expand_pools_and_append_tail", topk_ids.bounded(lambda ids, *_: ids))

    def select():
        ids = sparse_indexer.torch.empty((1, 2), dtype=torch.int32).fill_(9)
        return kpool_compress.expand_pools_and_append_tail(ids, torch.tensor([8]), 4).tolist()

    return select


def test_pool_ids_are_switched_in_vllm_s_own_modules(selecting):
    from vllm_exl3.guards import topk_ids

    switch = Switch(guard_switch.topk_places(), guard_switch.topk_functions())
    for way in ("off", "on", "off", "again"):
        with switch.proof(way, "selecting"):
            assert selecting() == ([[-1, -1]] if WAYS[way] else [[9, 9]])
    assert switch.called["on, selecting"] == {"topk-ids fills": 1, "topk-ids bounds": 1}
    assert isinstance(vars(topk_ids.FilledIds)["empty"], staticmethod)
    switch.to("off")
    with pytest.raises(SwitchError, match=r"topk-ids: found .*start with all guards"):
        guard_switch.topk_places()
    switch.to("on")


def test_graphs_of_a_runner_are_captured_with_guards_and_without(made, selecting):
    """vLLM's own holders and modules, a runner that only calls them."""
    from contextlib import nullcontext

    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
    from vllm_exl3.guards import chunk_ends

    manager = CudaGraphManager.__new__(CudaGraphManager)

    class Runner:
        eplb = SimpleNamespace(suppress=nullcontext)

        def __init__(self) -> None:
            self.cudagraph_manager, self.speculator, manager.graphs = manager, None, {1: "the start's"}

        def capture_model(self) -> None:
            assert 1 not in manager.graphs
            manager.graphs[1] = selecting()

    worker = SimpleNamespace(model_runner=Runner())
    core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=made(chunk_ends.scheduler).scheduler))
    llm = SimpleNamespace(llm_engine=SimpleNamespace(engine_core=core), collective_rpc=lambda call: [call(worker)])
    switch = guard_switch.of_engine(llm, is_cuda=True)
    assert switch.guards == ["chunk-ends", "state-blocks", "topk-ids"]
    try:
        guard_switch.capture_graphs(llm, switch)
    finally:
        gc.unfreeze()
    found = {}
    for way in ("off", "on", "again"):
        switch.to(way)
        found[way] = manager.graphs
    assert found == {"off": {1: [[9, 9]]}, "on": {1: [[-1, -1]]}, "again": {1: [[-1, -1]]}}


def test_holders_of_graphs_are_found_at_the_runner_and_its_speculator(made):
    from vllm.compilation.cuda_graph import CUDAGraphWrapper
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    managers = [CudaGraphManager.__new__(CudaGraphManager) for _ in range(2)]
    runner = SimpleNamespace(cudagraph_manager=managers[0], speculator=SimpleNamespace(query=managers[1], other=1))
    assert guard_switch.graph_holders(runner)[:2] == [(one, "graphs") for one in managers]
    wrapper = CUDAGraphWrapper.__new__(CUDAGraphWrapper)
    CUDAGraphWrapper._all_instances.add(wrapper)
    found = guard_switch.graph_holders(SimpleNamespace(cudagraph_manager=managers[0], speculator=None))
    assert found[0] == (managers[0], "graphs") and found[-1] == (wrapper, "concrete_cudagraph_entries")


# One engine


def player(engine=None, **sizes):
    engine = engine or FakeEngine(step_s=0.5)
    switch = fake_guards_engine.switch(engine)
    return Player(engine, switch, FakeTexts(), Sizes(**sizes), sampling=lambda tokens: tokens, clock=engine.clock)


def test_each_step_that_decodes_is_timed_over_the_same_requests_for_all_ways():
    one, groups = player(), MEASURES["decode 8"].groups
    assert one.play("decode 8", 0) == [{way: {"tokens": 8, "seconds": 0.5, "steps": 1} for way in WAYS}] * groups
    assert one.steps == 1 + len(WAYS) * (UNTIMED[False] + groups) and len(one.engine.requests) == 8
    assert len(one.engine.prompts) == 8 and {len(prompt) for prompt in one.engine.prompts} == {SHORT}
    one.play("decode 8", 1), one.play("decode 1", 1)
    assert len(one.engine.prompts) == 8 + 8 + 1 and len(one.engine.requests) == 1


def test_ways_alternate_in_all_orders_with_their_guards():
    one, seen = player(), []
    step = one.engine.step
    to = one.switch.to
    one.switch.to = lambda way: (seen.append([way, []]), to(way))
    one.engine.step = lambda: (seen[-1][1].append(one.engine.is_guarded) if seen else None, step())[1]
    one.play("decode 1", 0)
    assert all(guarded == [WAYS[way]] * len(guarded) and guarded for way, guarded in seen)
    timed = [way for way, _ in seen[len(WAYS) * UNTIMED[False] :]]
    orders = Counter(tuple(timed[i : i + 3]) for i in range(0, len(timed), 3))
    assert set(orders) == set(ORDERS) and max(orders.values()) == min(orders.values())
    drawn = [next(one.orders) for _ in range(10 * len(ORDERS))]
    assert len(set(drawn[:: len(ORDERS)])) > 3  # none always begins a turn


def test_a_turn_fits_into_a_context():
    """With as many tokens a step as 7 drafts can give."""
    for sizes in (Sizes(), Sizes(prompt=500), Sizes(prompt=20_000)):
        for measure, what in MEASURES.items():
            one = player(FakeEngine(chunk=sizes.step // 2), prompt=sizes.prompt)
            one.play(measure, 0)
            assert SHORT + 8 * one.steps * (what.decoding > 0) < sizes.longest, (sizes, measure)


def test_every_way_is_tried_first_and_answers_alike():
    one = player(prompt=100)
    assert one.warm() == dict.fromkeys(WAYS, True) and not one.engine.requests
    assert len(one.engine.prompts) == len(WAYS) * (1 + 1 + 8 + 1 + 7 + 1)

    step = one.engine.step

    def garbage() -> list:
        outputs = step()
        for output in outputs:
            output.outputs[0].token_ids = [7 if one.engine.is_guarded else 8]
        return outputs

    one.engine.step = garbage
    assert one.warm() == {"on": True, "off": False, "again": True} and TRIED > 8


def test_each_prompt_is_timed_and_no_two_are_equal():
    one, groups = player(FakeEngine(step_s=0.5, chunk=1000), prompt=4000, step=1000), MEASURES["prefill"].groups
    for round in (0, 1):
        timed = one.play("prefill", round)
        assert timed == [{way: {"tokens": 4000, "seconds": 2.0, "steps": 4} for way in WAYS}] * groups
    assert len({tuple(prompt) for prompt in one.engine.prompts}) == 2 * (UNTIMED[True] + groups) * len(WAYS)


def test_prompts_beside_others_are_read_while_those_decode():
    one = player(prompt=4096)
    one.play("prefill beside 7", 0)
    assert len(one.engine.requests) == 7
    left = {tuple(request) for request in one.engine.requests.values()}
    assert left == {(0, one.sizes.longest - SHORT - 8 - one.steps)}  # each step gave each of them a token


def test_how_many_drafts_a_step_happens_to_accept_is_not_counted():
    steps = [{"tokens": tokens, "seconds": 0.5, "steps": 1} for tokens in (1, 8, 3)]
    pairs = [{"measure": "decode 1"} | dict(zip(WAYS, steps, strict=True))]
    assert [guards.rates(pairs, "decode 1", way) for way in WAYS] == [[8.0]] * 3
    assert guards.tokens_per_step(pairs)["decode 1"] == {"on": 1.0, "off": 8.0, "again": 3.0}


def test_what_would_spoil_a_time_is_refused():
    with pytest.raises(RuntimeError, match="5 tokens of its prompt came from the prefix cache"):
        player(FakeEngine(cached=5)).play("prefill", 0)
    short = player(prompt=100)
    short.sampling = lambda tokens: 6
    with pytest.raises(RuntimeError, match="ended while others were timed"):
        short.play("decode 1", 0)
    stuck = player()
    stuck.engine.step = list
    with pytest.raises(RuntimeError, match="no request moved"):
        stuck.play("prefill", 0)


# What pairs say


def noisy(seed: int, cost: float, noise: float = 0.01, pairs: int = 60) -> Comparison:
    """Throughput falls by half while it is measured, for all ways alike; each rate has its own noise."""
    chance = random.Random(seed)
    fall = [1000 * (1 - i / 2 / pairs) for i in range(pairs)]
    on, off, again = ([rate * share * chance.gauss(1, noise) for rate in fall] for share in (1 - cost, 1, 1 - cost))
    return Comparison("decode 1", 0.01, on, off, again)


def test_the_interval_holds_the_truth_and_the_verdict_follows_the_median():
    runs = [noisy(seed, cost=0.03) for seed in range(30)]
    assert sum(low <= 0.97 <= high for low, high in (one.range for one in runs)) >= 26
    assert sum(low <= 1 <= high for low, high in (one.control_range for one in runs)) >= 26
    assert not any(one.holds for one in runs) and all(noisy(seed, cost=0.0).ratio > 0.985 for seed in range(30))


def test_pairs_are_neighbours_in_time():
    """Planted: pairs out of order, which a drift of all ways then moves by more than any bar."""
    one = noisy(0, cost=0.0, noise=0.001)
    assert one.range[1] - one.range[0] < 0.002 and one.doubts() == []
    shuffled = Comparison(one.name, one.bar, one.on, one.off[::-1], one.again)
    assert shuffled.range[1] - shuffled.range[0] > 0.1 and "wide, more than the bar" in shuffled.verdict()


@pytest.mark.parametrize("cost", [0.0, 0.03])
def test_equal_ways_that_differ_give_no_verdict(cost):
    one = noisy(1, cost, noise=0.001)
    odd = Comparison(one.name, one.bar, one.on, one.off, [rate * 0.97 for rate in one.again])
    assert one.word == ("FAIL" if cost else "PASS") and odd.word == odd.numbers()["verdict"] == "NONE"
    assert odd.verdict().startswith("NONE decode 1") and "two equal ways differ by 3" in odd.verdict()
    assert [guards.conclude(found) for found in ([one], [one, odd])] == [
        guards.MISSED if cost else 0, guards.FAILED,
    ]  # fmt: skip


def test_the_bar_is_the_medians():
    def of(ratio: float) -> Comparison:
        return Comparison("x", 0.01, [100 * ratio] * 39 + [1.0], [100.0] * 40, [100.0] * 40)

    assert of(0.991).holds and not of(0.989).holds
    assert statistics.median(paired.ratios([1.0, 9.0], [2.0, 3.0])) == 1.75
    assert interval([0.5] * 10) == (0.5, 0.5)
