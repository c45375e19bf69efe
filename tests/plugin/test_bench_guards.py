"""bench/guards.py without a GPU: engines whose steps take given times, in processes that take turns as real ones do."""

import json
import random
import statistics
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1] / "bench"), str(HERE)]

import guards
import paired
from fake_guards_engine import FakeEngine, FakeTexts
from guards_engine import MEASURES, PARTS, PROMPTS, SHORT, WARM_STEPS, Player, Sizes, common_cpus
from paired import LEAST_PAIRS, Comparison, interval


def bench(tmp_path, *arguments, **setting):
    """Exit code of the whole command with fake engines; two rounds are as many pairs as a verdict needs."""
    argv = ["--work", str(tmp_path), "--json", str(tmp_path / "guards.json"), "--rounds", "2", *arguments]
    program = [sys.executable, "-u", str(HERE / "fake_guards_engine.py"), json.dumps(setting)]
    return guards.main(argv, program)


def numbers(tmp_path):
    report = json.loads((tmp_path / "guards.json").read_text())
    return report, {one["name"]: one for one in report["measures"]}


# The command


def test_guards_that_cost_nothing_pass(tmp_path, capsys):
    assert bench(tmp_path, "--seconds", "30", "--commit", "abc123", guard_ms=0.0) == 0
    said, (report, by_name) = capsys.readouterr().out, numbers(tmp_path)
    assert said.count("PASS decode") == said.count("PASS prefill") == 2 and "FAIL" not in said
    assert [line.split(" | ")[0] for line in said.splitlines() if line.startswith("| ")][2:] == [
        f"| {name}" for name in MEASURES
    ]
    assert {one["ratio"] for one in by_name.values()} == {one["control"] for one in by_name.values()} == {1.0}
    assert by_name["decode 8"]["rates"]["on"] == pytest.approx([8000.0] * 2 * PARTS)  # a step takes 1 ms
    assert report["tokens_per_step"]["decode 8"] == {"on": 8.0, "off": 8.0, "again": 8.0}
    assert report["exit_code"] == 0 and report["versions"]["commit"] == "abc123"
    assert report["command"].startswith("python3 bench/guards.py --work")


def test_a_guard_that_costs_more_than_a_bar_fails_that_bar_only(tmp_path, capsys):
    """1.5 % more for each step: above decoding's bar, below prefill's."""
    assert bench(tmp_path, "--seconds", "30", guard_ms=0.015) == guards.MISSED
    said, (_, by_name) = capsys.readouterr().out, numbers(tmp_path)
    assert said.count("FAIL decode") == 2 and said.count("PASS prefill") == 2
    assert by_name["decode 1"]["ratio"] == pytest.approx(1 / 1.015)
    assert by_name["decode 1"]["control"] == 1.0


def test_a_guard_that_sleeps_fails_every_bar(tmp_path, capsys):
    sizes = "--new-tokens", "12", "--prompt-tokens", "4000"
    assert bench(tmp_path, "--seconds", "60", *sizes, step_ms=1.0, guard_ms=1.0, sleeps=True) == guards.MISSED
    _, by_name = numbers(tmp_path)
    assert not any(one["holds"] for one in by_name.values())
    assert all(0.4 < one["ratio"] < 0.9 for one in by_name.values())


def test_one_engine_works_at_a_time_and_in_all_orders(tmp_path):
    turns = tmp_path / "turns"
    bench(tmp_path, "--seconds", "30", turns=str(turns))
    told = [line.split() for line in turns.read_text().splitlines()]
    spans = [(float(begin), float(end)) for begin, end, _, _ in told]
    assert len(spans) == 2 * len(MEASURES) * PARTS * 3
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    workers = [worker for _, _, _, worker in told]
    orders = Counter(tuple(workers[i : i + 3]) for i in range(0, len(workers), 3))
    assert len(orders) == 6 and max(orders.values()) - min(orders.values()) <= 1
    assert len({off for _, _, off, _ in told}) == 2


def test_a_time_that_is_too_short_gives_no_verdict(tmp_path, capsys):
    assert bench(tmp_path, "--rounds", "1", "--seconds", "30") == guards.FAILED
    assert f"NONE decode 1: {PARTS} pairs, {LEAST_PAIRS} are needed" in capsys.readouterr().out


