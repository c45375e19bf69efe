"""The grouped kernel against the float64 oracle from the same packed bits."""

import pytest
import torch
from guarded import run
from judging import check, distance
from packed_experts import (
    KINDS,
    ROW_COUNTS,
    TUNED_KINDS,
    Routing,
    inputs,
    kind_name,
    local_ids,
    make_experts,
    oracle,
    route_counts,
    route_uniform,
)
from vllm_exl3 import ops
from vllm_exl3.format import Codebook, Exl3Tensors
from vllm_exl3.reference import decode_inner

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
HIDDEN, WIDTH, TOP_K = 512, 256, 8
RAGGED_TOKENS = 160


def ragged(seed: int = 0) -> Routing:
    return route_counts(ROW_COUNTS, RAGGED_TOKENS, TOP_K, DEVICE, seed)


@pytest.fixture(scope="module")
def experts():
    return make_experts(len(ROW_COUNTS), HIDDEN, WIDTH, device=DEVICE)


# Values


@pytest.mark.parametrize("kind", KINDS, ids=kind_name)
def test_every_rate_and_codebook(kind):
    bits, codebook = kind
    packed = make_experts(len(ROW_COUNTS), HIDDEN, WIDTH, bits=bits, codebook=codebook, device=DEVICE)
    routing, x = ragged(), inputs(RAGGED_TOKENS, HIDDEN, device=DEVICE)
    check(run(x, routing, packed), oracle(x, routing, packed))


@pytest.mark.parametrize("kind", KINDS, ids=kind_name)
def test_decoded_inner_weights_are_bit_equal(kind):
    bits, codebook = kind
    packed = make_experts(1, HIDDEN, WIDTH, bits=bits, codebook=codebook, device=DEVICE)
    inner = torch.full((HIDDEN, WIDTH), float("nan"), dtype=torch.float16, device=DEVICE)
    ops.decode_inner(packed.w13_trellis[0, 1].contiguous(), codebook, inner)
    want = decode_inner(Exl3Tensors(packed.w13_trellis[0, 1], packed.w13_suh[0, 1], packed.w13_svh[0, 1], codebook))
    assert torch.equal(inner, want)


@pytest.mark.parametrize("hidden, width", [(128, 128), (640, 384), (1024, 512), (384, 1152), (4096, 128)])
@pytest.mark.parametrize("kind", [(4, Codebook.MCG), (5, Codebook.MUL1)], ids=kind_name)
def test_sizes(kind, hidden, width):
    bits, codebook = kind
    packed = make_experts(len(ROW_COUNTS), hidden, width, bits=bits, codebook=codebook, device=DEVICE)
    routing, x = ragged(), inputs(RAGGED_TOKENS, hidden, device=DEVICE)
    check(run(x, routing, packed), oracle(x, routing, packed))


@pytest.mark.parametrize("count", [*ROW_COUNTS[1:], 7168])
def test_all_tokens_on_one_expert(experts, count):
    routing, x = route_counts((0, 0, 0, count), count, 1, DEVICE), inputs(count, HIDDEN, device=DEVICE)
    check(run(x, routing, experts), oracle(x, routing, experts))


@pytest.mark.parametrize("tokens", [1, 100, 7168])
@pytest.mark.parametrize("kind", TUNED_KINDS[:2], ids=kind_name)
def test_all_tokens_on_the_same_experts(kind, tokens):
    bits, codebook = kind
    packed = make_experts(16, 1024, 512, bits=bits, codebook=codebook, device=DEVICE)
    routing = route_uniform(tokens, TOP_K, TOP_K, DEVICE)
    x = inputs(tokens, 1024, device=DEVICE)
    check(run(x, routing, packed), oracle(x, routing, packed))


