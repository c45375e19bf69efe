"""What a layer's routed experts cost on a GPU: our path beside exllamav3's ways and a plain bf16 grouped GEMM.

PYTHONPATH=overlay:tests/gpu:tools/gpu/exllamav3_ext:.gpu/exl python3 bench/moe.py [--help]

Needs a GPU, the built kernels and exllamav3_ext. Ends with a table for RESULTS.md, and with 1 if a result is wrong or
our path fails. Methods start from bf16 rows and the router's ids and end with bf16 sums. Only the bf16 GEMM, which
says what is possible, starts from rows that are already gathered and sorted and leaves the sum out.
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from gpu_clock import Gpu
from judging import distance
from moe_steps import BITS, GEOMETRIES, LIMIT, ROUTINGS, TOP_K, Layer, Step
from peer import DequantisedExperts
from vllm_exl3 import ops
from vllm_exl3.few_rows import COOP_SLOTS
from vllm_exl3.format import Codebook
from vllm_exl3.gpu_experts import local_slots, make_plan
from vllm_exl3.reference import swiglu
from vllm_exl3.switches import MOST_FEW_ROWS, Switches

TOKENS = (1, 8, 32, 128, 512, 2048, 7168, 16384)
GRAPH_BELOW, TURNS = 64, 8  # shorter steps are replayed from a graph, with this many routings in turn
SAMPLED_TOKENS = 48
MMA_TFLOPS = 627  # an H200's mma.m16n8k16, fp16 with fp32 sums, on registers alone

# Methods

Call = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Method:
    name: str
    prepare: Callable[[Layer, Step], Call]  # the call alone is timed
    takes: Callable[[Step], bool] = lambda step: True
    finish: Callable[[Step, torch.Tensor], torch.Tensor] = lambda step, out: out
    is_capturable: bool = True
    weight_bits: int = BITS
    wrong_above: float = 5e-3


def ours(layer: Layer, step: Step) -> Call:
    experts = layer.ours
    return lambda: experts.run(step.x, step.ids, step.weights, layer.expert_map)


def grouped(layer: Layer, step: Step) -> Call:
    workspace = layer.ours.scratch.workspace

    def call() -> torch.Tensor:
        out = torch.empty_like(step.x)
        ops.fat_moe(
            step.x, step.ids, step.weights, layer.packed, out=out, workspace=workspace, limit=LIMIT,
            expert_map=layer.expert_map, min_rows=1, addend=None,
        )  # fmt: skip
        return out

    return call


def exllamav3(method: Callable[[Layer], Callable]) -> Callable[[Layer, Step], Call]:
    """Its functions take fp16 rows and local ids and give fp32 sums: the conversions count."""

    def prepare(layer: Layer, step: Step) -> Call:
        run = method(layer)

        def call() -> torch.Tensor:
            sums = torch.empty(step.x.shape, dtype=torch.float32, device=step.x.device)
            run(step.x.half(), local_slots(step.ids, layer.expert_map), step.weights, sums)
            return sums.to(step.x.dtype)

        return call

    return prepare


def bf16_gemm(layer: Layer, step: Step) -> Call:
    rows, ends = step.x[step.order // TOP_K], step.counts.cumsum(0).int()
    w13, w2 = layer.bf16

    def call() -> torch.Tensor:
        gate, up = F.grouped_mm(rows, w13, offs=ends).chunk(2, -1)
        return F.grouped_mm(swiglu(gate, up, LIMIT), w2, offs=ends)

    return call if len(rows) else lambda: rows


def sum_rows(step: Step, rows: torch.Tensor) -> torch.Tensor:
    sums = torch.zeros(step.x.shape, dtype=torch.float32, device=rows.device)
    return sums.index_add_(0, step.order // TOP_K, rows.float() * step.weights.flatten()[step.order, None])


def dequantised(most_fused: int) -> Callable[[Layer, Step], Call]:
    return exllamav3(lambda layer: DequantisedExperts(layer.fused, most_fused).run)


METHODS = (
    Method("ours", ours),
    Method("grouped alone", grouped),
    Method("exl3 coop", exllamav3(lambda layer: layer.fused.run_coop), lambda step: step.ids.numel() <= COOP_SLOTS),
    Method("exl3 fused", exllamav3(lambda layer: layer.fused.run_fused), lambda step: step.most_rows <= MOST_FEW_ROWS),
    Method("exl3 dequantise", dequantised(0), is_capturable=False),
    Method(f"exl3 mix {MOST_FEW_ROWS}", dequantised(MOST_FEW_ROWS), is_capturable=False),
    # Rounding weights, and rows between the products, to bf16 nearly fills the others' bar.
    Method("bf16 GEMM", bf16_gemm, finish=sum_rows, weight_bits=16, wrong_above=1e-2),
)

# Measuring


@dataclass(frozen=True)
class Result:
    micros: float = 0.0
    error: float = 0.0  # relative L2
    is_wrong: bool = False
    tflops: float = 0.0
    bytes_per_s: float = 0.0  # of the weights of experts with rows, x and the sums; no scratch
    failure: str = ""


@dataclass(frozen=True)
class Row:
    geometry: str
    routing: str
    tokens: int
    rows: float  # of the experts that are here; the mean where there are several routings
    results: dict[str, Result | None]  # None: the method does not take such steps

    @property
    def is_bad(self) -> bool:
        return bool(self.results["ours"].failure) or any(r is not None and r.is_wrong for r in self.results.values())


def measure(method: Method, layer: Layer, steps: list[Step], gpu: Gpu) -> Result | None:
    if not all(method.takes(step) for step in steps):
        return None
    clock = gpu.replayed if len(steps) > 1 and method.is_capturable else gpu.called
    try:
        micros, outs = clock([method.prepare(layer, step) for step in steps])
        pairs = zip(steps, outs, strict=True)
        got = torch.cat([method.finish(step, out)[step.sample] for step, out in pairs])
        error = distance(got, torch.cat([step.want for step in steps])).relative_l2
    except Exception as failure:  # of any kind: it is told, and the other methods go on
        traceback.print_exc()
        return Result(failure=f"{type(failure).__name__}: {failure}".splitlines()[0][:160].replace("|", "/"))
    weights = 3 * layer.geometry.hidden * layer.geometry.width  # of an expert
    flop = sum(2 * weights * step.rows for step in steps) / len(steps)
    moved = sum(step.active * weights * method.weight_bits / 8 + 2 * step.x.nbytes for step in steps) / len(steps)
    return Result(micros, error, error > method.wrong_above, flop / micros / 1e6, moved / micros * 1e6)


def measure_row(layer: Layer, geometry: str, routing: str, tokens: int, gpu: Gpu) -> Row:
    turns = TURNS if tokens < GRAPH_BELOW else 1
    steps = [Step(layer, routing, tokens, seed, SAMPLED_TOKENS // turns) for seed in range(turns)]
    results = {method.name: measure(method, layer, steps, gpu) for method in METHODS}
    return Row(geometry, routing, tokens, sum(step.rows for step in steps) / turns, results)


def plan_rows(geometries: list[str], tokens: list[int]) -> list[tuple[str, str, int]]:
    """What matters most comes first."""

    def urgency(row: tuple[str, str, int]) -> int:
        geometry, routing, count = row
        if geometry == "tp2":
            return 0 if routing == "uniform" else 1 if count == 7168 else 4
        return (2 if routing == "uniform" else 3) if count in (512, 7168) else 4

    return sorted([(g, r, t) for g in geometries for r in ROUTINGS for t in tokens], key=urgency)


# Telling

HEADINGS = ("ranks", "routing", "tokens", "rows", "TFLOPS", "of mma", "of copy", *(m.name for m in METHODS))


def show(result: Result | None, base: Result | None) -> str:
    """Microseconds, ours / it, error."""
    if result is None:
        return "-"
    if result.failure:
        return f"failed: {result.failure}"
    parts = [f"{result.micros:.{1 if result.micros < 1000 else 0}f}"]
    if base is not None and not base.failure:
        parts.append(f"{base.micros / result.micros:.2f}x")
    return " ".join([*parts, f"{'WRONG ' if result.is_wrong else ''}{result.error:.1e}"])


def fields(row: Row, copy_rate: float) -> list[str]:
    base = row.results["ours"]
    shares = f"{base.tflops:.0f}", f"{base.tflops / MMA_TFLOPS:.0%}", f"{base.bytes_per_s / copy_rate:.0%}"
    cells = [show(result, None if result is base else base) for result in row.results.values()]
    return [row.geometry, row.routing, str(row.tokens), f"{row.rows:.0f}", *shares, *cells]


def markdown(about: dict, table: list[list[str]]) -> Iterator[str]:
    yield f"`{about['command']}`, commit {about['commit']}, {about['device']}, torch {about['torch']}."
    yield f"Our plan: {about['plan']}. Copy: {about['copy_rate'] / 1e12:.2f} TB/s read and written; mma: {MMA_TFLOPS}"
    yield "TFLOPS, an H200's. TFLOPS and shares are ours, the bytes those of weights, x and sums. Cells: microseconds,"
    yield f"ours / it, relative L2 of up to {SAMPLED_TOKENS} tokens against float64. Below {GRAPH_BELOW} tokens the"
    yield f"mean of {TURNS} routings, in a graph but for dequantise and mix, which read counts on the host."
    yield ""
    for line in (HEADINGS, ["---"] * len(HEADINGS), *table):
        yield f"| {' | '.join(line)} |"


def bench(options: argparse.Namespace, gpu: Gpu, now: Callable[[], float] = time.perf_counter) -> int:
    start, todo, rows, layers = now(), plan_rows(options.geometry, options.tokens), [], {}
    plan, copy_rate = make_plan((BITS, BITS), {Codebook.MCG}, Switches(), gpu.major), gpu.copy_rate()
    print(f"{gpu.name}, torch {torch.__version__}, {plan}\n{' | '.join(HEADINGS)}", flush=True)
    while todo and now() - start < options.seconds:
        geometry, routing, tokens = todo.pop(0)
        if geometry not in layers:
            layers[geometry] = Layer(GEOMETRIES[geometry], plan, max(options.tokens), gpu.device)
        rows.append(measure_row(layers[geometry], geometry, routing, tokens, gpu))
        print(" | ".join(fields(rows[-1], copy_rate)), flush=True)
    command = shlex.join(["python3", "bench/moe.py", *options.arguments])
    about = {"command": command, "commit": options.commit or commit(), "device": gpu.name, "torch": torch.__version__}
    about |= {"plan": str(plan), "copy_rate": copy_rate, "mma_tflops": MMA_TFLOPS, "left_out": todo}
    if options.json:
        options.json.write_text(json.dumps(about | {"rows": [asdict(row) for row in rows]}, indent=1))
    print("", *markdown(about, [fields(row, copy_rate) for row in rows]), sep="\n")
    if todo:
        names = ", ".join(" ".join(map(str, row)) for row in todo)
        print(f"\nLeft out, for {options.seconds:g} s were over: {names}")
    bad = [f"{row.geometry} {row.routing} {row.tokens}" for row in rows if row.is_bad]
    print(f"\nWRONG or failed: {', '.join(bad)}" if bad else f"\n{len(rows)} rows in {now() - start:.0f} s")
    return 1 if bad else 0


def commit() -> str:
    try:
        found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    except FileNotFoundError:
        return "unknown"
    return found.stdout.strip() if found.returncode == 0 else "unknown"


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--geometry", nargs="+", choices=GEOMETRIES, default=list(GEOMETRIES))
    parser.add_argument("--seconds", type=float, default=140, help="starts no row after this time")
    parser.add_argument("--json", type=Path, help="writes all numbers there")
    parser.add_argument("--commit", help="where git is not there to say it")
    return parser.parse_args(arguments, argparse.Namespace(arguments=arguments))


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("bench/moe.py: torch sees no CUDA device, and all of this is timed on one")
    sys.exit(bench(parse(sys.argv[1:]), Gpu()))