def test_what_was_timed_before_the_time_was_over_counts(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(guards, "END_S", 0)
    assert bench(tmp_path, "--seconds", "2.5", "--rounds", "9", fail="hang in round 3") == 0
    assert "the time is over within a turn" in capsys.readouterr().out
    assert numbers(tmp_path)[1]["prefill"]["pairs"] == 2 * PARTS


@pytest.mark.parametrize(
    ("fail", "seconds", "words"),
    [("start", "30", ("off: ended with 1", "no GPU today")), ("turn", "30", ("ended with 1", "out of memory")),
     ("never up", "1", ("the time is over (--seconds 1)",)),
     ("same guards", "30", ("off: is without the guards []", "expected chunk-ends")),
     ("other CPUs", "30", ("engines run on the CPUs", "999]", "all must run on the same ones"))],
)  # fmt: skip
def test_an_engine_that_fails_is_told_with_its_log(tmp_path, capsys, fail, seconds, words):
    assert bench(tmp_path, "--seconds", seconds, fail=fail) == guards.FAILED
    told = capsys.readouterr().err
    assert all(word in told for word in words) and not (tmp_path / "guards.json").exists()


def test_wrong_usage_is_told(tmp_path, capsys):
    with pytest.raises(SystemExit):
        guards.arguments(["--drafts", "mtp3", "--draft-models", str(tmp_path / "none")])
    assert "none: no such folder" in capsys.readouterr().err


# CPUs


def machine(tmp_path, nodes: dict[int, set[int]], **speeds: dict[int, int]) -> Path:
    """/sys/devices/system of a machine with such CPUs on its NUMA nodes, and what it tells of their speeds."""
    for node, cpus in nodes.items():
        for cpu in cpus:
            (tmp_path / "cpu" / f"cpu{cpu}" / f"node{node}").mkdir(parents=True)
    for file, told in speeds.items():
        for cpu, speed in told.items():
            (tmp_path / "cpu" / f"cpu{cpu}" / file).write_text(f"{speed}\n")
    return tmp_path


def test_all_engines_of_a_machine_run_on_the_same_few_cpus_of_one_node(tmp_path):
    interleaved = machine(tmp_path, {0: set(range(0, 32, 2)), 1: set(range(1, 32, 2))})
    assert common_cpus(set(range(32)), interleaved) == {0, 2, 4, 6}
    assert common_cpus({3, 4, 5, 7, 30}, interleaved) == {3, 5, 7}  # a container's
    assert common_cpus({5, 9}, tmp_path / "none") == {5, 9}


def test_engines_run_on_the_fastest_cpus_where_they_differ(tmp_path):
    fast = {*range(5, 10), *range(15, 20)}
    told = {cpu: 1024 if cpu in fast else 718 for cpu in range(20)}
    assert common_cpus(set(told), machine(tmp_path, {0: set(told)}, cpu_capacity=told)) == {5, 6, 7, 8}


def test_what_an_engine_imports_has_its_cpus():
    """Nothing that starts threads may be there before: they would keep all CPUs."""
    code = """
import os, sys, threading
import guards_engine
assert not {"numpy", "torch", "vllm"} & set(sys.modules)
guards_engine.CPUS = 1
pinned, seen = guards_engine.pin(), []
thread = threading.Thread(target=lambda: seen.append(sorted(os.sched_getaffinity(0))))
thread.start(), thread.join()
assert len(pinned) == 1 and seen == [pinned], (pinned, seen)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(guards.__file__).parent)


# One engine


def player(engine=None, **sizes):
    engine = engine or FakeEngine(step_s=0.5)
    return Player(engine, FakeTexts(), Sizes(**sizes), sampling=lambda tokens: tokens, clock=engine.clock)


def test_decoding_is_timed_from_warm_steps_on_and_ends_with_its_last_part():
    one = player(new=40)
    timed = [one.play("decode 8", 0, part) for part in range(PARTS)]
    assert timed == [{"tokens": 80, "seconds": 5.0, "steps": 10}] * PARTS
    assert one.steps == 1 + PARTS * (WARM_STEPS + 10) and not one.engine.requests
    assert len(one.engine.prompts) == 8 and {len(prompt) for prompt in one.engine.prompts} == {SHORT}


def test_prompts_are_timed_without_the_first_one_and_no_two_are_equal():
    one = player(FakeEngine(step_s=0.5, chunk=1000), prompt=4000, step=1000)
    for round in (0, 1):
        timed = [one.play("prefill", round, part) for part in range(PARTS)]
        assert timed == [{"tokens": PROMPTS * 4000, "seconds": 6.0, "steps": 12}] * PARTS
    assert len({tuple(prompt) for prompt in one.engine.prompts}) == 2 * PARTS * (1 + PROMPTS)


def test_prompts_beside_others_are_read_while_those_decode():
    one = player(prompt=4096)
    one.play("prefill beside 7", 0, 0)
    assert len(one.engine.requests) == 7
    left = {tuple(request) for request in one.engine.requests.values()}
    assert left == {(0, one.sizes.longest - SHORT - 8 - one.steps)}  # each step gave each of them a token


def test_what_would_spoil_a_time_is_refused():
    with pytest.raises(RuntimeError, match="5 tokens of its prompt came from the prefix cache"):
        player(FakeEngine(cached=5)).play("prefill", 0, 0)
    short = player(prompt=100, new=4)
    short.sampling = lambda tokens: 6
    with pytest.raises(RuntimeError, match="ended while others were timed"):
        short.play("decode 1", 0, 0), short.play("decode 1", 0, 1)
    stuck = player()
    stuck.engine.step = list
    with pytest.raises(RuntimeError, match="no request moved"):
        stuck.play("prefill", 0, 0)


# What pairs say


def noisy(seed: int, cost: float, noise: float = 0.01, pairs: int = 24) -> Comparison:
    """Throughput falls by half while it is measured, for all engines alike; each rate has its own noise."""
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
    """Planted: pairs out of order, which a drift of all engines then moves by more than any bar."""
    one = noisy(0, cost=0.0, noise=0.001)
    assert one.range[1] - one.range[0] < 0.002 and one.doubts() == []
    shuffled = Comparison(one.name, one.bar, one.on, one.off[::-1], one.again)
    assert shuffled.range[1] - shuffled.range[0] > 0.1 and "wide, more than the bar" in shuffled.verdict()


def test_equal_engines_that_differ_are_told():
    one = noisy(1, cost=0.0, noise=0.001)
    odd = Comparison(one.name, one.bar, one.on, one.off, [rate * 0.97 for rate in one.again])
    assert "two equal engines differ by 3" in odd.verdict() and odd.verdict().startswith("PASS")


def test_the_bar_is_the_medians():
    def of(ratio: float) -> Comparison:
        return Comparison("x", 0.01, [100 * ratio] * 9 + [1.0], [100.0] * 10, [100.0] * 10)

    assert of(0.991).holds and not of(0.989).holds
    assert statistics.median(paired.ratios([1.0, 9.0], [2.0, 3.0])) == 1.75
    assert interval([0.5] * 10) == (0.5, 0.5)