@pytest.mark.parametrize("shared", [True, False], ids=["shared suh", "own suh"])
@pytest.mark.parametrize("kind", [(4, Codebook.MCG), (3, Codebook.MUL1), (2, Codebook.THREE_INST)], ids=kind_name)
def test_input_scales_of_gate_and_up(kind, shared):
    bits, codebook = kind
    packed = make_experts(
        len(ROW_COUNTS), HIDDEN, WIDTH, bits=bits, codebook=codebook, shared_suh=shared, device=DEVICE
    )  # fmt: skip
    routing, x = ragged(), inputs(RAGGED_TOKENS, HIDDEN, device=DEVICE)
    check(run(x, routing, packed), oracle(x, routing, packed))


@pytest.mark.parametrize("limit", [10.0, 1.0, None])
def test_clamp(limit):
    packed = make_experts(len(ROW_COUNTS), HIDDEN, WIDTH, gate_size=12.0, device=DEVICE)
    routing, x = ragged(), inputs(RAGGED_TOKENS, HIDDEN, device=DEVICE)
    want = oracle(x, routing, packed, limit)
    if limit is not None:
        assert not distance(oracle(x, routing, packed, None), want).is_within, "the clamp does nothing here"
    check(run(x, routing, packed, limit=limit), want)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_element_types(experts, dtype, out_dtype):
    routing, x = ragged(), inputs(RAGGED_TOKENS, HIDDEN, dtype, DEVICE)
    check(run(x, routing, experts, out_dtype=out_dtype), oracle(x, routing, experts))


def test_full_size():
    """A rank of two: 7,168 tokens, top 8 of 288, hidden 4096, width 1024."""
    packed = make_experts(288, 4096, 1024, device=DEVICE)
    routing, x = route_uniform(7168, 8, 288, DEVICE), inputs(7168, 4096, device=DEVICE)
    check(run(x, routing, packed, out_dtype=torch.bfloat16), oracle(x, routing, packed))


# Routing


def test_expert_map_with_foreign_negative_and_unknown_ids(experts):
    world = 3 * experts.count
    expert_map = torch.full((world,), -1, dtype=torch.int32, device=DEVICE)
    expert_map[experts.count : 2 * experts.count] = torch.arange(experts.count, device=DEVICE).flip(0)
    routing, x = route_uniform(300, TOP_K, world, DEVICE), inputs(300, HIDDEN, device=DEVICE)
    routing.ids[3], routing.ids[7, 2], routing.ids[9, 0], routing.ids[11, 1] = -1, -5, world, 2**31 - 1
    check(run(x, routing, experts, expert_map=expert_map), oracle(x, routing, experts, expert_map=expert_map))


def test_unknown_ids_without_a_map(experts):
    routing, x = ragged(), inputs(RAGGED_TOKENS, HIDDEN, device=DEVICE)
    routing.ids[routing.ids == 5] = experts.count
    check(run(x, routing, experts), oracle(x, routing, experts))


@pytest.mark.parametrize("addend", [False, True])
def test_nothing_routed_here(experts, addend):
    routing, x = ragged(), inputs(RAGGED_TOKENS, HIDDEN, device=DEVICE)
    routing.ids.fill_(-1)
    base = inputs(RAGGED_TOKENS, HIDDEN, torch.float32, DEVICE, seed=1) if addend else None
    got = run(x, routing, experts, addend=base)
    assert torch.equal(got, base if addend else torch.zeros_like(got))


def test_one_token_and_one_expert():
    packed = make_experts(1, HIDDEN, WIDTH, device=DEVICE)
    routing, x = route_counts((1,), 1, 1, DEVICE), inputs(1, HIDDEN, device=DEVICE)
    check(run(x, routing, packed), oracle(x, routing, packed))


@pytest.mark.parametrize("min_rows", [1, 2, 16, 33, 65, 129, 130])
def test_few_rows_are_left_to_another_kernel(experts, min_rows):
    """What it leaves out and what it takes are disjoint and complete: together they are the whole sum."""
    routing, x = ragged(), inputs(RAGGED_TOKENS, HIDDEN, device=DEVICE)
    whole = oracle(x, routing, experts)
    taken = oracle(x, routing, experts, min_rows=min_rows)
    rest = (whole - taken).float()
    check(run(x, routing, experts, min_rows=min_rows), taken)
    check(run(x, routing, experts, min_rows=min_rows, addend=rest), whole)


