"""A layer's experts through both kernels: few rows on exllamav3's, many on the grouped one. Needs exllamav3_ext."""

import pytest
import torch
from judging import check
from packed_experts import Routing, inputs, make_experts, oracle, route_counts, route_uniform
from vllm_exl3.gpu_experts import GpuExperts, Many, Plan
from vllm_exl3.switches import Few

pytestmark = pytest.mark.gpu
pytest.importorskip("exllamav3_ext", reason="exllamav3 1.6.5 with its compiled extension is not installed")

DEVICE = "cuda"
HIDDEN, WIDTH, EXPERTS, TOP_K, LIMIT = 512, 256, 24, 8, 10.0
CAP, MAX_TOKENS = 32, 2048
PLANS = {
    "grouped": Plan(Few(CAP, 512), Many.GROUPED),
    "decoded": Plan(Few(CAP, 512), Many.DECODED),
    "short": Plan(Few(8, 0), Many.GROUPED),
    "alone": Plan(Few(0, 0), Many.GROUPED),
}
# Both sides of the cap, and of a tile.
COUNTS = (0, 1, 2, 31, 32, 33, 64, 127, 128, 129, 200)


def layer(plan: Plan, count: int = EXPERTS) -> GpuExperts:
    packed = make_experts(count, HIDDEN, WIDTH, device=DEVICE)
    return GpuExperts(packed, limit=LIMIT, top_k=TOP_K, max_tokens=MAX_TOKENS, plan=plan)


def run(experts: GpuExperts, x, routing: Routing, expert_map=None) -> torch.Tensor:
    """With scratch that holds NaNs from before."""
    experts.scratch.workspace.fill_(0xFF)
    experts.scratch.sums.fill_(float("nan"))
    return experts.run(x, routing.ids, routing.weights, expert_map)


@pytest.mark.parametrize("tokens", [1, 2, 8, 31, 32, 33, 64, 200, 512, 2048])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_steps_of_every_length(plan, tokens):
    experts, x = layer(plan), inputs(tokens, HIDDEN, device=DEVICE)
    routing = route_uniform(tokens, TOP_K, EXPERTS, DEVICE, seed=tokens)
    check(run(experts, x, routing), oracle(x, routing, experts.experts, LIMIT))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_experts_on_both_sides_of_the_cap(plan, dtype):
    """Every row is taken by one of the two kernels, and by only one."""
    experts, x = layer(plan, len(COUNTS)), inputs(240, HIDDEN, dtype, DEVICE)
    routing = route_counts(COUNTS, 240, TOP_K, DEVICE)
    check(run(experts, x, routing), oracle(x, routing, experts.experts, LIMIT))


@pytest.mark.parametrize("tokens", [8, 300])
def test_expert_map(tokens):
    experts, x = layer(PLANS["grouped"]), inputs(tokens, HIDDEN, device=DEVICE)
    expert_map = torch.full((3 * EXPERTS,), -1, dtype=torch.int32, device=DEVICE)
    expert_map[EXPERTS : 2 * EXPERTS] = torch.arange(EXPERTS, device=DEVICE)
    routing = route_uniform(tokens, TOP_K, 3 * EXPERTS, DEVICE)
    routing.ids[1, 0] = -1
    got = run(experts, x, routing, expert_map)
    check(got, oracle(x, routing, experts.experts, LIMIT, expert_map=expert_map))


@pytest.mark.parametrize("tokens", [1, 32, 33, 700])
def test_repeats_are_bit_equal(tokens):
    experts, x = layer(PLANS["grouped"]), inputs(tokens, HIDDEN, device=DEVICE)
    routing = route_uniform(tokens, TOP_K, EXPERTS, DEVICE)
    first = run(experts, x, routing)
    for _ in range(3):
        assert torch.equal(run(experts, x, routing), first)


@pytest.mark.parametrize("tokens", [1, 8, 32, 48, 256])
def test_graphs_replay_with_other_routing(tokens):
    # fp16: rounding the result to bf16 alone takes most of the bar.
    experts, x = layer(PLANS["grouped"]), inputs(tokens, HIDDEN, torch.float16, DEVICE)
    routing = route_uniform(tokens, TOP_K, EXPERTS, DEVICE)
    run(experts, x, routing)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = experts.run(x, routing.ids, routing.weights)
    for seed in range(1, 4):
        other = route_uniform(tokens, TOP_K, EXPERTS if seed < 3 else TOP_K, DEVICE, seed)
        routing.ids.copy_(other.ids)
        routing.weights.copy_(other.weights)
        graph.replay()
        replayed = out.clone()
        assert torch.equal(replayed, run(experts, x, routing))
        check(replayed, oracle(x, routing, experts.experts, LIMIT))


@pytest.mark.parametrize("tokens", [8, 32, 512])
def test_steps_neither_wait_nor_take_memory_from_the_device(tokens):
    experts, x = layer(PLANS["grouped"]), inputs(tokens, HIDDEN, device=DEVICE)
    routing = route_uniform(tokens, TOP_K, EXPERTS, DEVICE)
    for _ in range(2):
        run(experts, x, routing)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["segment.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            experts.run(x, routing.ids, routing.weights)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["segment.all.allocated"] == before


def test_longer_steps_are_refused():
    experts = layer(PLANS["grouped"])
    routing = route_uniform(MAX_TOKENS + 1, TOP_K, EXPERTS, DEVICE)
    with pytest.raises(RuntimeError, match="scratch was made for 2048"):
        experts.run(inputs(MAX_TOKENS + 1, HIDDEN, device=DEVICE), routing.ids, routing.weights)
