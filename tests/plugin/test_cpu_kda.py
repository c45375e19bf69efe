"""KDA in PyTorch against a float64 recurrence written out here."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_exl3.cpu import kda

LOWER_BOUND = -5.0
WIDTH = 16

# Where the gate's raw input lies: ordinary, no decay at all, the full e^-5 per token, both mixed.
GATES = {"ordinary": (-2.0, 2.0), "open": (-30.0, 0.1), "closed": (30.0, 0.1), "mixed": (0.0, 20.0)}


class Case:
    """Random inputs of one KDA layer for packed sequences, as vLLM passes them."""

    def __init__(self, lengths, heads=2, gate="ordinary", seed=0, dtype=torch.float32):
        g = torch.Generator().manual_seed(seed)
        tokens, shape = sum(lengths), (1, sum(lengths), heads, WIDTH)
        self.lengths, self.heads = lengths, heads
        self.q, self.k, self.v = (torch.randn(shape, generator=g).to(dtype) for _ in range(3))
        center, spread = GATES[gate]
        self.raw_g = (center + spread * torch.randn(shape, generator=g)).to(dtype)
        self.raw_beta = torch.randn(1, tokens, heads, generator=g).to(dtype)
        self.a_log = 0.3 * torch.randn(1, 1, heads, 1, generator=g)
        self.bias = 0.5 * torch.randn(heads * WIDTH, generator=g)
        self.state = torch.randn(len(lengths), heads, WIDTH, WIDTH, generator=g)
        self.bounds = torch.tensor([0, *lengths]).cumsum(0).int()

    def prefill(self, tokens=slice(None), state=None, bounds=None):
        return kda.chunk_kda_with_fused_gate(
            q=self.q[:, tokens], k=self.k[:, tokens], v=self.v[:, tokens], raw_g=self.raw_g[:, tokens],
            beta=self.raw_beta[:, tokens].float().sigmoid(), A_log=self.a_log, g_bias=self.bias,
            initial_state=self.state.clone() if state is None else state, output_final_state=True,
            use_qk_l2norm_in_kernel=True, cu_seqlens=self.bounds if bounds is None else bounds,
            safe_gate=True, lower_bound=LOWER_BOUND,
        )  # fmt: skip

    def decode(self, token, cache, slots, **changed):
        now = slice(token, token + 1)
        count = len(slots)
        arguments = dict(
            q=self.q[:, now].expand(1, count, -1, -1), k=self.k[:, now].expand(1, count, -1, -1),
            v=self.v[:, now].expand(1, count, -1, -1), g=self.raw_g[:, now].expand(1, count, -1, -1),
            beta=self.raw_beta[:, now].expand(1, count, -1), initial_state=cache, use_qk_l2norm_in_kernel=True,
            cu_seqlens=torch.arange(count + 1), ssm_state_indices=torch.tensor(slots, dtype=torch.int32),
            sigmoid_beta=True, a_log=self.a_log, g_bias=self.bias, compute_gate=True, lower_bound=LOWER_BOUND,
        )  # fmt: skip
        return kda.fused_recurrent_kda(**arguments | changed)[0]


def oracle(case, sequence, beta_scale=1.0, decay_after=False):
    """One sequence, token by token and head by head, in float64. The last two plant bugs."""
    first = int(case.bounds[sequence])
    state = case.state[sequence].double()
    rows = []
    for t in range(first, first + case.lengths[sequence]):
        row = []
        for h in range(case.heads):
            q, k, v = (x[0, t, h].double() for x in (case.q, case.k, case.v))
            q = q / (q.square().sum() + 1e-6).sqrt() / math.sqrt(WIDTH)
            k = k / (k.square().sum() + 1e-6).sqrt()
            raw = case.raw_g[0, t, h].double() + case.bias.view(case.heads, WIDTH)[h].double()
            gate = LOWER_BOUND / (1 + (-case.a_log.flatten()[h].double().exp() * raw).exp())
            beta = beta_scale / (1 + (-case.raw_beta[0, t, h].double()).exp())
            s = state[h] if decay_after else state[h] * gate.exp()
            s = s + beta * torch.outer(v - s @ k, k)
            state[h] = s * gate.exp() if decay_after else s
            row.append(state[h] @ q)
        rows.append(torch.stack(row))
    return torch.stack(rows) if rows else torch.zeros(0, case.heads, WIDTH), state


def error(got, want) -> float:
    """Relative L2 error of the whole tensor."""
    return float((got.double() - want).norm() / want.norm().clamp_min(1e-30))


lengths = st.lists(st.integers(0, 70), min_size=1, max_size=4).filter(lambda x: sum(x) > 0)


@settings(deadline=None, max_examples=25)
@given(lengths=lengths, heads=st.integers(1, 3), gate=st.sampled_from(sorted(GATES)), seed=st.integers(0, 99))
def test_prefill_equals_the_recurrence(lengths, heads, gate, seed):
    case = Case(lengths, heads, gate, seed)
    out, states = case.prefill()
    for i, length in enumerate(lengths):
        want, state = oracle(case, i)
        first = int(case.bounds[i])
        assert error(states[i], state) < 1e-5
        if length:
            assert error(out[0, first : first + length], want) < 1e-5


@settings(deadline=None, max_examples=25)
@given(length=st.integers(2, 80), data=st.data(), gate=st.sampled_from(sorted(GATES)))
def test_prefill_in_parts_equals_one_pass(length, data, gate):
    case = Case([length], gate=gate, seed=length)
    want, want_state = case.prefill()
    cut = data.draw(st.integers(1, length - 1))
    first, state = case.prefill(slice(0, cut), bounds=torch.tensor([0, cut]))
    second, state = case.prefill(slice(cut, None), state, torch.tensor([0, length - cut]))
    assert error(torch.cat((first, second), 1), want.double()) < 1e-5
    assert error(state, want_state.double()) < 1e-5


@settings(deadline=None, max_examples=15)
@given(lengths=lengths.filter(lambda x: len(x) > 1), seed=st.integers(0, 99))
def test_sequences_of_one_batch_do_not_mix(lengths, seed):
    case = Case(lengths, seed=seed)
    out, states = case.prefill()
    for i, (first, end) in enumerate(zip(case.bounds[:-1].tolist(), case.bounds[1:].tolist(), strict=True)):
        alone, state = case.prefill(slice(first, end), case.state[i : i + 1].clone(), torch.tensor([0, end - first]))
        # Not bit by bit: the vector units' remainders fall on other elements.
        assert error(out[:, first:end], alone.double()) < 1e-6 and error(states[i], state[0].double()) < 1e-6


def test_chunked_equals_recurrent_over_a_long_prompt_at_the_lower_bound():
    tokens, heads = 2048, 2
    q, k, v = (torch.nn.functional.normalize(torch.randn(tokens, heads, 32), dim=-1) for _ in range(3))
    g = torch.full((tokens, heads, 32), LOWER_BOUND)
    g[::7] = -1e-3
    beta, state = torch.rand(tokens, heads), torch.randn(heads, 32, 32)
    want, want_state = kda.recurrent(*(x.double() for x in (q, k, v, g, beta, state)))
    got, got_state = kda.chunked(q, k, v, g, beta, state, kda.block_length(LOWER_BOUND))
    assert torch.isfinite(got).all() and error(got, want) < 1e-5 and error(got_state, want_state) < 1e-5


def test_decode_continues_a_prefill():
    case = Case([40], seed=3)
    want, _ = oracle(case, 0)
    _, state = case.prefill(slice(0, 30), bounds=torch.tensor([0, 30]))
    cache = torch.zeros(5, case.heads, WIDTH, WIDTH)
    kda.ScatterStates()(cache, state, torch.tensor([3], dtype=torch.int32))
    rows = [case.decode(t, cache, [3])[0, 0] for t in range(30, 40)]
    assert error(torch.stack(rows), want[30:]) < 1e-5


def test_decode_leaves_padding_and_other_slots_alone():
    case = Case([1], seed=4)
    cache = torch.randn(6, case.heads, WIDTH, WIDTH)
    before = cache.clone()
    out = torch.full((1, 4, case.heads, WIDTH), float("nan"))
    case.decode(0, cache, [2, 0, -1, 4], out=out)
    touched = [not torch.equal(cache[i], before[i]) for i in range(6)]
    assert touched == [False, False, True, False, True, False]
    assert torch.equal(out[0, 1:3], torch.zeros(2, case.heads, WIDTH)) and out.isfinite().all()


def test_decode_reads_the_first_of_several_blocks_per_request():
    case = Case([1], seed=5)
    cache = torch.randn(6, case.heads, WIDTH, WIDTH)
    slots = torch.tensor([[2, 5]], dtype=torch.int32)
    want = case.decode(0, cache.clone(), [2])
    assert torch.equal(case.decode(0, cache, [2], ssm_state_indices=slots), want)


def test_gather_and_scatter_keep_to_their_slots():
    cache = torch.randn(5, 2, 3, 3)
    before = cache.clone()
    rows = kda.gather_initial_states(cache, torch.tensor([3, 1, -1]), torch.tensor([True, False, False]))
    assert torch.equal(rows[0], before[3]) and not rows[1:].any() and torch.equal(cache, before)
    kda.ScatterStates()(cache, torch.ones(3, 2, 3, 3), torch.tensor([2, 0, -1], dtype=torch.int32))
    assert (cache[2] == 1).all() and torch.equal(cache[[0, 1, 3, 4]], before[[0, 1, 3, 4]])


def test_bf16_inputs_lose_no_more_than_their_rounding():
    case = Case([64, 30], seed=6, dtype=torch.bfloat16)
    out, states = case.prefill()
    assert out.dtype == torch.bfloat16 and states.dtype == torch.float32
    want, state = oracle(case, 0)
    assert error(out[0, :64], want) < 4e-3 and error(states[0], state) < 1e-5


@pytest.mark.parametrize("bug", [{"beta_scale": 1.02}, {"decay_after": True}])
def test_a_planted_bug_is_seen(bug):
    case = Case([20], seed=7)
    assert error(case.prefill()[0][0], oracle(case, 0)[0]) < 1e-5
    assert error(case.prefill()[0][0], oracle(case, 0, **bug)[0]) > 1e-3


@pytest.mark.parametrize(
    "changed, seen",
    [
        ({"num_accepted_tokens": torch.tensor([1])}, "without speculative decoding"),
        ({"cu_seqlens": torch.tensor([0, 2])}, "one token per sequence"),
        ({"lower_bound": None}, "lower bound None"),
        ({"compute_gate": False}, "bounded=False"),
    ],
)
def test_decode_refuses_what_it_cannot_do(changed, seen):
    cache = torch.zeros(3, 2, WIDTH, WIDTH)
    with pytest.raises(NotImplementedError, match=seen):
        Case([2]).decode(0, cache, [1], **changed)
