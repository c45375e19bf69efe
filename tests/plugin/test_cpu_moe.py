"""The unquantised experts on the CPU against plain loops in float64."""

import torch
from vllm_exl3.cpu import moe

EXPERTS, HIDDEN, WIDTH, TOKENS, TOP_K, LIMIT = 5, 24, 16, 7, 3, 1.5


def inputs():
    torch.manual_seed(0)
    x, w13 = torch.randn(TOKENS, HIDDEN), torch.randn(EXPERTS, 2 * WIDTH, HIDDEN)
    w2 = torch.randn(EXPERTS, HIDDEN, WIDTH)
    ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(TOKENS)]).int()
    ids[2, 1] = ids[5, 0] = -1  # experts of another rank
    return x, w13, w2, torch.rand(TOKENS, TOP_K), ids


def plain(x, w13, w2, weights, ids, limit):
    out = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    for t in range(TOKENS):
        for weight, e in zip(weights[t].tolist(), ids[t].tolist(), strict=True):
            if e >= 0:
                gate, up = (w13[e].double() @ x[t].double()).split(WIDTH)
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
                out[t] += weight * (w2[e].double() @ (gate / (1 + (-gate).exp()) * up))
    return out


def test_experts_equal_plain_loops():
    got = moe.clamped_swiglu_experts(*inputs(), LIMIT).double()
    want = plain(*inputs(), LIMIT)
    assert (got - want).norm() / want.norm() < 1e-6
    without_clamp = plain(*inputs(), float("inf"))
    assert (got - without_clamp).norm() / want.norm() > 0.1


def test_a_token_without_experts_of_this_rank_is_zero():
    x, w13, w2, weights, ids = inputs()
    out = moe.clamped_swiglu_experts(x, w13, w2, weights, torch.full_like(ids, -1), LIMIT)
    assert not out.any() and out.shape == x.shape
