"""The judge of the GPU tests: it accepts a correct sum in bf16 and none of the planted bugs. Needs no GPU."""

import pytest
import torch
from judging import DAMAGES, check, distance
from packed_experts import inputs, local_ids, make_experts, oracle, oracle_slots, route_counts, route_uniform
from vllm_exl3.ops import PackedExperts
from vllm_exl3.reference import moe_forward

HIDDEN, WIDTH, EXPERTS, TOP_K = 256, 128, 8, 4

ROUTINGS = {
    "uniform": lambda: route_uniform(64, TOP_K, EXPERTS),
    "ragged": lambda: route_counts((0, 1, 15, 16, 17, 33, 2, 3), 48, TOP_K),
    "one expert": lambda: route_counts((0, 0, 40), 40, 1),
}


@pytest.fixture(scope="module")
def experts():
    return make_experts(EXPERTS, HIDDEN, WIDTH)


@pytest.fixture(params=ROUTINGS)
def case(request, experts):
    routing = ROUTINGS[request.param]()
    return routing, inputs(routing.tokens, HIDDEN), oracle(inputs(routing.tokens, HIDDEN), routing, experts)


def test_correct_sum_passes_also_in_bf16(case):
    _, _, want = case
    check(want.float(), want)
    check(want.bfloat16(), want)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damaged_sum_fails(case, experts, damage):
    routing, x, want = case
    local = local_ids(routing.ids, EXPERTS)
    slots = oracle_slots(x, local, routing.weights, experts, 10.0)
    check(slots.sum(1), want)
    assert not distance(damage(slots, local), want).is_within


def test_swapped_experts_fail(case, experts):
    routing, x, want = case
    order = [1, 0, 3, 2, *range(4, EXPERTS)]
    names = ("w13_trellis", "w13_suh", "w13_svh", "w2_trellis", "w2_suh", "w2_svh")
    swapped = PackedExperts(*(getattr(experts, name)[order] for name in names), experts.codebook, True)
    assert not distance(oracle(x, routing, swapped), want).is_within


def test_lost_row_fails_in_the_largest_batch():
    """7,168 rows dilute one row's error in the whole tensor; the row's own measure does not."""
    want = inputs(7168, 128, torch.float64)
    got = want.clone()
    got[4711] *= 0.97
    got[4711, :8] = 0
    assert distance(got, want).worst_row == 4711
    assert not distance(got, want).is_within


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_odd_values_must_match_exactly(value):
    want = inputs(4, 128, torch.float64)
    got = want.clone()
    got[2, 5] = value
    assert distance(got, want).worst_row == 2
    assert not distance(got, want).is_within
    assert distance(got, got).is_within


def test_row_that_should_be_zero_must_be():
    want = inputs(4, 128, torch.float64)
    want[1] = 0
    got = want.clone()
    got[1, 0] = 1e-3
    assert distance(got, want).worst_row == 1 and not distance(got, want).is_within


def test_oracle_is_the_plugins_own_reference(experts):
    """The CPU engine's code path and the oracle agree; EP map, foreign and negative ids included."""
    from packed_experts import weights_of

    routing = route_uniform(40, TOP_K, 2 * EXPERTS)
    expert_map = torch.full((2 * EXPERTS,), -1, dtype=torch.int32)
    expert_map[EXPERTS:] = torch.arange(EXPERTS)
    x = inputs(40, HIDDEN)
    gate, up, down = zip(*(weights_of(experts, expert) for expert in range(EXPERTS)), strict=True)
    w13 = torch.stack([torch.cat(pair, dim=1) for pair in zip(gate, up, strict=True)])
    want = moe_forward(x, w13, torch.stack(down), routing.weights, routing.ids, 10.0, expert_map)
    torch.testing.assert_close(oracle(x, routing, experts, 10.0, expert_map=expert_map), want)
