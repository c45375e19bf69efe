"""Kimi delta attention (KDA) in PyTorch: the linear attention of GLM-5.3's KDA layers.

Per head, with the state S [value, key], the log decay g_t <= 0 per key channel and the step size b_t:

    S_t = S_{t-1} diag(exp g_t) + b_t (v_t - S_{t-1} diag(exp g_t) k_t) k_t^T
    o_t = S_t q_t

`recurrent` walks the tokens one by one. `chunked` is the same in blocks: with G the running sum of g
inside a block, the updates u_t of the block solve one triangular system

    (I + A) U = b (V - (K e^G) S_0^T),   A[t,i] = b_t <k_t e^{G_t}, k_i e^{-G_i}> for i < t

after which outputs and the next state are three products. The functions in the second half are called
by vLLM in place of its Triton kernels and have their names, arguments and layouts.
"""

from itertools import pairwise

import torch

# e^{-G} must stay finite in fp32 (largest e^88) over one block.
_MAX_BLOCK_DECAY = 80.0


# Arithmetic


def log_decay(
    raw: torch.Tensor,  # [tokens, heads, key]
    a_log: torch.Tensor,  # heads values
    bias: torch.Tensor | None,  # heads * key values
    lower_bound: float,
) -> torch.Tensor:
    """The bounded gate of GLM-5.3: lower_bound * sigmoid(exp(a_log) * (raw + bias)), in fp32."""
    heads, channels = raw.shape[-2:]
    x = raw.float()
    if bias is not None:
        x = x + bias.float().view(heads, channels)
    return lower_bound * torch.sigmoid(a_log.float().view(heads, 1).exp() * x)


def l2_normalize(x: torch.Tensor) -> torch.Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def step(q, k, v, g, beta, state):
    """One token of each of n sequences: q, k, g [n, heads, key], v [n, heads, value], beta [n, heads],
    state [n, heads, value, key]. Returns the outputs [n, heads, value] and the new states."""
    state = state * g.exp().unsqueeze(-2)
    error = v - (state @ k.unsqueeze(-1)).squeeze(-1)
    state = state + (beta.unsqueeze(-1) * error).unsqueeze(-1) * k.unsqueeze(-2)
    return (state @ q.unsqueeze(-1)).squeeze(-1), state


def recurrent(q, k, v, g, beta, state):
    """The definition, token by token: q, k, g [tokens, heads, key], v [tokens, heads, value],
    beta [tokens, heads], state [heads, value, key]. Returns outputs like v and the last state."""
    out = torch.empty_like(v)
    state = state.unsqueeze(0)
    for t in range(q.shape[0]):
        now = slice(t, t + 1)
        out[now], state = step(q[now], k[now], v[now], g[now], beta[now], state)
    return out, state[0]


def block_length(lower_bound: float) -> int:
    """How many tokens one block of `chunked` may hold when a token decays by at most e^lower_bound."""
    return max(1, min(64, int(_MAX_BLOCK_DECAY / abs(lower_bound))))


def chunked(q, k, v, g, beta, state, block: int):
    """As `recurrent`, `block` tokens at a time. The decay of one block must not exceed e^-80."""
    tokens = q.shape[0]
    q, k, v, g, beta = (_to_blocks(x, block) for x in (q, k, v, g, beta))  # [heads, blocks, block, ...]
    decay = g.cumsum(-2)
    k_in, k_out = k * decay.exp(), k * (-decay).exp()
    q_in = q * decay.exp()
    beta = beta.unsqueeze(-1)

    # Everything that does not depend on the state, for all blocks at once
    identity = torch.eye(block, dtype=q.dtype, device=q.device)
    mixing = identity + (beta * (k_in @ k_out.mT)).tril(-1)
    solved = torch.linalg.solve_triangular(
        mixing, torch.cat((beta * v, beta * k_in), -1), upper=False, unitriangular=True
    )
    update_v, update_k = solved.split((v.shape[-1], k.shape[-1]), -1)
    inner = (q_in @ k_out.mT).tril()
    k_end = k * (decay[..., -1:, :] - decay).exp()
    block_decay = decay[..., -1:, :].exp()

    # The state, block after block
    out = torch.empty_like(v)
    for n in range(q.shape[1]):
        update = update_v[:, n] - update_k[:, n] @ state.mT
        out[:, n] = q_in[:, n] @ state.mT + inner[:, n] @ update
        state = state * block_decay[:, n] + update.mT @ k_end[:, n]
    return out.flatten(1, 2)[:, :tokens].transpose(0, 1), state


