"""bench/moe.py without a GPU: kernels are replaced by the PyTorch decoder, the clock by given times."""

import functools
import json
import sys
from itertools import count, cycle
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
sys.path[:0] = [str(Path(__file__).parents[2] / folder) for folder in ("bench", "tests/gpu", "tools/gpu/exllamav3_ext")]
import moe as bench
import moe_steps
from packed_experts import weights_of
from vllm_exl3 import gpu_experts, ops
from vllm_exl3.gpu_experts import local_slots
from vllm_exl3.reference import moe_forward

SIZE = 128
GEOMETRIES = {"tp2": moe_steps.Geometry(12, 12, SIZE, SIZE), "ep3": moe_steps.Geometry(4, 12, SIZE, SIZE)}
METHODS = [method.name for method in bench.METHODS]


class Clock:
    """bench's Gpu: the first call of every row takes 100 microseconds, the second 200, and so on."""

    device, name, major = "cpu", "a clock", 9

    def __init__(self, times=(100.0, 200.0, 300.0, 400.0, 500.0, 600.0, 700.0)) -> None:
        self.times, self.kinds = cycle(times), []

    def _give(self, kind, calls):
        self.kinds.append((kind, len(calls)))
        return next(self.times), [call() for call in calls]

    def replayed(self, calls):
        return self._give("replayed", calls)

    def called(self, calls):
        return self._give("called", calls)

    def copy_rate(self):
        return 1e9


@functools.lru_cache(2)
def decoded(experts):
    parts = [weights_of(experts, expert) for expert in range(experts.count)]
    return torch.stack([torch.cat(part[:2], 1) for part in parts]), torch.stack([part[2] for part in parts])


def forward(experts, x, slots, weights, limit):
    return moe_forward(x, *decoded(experts), weights, slots, limit)


class Fused:
    """few_rows.FusedExperts, and over it peer.DequantisedExperts, without kernels."""

    def __init__(self, experts, *, limit, top_k, cap, partition_tokens=0) -> None:
        assert (limit, top_k) == (10.0, 8)
        self.experts, self.limit, self.scratch = experts, limit, SimpleNamespace(nbytes=0)

    def run(self, x, slots, weights, out):
        assert x.dtype == torch.float16 and out.dtype == torch.float32
        out.copy_(forward(self.experts, x, slots, weights, self.limit))

    run_coop = run_fused = run


def fat_moe(x, ids, weights, experts, *, out, workspace, limit, expert_map, min_rows, addend):
    assert min_rows == 1 and addend is None
    out.copy_(forward(experts, x, local_slots(ids, expert_map), weights, limit))


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    for name, geometry in GEOMETRIES.items():
        monkeypatch.setitem(bench.GEOMETRIES, name, geometry)
    monkeypatch.setattr(ops, "load", lambda: None)
    monkeypatch.setattr(ops, "workspace_bytes", lambda *sizes: 1024)
    monkeypatch.setattr(ops, "fat_moe", fat_moe)
    monkeypatch.setattr(gpu_experts, "FusedExperts", Fused)
    monkeypatch.setattr(moe_steps, "FusedExperts", Fused)
    monkeypatch.setattr(bench, "DequantisedExperts", lambda fused, most_fused: fused)
    gpu_experts.shared_scratch.cache_clear()
    yield
    gpu_experts.shared_scratch.cache_clear()


def run(capsys, tmp_path, *arguments, clock=None, now=None):
    """(exit code, text, numbers)."""
    path = tmp_path / "numbers.json"
    options = bench.parse([*arguments, "--json", str(path), "--commit", "abc123"])
    code = bench.bench(options, clock or Clock(), now or count(0, 0.001).__next__)
    return code, capsys.readouterr().out, json.loads(path.read_text())


def cells(text, *row):
    """The cells of a row of the markdown table, by heading."""
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {' | '.join(row)} |")]
    return dict(zip(bench.HEADINGS, line.strip("| ").split(" | "), strict=True))


def test_rows_are_told_twice_with_ratios_errors_and_shares(capsys, tmp_path):
    clock = Clock()
    code, text, numbers = run(capsys, tmp_path, "--geometry", "tp2", "--tokens", "2", clock=clock)
    assert code == 0 and "WRONG" not in text and "Left out" not in text
    lines = text.splitlines()
    for routing in ("uniform", "zipf", "same"):
        assert sum(line.strip("| ").startswith(f"tp2 | {routing} | 2 | 16 |") for line in lines) == 2
    assert "commit abc123, a clock, torch" in text and "`python3 bench/moe.py --geometry tp2 --tokens 2 " in text
    row = cells(text, "tp2", "uniform", "2")
    assert list(row)[-len(METHODS) :] == METHODS
    for number, name in enumerate(METHODS, 1):
        micros, *ratio, error = row[name].split()
        assert micros == f"{number * 100}.0" and ratio == ([f"{1 / number:.2f}x"] if number > 1 else [])
        assert 0 < float(error) < (1e-2 if name == "bf16 GEMM" else 2.5e-3)
    # 16 rows of 3 matrices; and at most 12 experts of half a byte a weight.
    first = numbers["rows"][0]["results"]
    assert first["ours"]["tflops"] == pytest.approx(16 * 3 * SIZE**2 * 2 / 100e-6 / 1e12)
    assert 0 < first["ours"]["bytes_per_s"] <= (12 * 3 * SIZE**2 / 2 + 2 * 2 * SIZE * 2) / 100e-6
    assert row["of copy"] == f"{first['ours']['bytes_per_s'] / 1e9:.0%}"
    # Only what reads counts on the host stays out of the graph.
    assert clock.kinds[:7] == [(kind, 8) for kind in ["replayed"] * 4 + ["called"] * 2 + ["replayed"]]


