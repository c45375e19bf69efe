"""exllamav3's kernels as few_rows.py calls them, against the float64 oracle, and what they cost. Needs a GPU.

PYTHONPATH=overlay:tests/gpu:tools/gpu/exllamav3_ext:.gpu/exl3 python3 tests/gpu/check_few_rows.py [NAME ...]
"""

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from judging import Distance, check
from packed_experts import Routing, inputs, kind_name, make_experts, route_uniform, weights_of
from peer import DequantisedExperts
from vllm_exl3 import few_rows
from vllm_exl3.few_rows import COOP_SLOTS, DenseExl3, FusedExperts
from vllm_exl3.format import Codebook, Exl3Tensors
from vllm_exl3.reference import decode_weight, swiglu

DEVICE, TOP_K, LIMIT = "cuda", 8, 10.0
ROWS = (1, 2, 8, 9, 32, 33, 144, 512)
MOST_ROWS = 144  # of an expert, in the layers that take all of them
KINDS = [(bits, codebook) for codebook in (Codebook.MCG, Codebook.MUL1) for bits in (3, 4, 5, 6)]


class Layer:
    """Experts with all their weights decoded, and their FusedExperts."""

    def __init__(self, count: int, hidden: int, width: int, cap: int = MOST_ROWS, tokens: int = 512, **named) -> None:
        self.packed = make_experts(count, hidden, width, device=DEVICE, **named)
        self.fused = FusedExperts(self.packed, limit=LIMIT, top_k=TOP_K, cap=cap, partition_tokens=tokens)
        self.decoded: dict[int, tuple] = {}

    def want(self, x: torch.Tensor, routing: Routing, least: int = 1, most: int = 2**31) -> torch.Tensor:
        """float64 sum of the experts with `least` to `most` rows."""
        out = torch.zeros(x.shape, dtype=torch.float64, device=DEVICE)
        ids = routing.ids
        for expert in ids[(ids >= 0) & (ids < self.packed.count)].unique().tolist():
            token, place = (ids == expert).nonzero(as_tuple=True)
            if not least <= len(token) <= most:
                continue
            if expert not in self.decoded:
                self.decoded[expert] = weights_of(self.packed, expert)
            gate, up, down = self.decoded[expert]
            rows = x[token].double()
            result = swiglu(rows @ gate, rows @ up, LIMIT) @ down
            out.index_add_(0, token, result * routing.weights[token, place, None].double())
        return out

    def call(self, method: Callable, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """The method's result, with NaN in all that it may not read."""
        out = torch.full(x.shape, float("nan"), device=DEVICE)
        scratch = self.fused.scratch
        for buffer in [*scratch.states, *scratch.middles, scratch.rows, *scratch.coop[:-1]]:
            buffer.fill_(float("nan"))
        method(x, routing.ids, routing.weights, out)
        return out


def routings(tokens: int, experts: int) -> dict[str, Routing]:
    holes = route_uniform(tokens, TOP_K, experts, DEVICE, seed=1)
    holes.ids[torch.rand(holes.ids.shape, device=DEVICE) < 0.5] = -1
    holes.ids[0] = -1
    holes.ids[-1, 0], holes.ids[-1, 1] = experts, 2**31 - 1
    return {
        "uniform": route_uniform(tokens, TOP_K, experts, DEVICE),
        "half elsewhere": holes,
        "same 8 experts": route_uniform(tokens, TOP_K, TOP_K, DEVICE, seed=2),
    }


def measure(name: str, got: torch.Tensor, want: torch.Tensor) -> Distance:
    try:
        return check(got, want)
    except AssertionError as error:
        raise AssertionError(f"{name}: {error}") from None


def tell(name: str, *found: Distance) -> None:
    size, cosine = max(f.relative_l2 for f in found), max(f.worst_cosine for f in found)
    print(f"  {name}: L2 {size:.1e}, cosine {cosine:.1e}", flush=True)


def compare(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    tell(name, measure(name, got, want))


def check_experts() -> None:
    """All T, sizes and routings, both kernels; a step above the cap is split with the oracle as the other kernel."""
    for count, hidden, width in ((32, 1024, 256), (96, 2048, 384), (288, 4096, 1024)):
        layer = Layer(count, hidden, width)
        for tokens in ROWS:
            found: dict[str, list[Distance]] = {}
            for routing_name, routing in routings(tokens, count).items():
                for kernel, got, want in results(layer, inputs(tokens, hidden, torch.float16, DEVICE), routing):
                    name = f"{count} x {hidden} x {width}, {tokens} tokens, {routing_name}, {kernel}"
                    found.setdefault(kernel, []).append(measure(name, got, want))
            for kernel, distances in found.items():
                tell(f"{count} x {hidden} x {width}, {tokens} tokens, {kernel}", *distances)


def results(layer: Layer, x: torch.Tensor, routing: Routing) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """(kernel, what it gives, what it should give) for each way that takes this many tokens."""
    whole, taken = layer.want(x, routing), layer.want(x, routing, most=MOST_ROWS)
    rest = layer.want(x, routing, least=MOST_ROWS + 1)
    part = layer.call(layer.fused.run_partition, x, routing)
    yield "exl3_moe", part, taken
    yield "sum of both parts", part.double() + rest, whole
    if routing.ids.numel() <= COOP_SLOTS:
        yield "exl3_moe_coop", layer.call(layer.fused.run_coop, x, routing), whole
    elif routing.tokens <= MOST_ROWS:
        yield "run", layer.call(layer.fused.run, x, routing), whole


def check_repeated_experts() -> None:
    """Padding rows that name one expert eight times do not push it above the cap."""
    layer = Layer(32, 1024, 256)
    for tokens in (32, MOST_ROWS):
        x, routing = inputs(tokens, 1024, torch.float16, DEVICE), route_uniform(tokens, TOP_K, 32, DEVICE)
        routing.ids[3:] = 3
        compare(f"{tokens} tokens", layer.call(layer.fused.run, x, routing), layer.want(x, routing))


def check_kinds() -> None:
    built = getattr(few_rows.extension(), "INSTANCES", None)
    for bits, codebook in KINDS:
        number = few_rows.CODEBOOK_NUMBER[codebook]
        if built is not None and not {f"{f}:{bits}:{number}" for f in ("moe", "coop", "gemm")} <= set(built.split()):
            print(f"  {kind_name((bits, codebook))}: not in this build")
            continue
        layer = Layer(32, 1024, 512, bits=bits, codebook=codebook)
        for tokens in (1, 8, 64):
            x, routing = inputs(tokens, 1024, torch.float16, DEVICE), route_uniform(tokens, TOP_K, 32, DEVICE)
            name = f"{kind_name((bits, codebook))}, {tokens} tokens"
            compare(name, layer.call(layer.fused.run, x, routing), layer.want(x, routing))
        packed = layer.packed
        parts = packed.w13_trellis[0, 0].contiguous(), packed.w13_suh[0, 0], packed.w13_svh[0, 0]
        dense = DenseExl3(*parts, codebook)
        want = decode_weight(Exl3Tensors(*parts, codebook), torch.float64)
        for rows in (1, 12, 100, 300):
            x = inputs(rows, 1024, torch.float16, DEVICE)
            compare(f"{kind_name((bits, codebook))}, dense, {rows} rows", dense.apply(x), x.double() @ want)


def check_clamp() -> None:
    layer = Layer(32, 1024, 256, gate_size=12.0)
    for tokens in (8, 64):
        x, routing = inputs(tokens, 1024, torch.float16, DEVICE), route_uniform(tokens, TOP_K, 32, DEVICE)
        compare(f"{tokens} tokens", layer.call(layer.fused.run, x, routing), layer.want(x, routing))


def check_repeats_and_graphs() -> None:
    """Bit-equal repeats; graphs replayed with other routing give the bits of a plain call."""
    layer = Layer(96, 2048, 512, cap=64)
    for method, tokens in (("run", 1), ("run", 8), ("run", 32), ("run", 64), ("run_partition", 512)):
        call = getattr(layer.fused, method)
        x, routing = inputs(tokens, 2048, torch.float16, DEVICE), route_uniform(tokens, TOP_K, 96, DEVICE)
        first = layer.call(call, x, routing)
        assert all(torch.equal(layer.call(call, x, routing), first) for _ in range(5)), f"{method} {tokens}: differs"
        out, graph = torch.empty_like(first), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call(x, routing.ids, routing.weights, out)
        for other in routings(tokens, 96).values():
            routing.ids.copy_(other.ids)
            routing.weights.copy_(other.weights)
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, layer.call(call, x, routing)), f"{method} {tokens}: the graph differs"
        most = 64 if method == "run_partition" else 2**31
        compare(f"{method}, {tokens} tokens, last replay", out, layer.want(x, routing, most=most))


def check_two_layers_in_turn() -> None:
    """Layers that share scratch and locks, steps of changing length, no wait between them."""
    layers = [Layer(32, 1024, 256, seed=seed) for seed in (0, 1)]
    assert layers[0].fused.scratch is layers[1].fused.scratch
    runs = []
    for tokens in (32, 1, 33, 8, 144, 2, 512, 9):
        for layer in layers:
            x, routing = inputs(tokens, 1024, torch.float16, DEVICE), route_uniform(tokens, TOP_K, 32, DEVICE)
            out = torch.empty_like(x, dtype=torch.float32)
            method = layer.fused.run if tokens <= MOST_ROWS else layer.fused.run_partition
            method(x, routing.ids, routing.weights, out)
            runs.append((layer, x, routing, out))
    for layer, x, routing, out in runs:
        compare(f"{len(x)} tokens", out, layer.want(x, routing, most=MOST_ROWS))


def check_dense() -> None:
    for in_features, out_features in ((4096, 2048), (1024, 4096), (128, 640), (2048, 19456)):
        packed = make_experts(1, in_features, out_features, device=DEVICE)
        parts = packed.w13_trellis[0, 0].contiguous(), packed.w13_suh[0, 0], packed.w13_svh[0, 0]
        dense = DenseExl3(*parts, Codebook.MCG)
        weight = decode_weight(Exl3Tensors(*parts, Codebook.MCG), torch.float64)
        for rows in (1, 2, 8, 9, 16, 17, 33, 64, 144, 145, 512, 2048):
            x = inputs(rows, in_features, torch.bfloat16, DEVICE)
            first = dense.apply(x)
            compare(f"{in_features} x {out_features}, {rows} rows", first, x.double() @ weight)
            assert torch.equal(dense.apply(x), first), "a repeat differs"
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = dense.apply(x)
            x.copy_(inputs(rows, in_features, torch.bfloat16, DEVICE, seed=1))
            graph.replay()
            assert torch.equal(captured, dense.apply(x)), "the graph differs"


def check_peer() -> None:
    layer = Layer(32, 1024, 256, cap=128)
    for tokens in (64, 512):
        x, routing = inputs(tokens, 1024, torch.float16, DEVICE), routings(tokens, 32)["half elsewhere"]
        for most in (0, 128):
            peer = DequantisedExperts(layer.fused, most)
            compare(f"{tokens} tokens, {most} fused", layer.call(peer.run, x, routing), layer.want(x, routing))


# Times


def graph_time(calls: list[Callable[[], None]], repeats: int = 10) -> float:
    """Microseconds per call, of calls captured one after the other in one graph."""
    for call in calls:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return event_time(graph.replay, repeats) / len(calls)


def event_time(call: Callable[[], None], repeats: int) -> float:
    call()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3 / repeats


def fused_calls(layer: Layer, method: Callable, tokens: int, count: int) -> list[Callable]:
    """Calls with routings of their own, so that the weights of one are not in the cache for the next."""
    calls = []
    for seed in range(count):
        x = inputs(tokens, layer.packed.hidden, torch.float16, DEVICE)
        routing = route_uniform(tokens, TOP_K, layer.packed.count, DEVICE, seed)
        out = torch.empty_like(x, dtype=torch.float32)
        calls.append(partial(method, x, routing.ids, routing.weights, out))
    return calls


def time_experts() -> None:
    layer = Layer(288, 4096, 1024, cap=MOST_ROWS)
    print(
        f"  scratch {layer.fused.scratch.nbytes / 2**20:.0f} MiB; microseconds per call in a graph, 8 routings in turn"
    )
    ramp = layer.fused.scratch.ramp
    for tokens in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
        fused = graph_time(fused_calls(layer, layer.fused.run_fused, tokens, 8))
        r = route_uniform(tokens, TOP_K, 288, DEVICE)
        tables = graph_time([partial(few_rows.routing_tables, r.ids, r.weights, 288, MOST_ROWS, ramp)] * 4)
        line = f"  {tokens:4} tokens: exl3_moe {fused:8.1f}, of it tables {tables:6.1f}"
        if tokens * TOP_K <= COOP_SLOTS:
            line += f", exl3_moe_coop {graph_time(fused_calls(layer, layer.fused.run_coop, tokens, 8)):8.1f}"
        print(line, flush=True)


def time_peer() -> None:
    layer = Layer(288, 4096, 1024, cap=128, tokens=7168)
    for tokens in (512, 2048, 7168):
        for most in (0, 128):
            peer = DequantisedExperts(layer.fused, most)
            (call,) = fused_calls(layer, peer.run, tokens, 1)
            print(f"  {tokens} tokens, {most} fused: {event_time(call, 3):.0f} microseconds", flush=True)


def time_dense() -> None:
    """Copies of a matrix in turn, so that it is not in the cache."""
    for in_features, out_features in ((4096, 2048), (1024, 4096), (2048, 19456)):
        packed = make_experts(8, in_features, out_features, device=DEVICE)
        stacks = packed.w13_trellis, packed.w13_suh, packed.w13_svh
        layers = [DenseExl3(*(stack[e, 0] for stack in stacks), Codebook.MCG) for e in range(packed.count)]
        for rows in (1, 2, 4, 8, 16, 32, 64, 144, 145, 512):
            x = inputs(rows, in_features, torch.float16, DEVICE)
            whole = graph_time([partial(layer.apply, x) for layer in layers])
            line = f"  {in_features} x {out_features}, {rows} rows: {whole:.1f}"
            if rows <= few_rows.GEMM_ROWS:
                line += f"; exl3_gemm alone, shape {layers[0].shape_index(rows)} of {gemm_times(layers, x)}"
            print(line, flush=True)


def gemm_times(layers: list[DenseExl3], x: torch.Tensor) -> str:
    rows, out_features = x.shape[0], layers[0].svh.shape[0]
    rotated, out = torch.empty_like(x), torch.empty(rows, out_features, device=DEVICE)
    times = []
    for shape in range(1, 8):
        if layers[0].ext.exl3_gemm_shape_compat(shape, rows, x.shape[1], out_features, 4):
            arguments = [(x, m.trellis, out, m.suh, rotated, m.svh, shape, *m.flags, 0) for m in layers]
            times.append(f"{shape}: {graph_time([partial(layers[0].ext.exl3_gemm, *a) for a in arguments]):.1f}")
    return ", ".join(times)


def main(names: list[str]) -> int:
    ext = few_rows.extension()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {ext.__file__}", flush=True)
    steps = {name: step for name, step in globals().items() if name.startswith(("check_", "time_"))}
    failed = []
    for name in names or steps:
        print(name, flush=True)
        start = time.perf_counter()
        try:
            steps[name]()
        except AssertionError as error:
            failed.append(name)
            print(f"  FAILED: {error}")
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        print(f"  {time.perf_counter() - start:.1f} s", flush=True)
    print(f"failed: {', '.join(failed)}" if failed else "all passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