def _to_blocks(x: torch.Tensor, block: int) -> torch.Tensor:
    """[tokens, heads, ...] -> [heads, blocks, block, ...]; missing tokens are zeros, which leave the
    state as it is (no decay, no update)."""
    missing = -x.shape[0] % block
    if missing:
        x = torch.cat((x, x.new_zeros(missing, *x.shape[1:])))
    return x.transpose(0, 1).unflatten(1, (-1, block)).contiguous()


# In place of vLLM's kernels


def gather_initial_states(state: torch.Tensor, indices: torch.Tensor, has_initial_state: torch.Tensor) -> torch.Tensor:
    """State rows of the sequences; zeros where a sequence has none yet."""
    rows = state[indices.long().clamp_min(0)]
    rows[~has_initial_state] = 0
    return rows


class ScatterStates:
    """Callable like vLLM's dispatcher object, whose warm-up hook the KDA layer calls."""

    @staticmethod
    def register_warmup(**_shapes) -> None:
        """Nothing is compiled."""

    def __call__(self, state: torch.Tensor, src: torch.Tensor, indices: torch.Tensor) -> None:
        real = indices > 0  # slot 0 is vLLM's null block, -1 marks padding
        state[indices[real].long()] = src[real].to(state.dtype)


def chunk_kda_with_fused_gate(
    q, k, v, raw_g, beta, A_log, g_bias,
    scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    cu_seqlens=None, safe_gate=False, lower_bound=None,
):  # fmt: skip
    """Prefill: sequences packed along the token axis of [1, tokens, heads, width]; beta is past its
    sigmoid; initial_state [sequences, heads, value, key]. Returns outputs and last states."""
    _require_glm_gate(safe_gate, lower_bound, use_qk_l2norm_in_kernel)
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    g = log_decay(raw_g[0], A_log, g_bias, lower_bound)
    q, k = l2_normalize(q[0]) * scale, l2_normalize(k[0])
    values, beta = v[0].float(), beta[0].float()
    out, last_states = torch.zeros_like(v), initial_state.float()
    bounds, block = cu_seqlens.tolist(), block_length(lower_bound)
    for i, (first, end) in enumerate(pairwise(bounds)):
        if first == end:
            continue
        s = slice(first, end)
        rows, last_states[i] = chunked(q[s], k[s], values[s], g[s], beta[s], last_states[i], min(block, end - first))
        out[0, s] = rows.to(v.dtype)
    return out, last_states


def fused_recurrent_kda(
    q, k, v, g=None, beta=None,
    scale=None, initial_state=None, inplace_final_state=True, use_qk_l2norm_in_kernel=True,
    cu_seqlens=None, ssm_state_indices=None, num_accepted_tokens=None, out=None,
    sigmoid_beta=False, a_log=None, g_bias=None, compute_gate=False, lower_bound=None,
):  # fmt: skip
    """Decode: one token per sequence, packed like prefill; gate and beta are raw. `initial_state` is
    the cache [slots, heads, value, key]; row ssm_state_indices[i] is read and written for sequence i.
    Sequences whose slot is not positive are padding: their output is zero and no state is touched."""
    _require_glm_gate(compute_gate and sigmoid_beta, lower_bound, use_qk_l2norm_in_kernel)
    _require_plain_decode(q.shape[1], cu_seqlens, num_accepted_tokens)
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    slots = ssm_state_indices.reshape(q.shape[1], -1)[:, 0].long()
    real = slots > 0
    rows, states = step(
        l2_normalize(q[0][real]) * scale,
        l2_normalize(k[0][real]),
        v[0][real].float(),
        log_decay(g[0][real], a_log, g_bias, lower_bound),
        beta[0][real].float().sigmoid(),
        initial_state[slots[real]].float(),
    )
    initial_state[slots[real]] = states.to(initial_state.dtype)
    out = torch.empty_like(v) if out is None else out
    out.zero_()
    out[0, real] = rows.to(out.dtype)
    return out, initial_state


def _require_glm_gate(bounded: bool, lower_bound: float | None, normalize: bool) -> None:
    if bounded and normalize and lower_bound is not None and lower_bound < 0:
        return
    raise NotImplementedError(
        f"KDA on the CPU: gate bounded={bounded}, lower bound {lower_bound}, normalised q and k={normalize}; "
        "only GLM-5.3's bounded gate with a negative lower bound and normalised q and k is there. "
        "Check linear_attn_config in config.json."
    )


def _require_plain_decode(tokens: int, cu_seqlens: torch.Tensor, num_accepted_tokens) -> None:
    if num_accepted_tokens is None and cu_seqlens.numel() == tokens + 1 and bool((cu_seqlens.diff() == 1).all()):
        return
    raise NotImplementedError(
        f"KDA on the CPU: a decode step with {tokens} tokens for {cu_seqlens.numel() - 1} sequences; one token "
        "per sequence is needed. Start without speculative decoding."
    )