def test_methods_that_do_not_apply_are_left_empty_and_longer_steps_are_called_once(capsys, tmp_path):
    clock = Clock(times=(1234.5,))
    code, text, _ = run(capsys, tmp_path, "--geometry", "ep3", "--tokens", "70", "150", clock=clock)
    assert code == 0 and set(clock.kinds) == {("called", 1)}
    some, many = cells(text, "ep3", "uniform", "70"), cells(text, "ep3", "same", "150")
    assert [some["exl3 coop"], many["exl3 coop"], many["exl3 fused"]] == ["-"] * 3 != some["exl3 fused"]
    assert many["ours"].startswith("1234 ") and 0 < int(many["rows"]) < 150 * 8


@pytest.mark.parametrize("factor", [1.02, float("nan")])
def test_wrong_result_is_called_so(capsys, tmp_path, monkeypatch, factor):
    def damaged(*args, out, **named):
        fat_moe(*args, out=out, **named)
        out *= factor

    monkeypatch.setattr(ops, "fat_moe", damaged)
    code, text, _ = run(capsys, tmp_path, "--geometry", "tp2", "--tokens", "2")
    row = cells(text, "tp2", "zipf", "2")
    assert code == 1 and "WRONG or failed: tp2 uniform 2, tp2 zipf 2, tp2 same 2" in text
    assert [name for name in METHODS if "WRONG" in row[name]] == ["grouped alone"]


@pytest.mark.parametrize("tokens, code", [("2", 0), ("70", 1)])
def test_method_that_fails_says_why_and_the_others_go_on(capsys, tmp_path, monkeypatch, tokens, code):
    """At 70 tokens our path needs the grouped kernel, at 2 it does not."""

    def fail(*args, **named):
        raise RuntimeError("no | today\nat all")

    monkeypatch.setattr(ops, "fat_moe", fail)
    found, text, _ = run(capsys, tmp_path, "--geometry", "tp2", "--tokens", tokens)
    row = cells(text, "tp2", "uniform", tokens)
    assert found == code and row["grouped alone"] == "failed: RuntimeError: no / today"
    assert row["ours"].startswith("failed") == bool(code) and not row["bf16 GEMM"].startswith("failed")
    assert ("x " in row["bf16 GEMM"]) == (not code)


def test_time_limit_ends_the_run_between_rows(capsys, tmp_path):
    arguments = "--geometry", "ep3", "tp2", "--tokens", "1", "2", "--seconds", "3"
    code, text, numbers = run(capsys, tmp_path, *arguments, now=count().__next__)
    done = [(row["geometry"], row["routing"], row["tokens"]) for row in numbers["rows"]]
    assert code == 0 and done == [("tp2", "uniform", 1), ("tp2", "uniform", 2)]
    assert "Left out, for 3 s were over: ep3 uniform 1, ep3 uniform 2, ep3 zipf 1" in text
    assert len(numbers["left_out"]) == 10


def test_what_matters_comes_first():
    rows = bench.plan_rows(["tp2", "tp4", "ep3"], list(bench.TOKENS))
    assert len(set(rows)) == len(rows) == 3 * 3 * 8
    assert rows[:8] == [("tp2", "uniform", tokens) for tokens in bench.TOKENS]
    assert rows[8:10] == [("tp2", "zipf", 7168), ("tp2", "same", 7168)]
    assert rows[10:14] == [(name, "uniform", tokens) for name in ("tp4", "ep3") for tokens in (512, 7168)]
    assert {row[2] for row in rows[10:18]} == {512, 7168} and "tp2" not in {row[0] for row in rows[10:22]}


def test_routings_are_what_their_names_say():
    ids = {kind: bench_route(kind, 0) for kind in moe_steps.ROUTINGS}
    counts = {kind: torch.bincount(table.flatten(), minlength=288).sort(descending=True).values
              for kind, table in ids.items()}  # fmt: skip
    for table in ids.values():
        assert all(len(set(row)) == 8 for row in table.tolist())
    assert counts["same"].tolist() == [2000] * 8 + [0] * 280
    assert counts["uniform"][0] < 2 * counts["uniform"][-1]
    assert counts["zipf"][0] > 1000 and counts["zipf"][0] > 20 * counts["zipf"][100] > 0
    for table in (ids["same"], ids["zipf"]):
        shares = [int(((table // 96) == rank).sum()) / table.numel() for rank in range(3)]
        assert min(shares) >= 0.25 and max(shares) <= 0.4
    favourites = torch.cat([bench_route("same", seed)[0] for seed in range(bench.TURNS)])
    assert len(favourites.unique()) == 8 * bench.TURNS


def bench_route(kind, seed):
    return moe_steps.route(kind, 2000, 288, "cpu", seed).ids


def test_stand_in_for_the_clock_has_all_of_it():
    assert {name for name in dir(bench.Gpu) if not name.startswith("_")} <= set(dir(Clock))