# Repeats, graphs, and what a step may cost


@pytest.mark.parametrize("kind", [(4, Codebook.MCG), (8, Codebook.THREE_INST)], ids=kind_name)
def test_repeats_are_bit_equal(kind):
    bits, codebook = kind
    packed = make_experts(24, HIDDEN, WIDTH, bits=bits, codebook=codebook, device=DEVICE)
    routing, x = route_uniform(2048, TOP_K, 24, DEVICE), inputs(2048, HIDDEN, device=DEVICE)
    first = run(x, routing, packed, out_dtype=torch.bfloat16)
    for poison in (0, 1, 0x7F, 0xFF):
        assert torch.equal(run(x, routing, packed, out_dtype=torch.bfloat16, poison=poison), first)


class Step:
    """One call on buffers that stay where they are, as a captured step has them."""

    def __init__(self, experts, tokens: int) -> None:
        self.experts, self.x = experts, inputs(tokens, HIDDEN, device=DEVICE)
        self.routing = route_uniform(tokens, TOP_K, experts.count, DEVICE)
        self.out = torch.empty(tokens, HIDDEN, dtype=torch.bfloat16, device=DEVICE)
        size = ops.workspace_bytes(tokens, TOP_K, experts.count, HIDDEN, WIDTH)
        self.workspace = torch.empty(size, dtype=torch.uint8, device=DEVICE)

    def __call__(self) -> None:
        ops.fat_moe(
            self.x, self.routing.ids, self.routing.weights, self.experts, out=self.out, workspace=self.workspace,
            limit=10.0,
        )  # fmt: skip


def test_graph_replays_with_other_routing(experts):
    step = Step(experts, 200)
    graph = torch.cuda.CUDAGraph()
    step()
    with torch.cuda.graph(graph):
        step()
    for seed in range(4):
        other = ragged(seed) if seed == 3 else route_uniform(200, TOP_K, experts.count, DEVICE, seed)
        step.routing.ids.fill_(-1)
        step.routing.ids[: other.tokens].copy_(other.ids)
        step.routing.weights[: other.tokens].copy_(other.weights)
        step.x.copy_(inputs(200, HIDDEN, device=DEVICE, seed=seed))
        step.workspace.fill_(0xFF)
        step.out.fill_(float("nan"))
        graph.replay()
        want = run(step.x, step.routing, experts, out_dtype=torch.bfloat16)
        assert torch.equal(step.out, want)
        check(step.out, oracle(step.x, step.routing, experts))


def test_step_neither_allocates_nor_waits(experts):
    step = Step(experts, 512)
    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profile:
        with torch.profiler.record_function("measured"):
            for _ in range(3):
                step()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    events = profile.events()
    (span,) = [
        event.time_range for event in events if event.name == "measured" and str(event.device_type).endswith("CPU")
    ]
    inside = {event.name for event in events if span.start <= event.time_range.start <= span.end}
    calls = {name for name in inside if name.startswith("cuda")}
    assert any("Launch" in name for name in calls), f"the profiler saw no launch, only {sorted(inside)}"
    forbidden = ("Synchronize", "Malloc", "Free", "cudaMemcpy", "EventQuery")
    assert not [name for name in calls if any(word in name for word in forbidden)], sorted(calls)


def test_local_ids_of_the_oracle_are_the_headers_rule():
    """fat_moe.h: negative ids and those beyond the map are skipped."""
    ids = torch.tensor([[-1, 0, 3, 4]], dtype=torch.int32, device=DEVICE)
    assert local_ids(ids, 4).tolist() == [[-1, 0, 3, -1]]
