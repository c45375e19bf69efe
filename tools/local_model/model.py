"""The text model as plain functions for training: no data-dependent shapes, so it fits a CUDA graph.

It computes what transformers' Glm5NextTextModel computes (checked in tests/tools) with two differences
in form: KDA works on chunks of 16 with matrix products only, and every expert sees every token, its
output weighted with zero where the router did not choose it. Parameters carry checkpoint names without
namespace; the experts of a layer are stacked under `experts.gate_up` [E, in, 2*width] and
`experts.down` [E, width, out]. Attention covers the whole context, which equals the sparse selection up
to index_topk tokens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F

from tools.local_model import shapes

CHUNK = 16
Parameters = dict[str, torch.Tensor]


def initial_parameters(text: dict, seed: int) -> Parameters:
    generator = torch.Generator().manual_seed(seed)
    parameters: Parameters = {}
    for name, shape in shapes.native_tensors(text).items():
        parameters[name] = _initial_native(name, shape, generator)
    for module, linear in shapes.linear_modules(text).items():
        if not shapes.is_routed_expert(module):
            std = linear.cols**-0.5 * (0.5 if module.endswith(("o_proj", "down_proj")) else 1.0)
            parameters[f"{module}.weight"] = std * torch.randn(linear.rows, linear.cols, generator=generator)
    experts, hidden, width = text["n_routed_experts"], text["hidden_size"], text["moe_intermediate_size"]
    for index in moe_layers(text):
        prefix = f"layers.{index}.mlp.experts."
        gate_up = torch.randn(experts, hidden, 2 * width, generator=generator) * hidden**-0.5
        parameters[prefix + "gate_up"] = gate_up
        parameters[prefix + "down"] = 0.3 * torch.randn(experts, width, hidden, generator=generator) * width**-0.5
    return parameters


def moe_layers(text: dict) -> list[int]:
    return [i for i, kind in enumerate(text["mlp_layer_types"]) if kind == "sparse"]


def _initial_native(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator)
    if name == "embed_tokens.weight":
        return 0.5 * noise
    if name.endswith("dt_bias"):
        # Half-lives from a few to a few hundred tokens: decay is -5 * sigmoid(bias) per step.
        return torch.empty(shape).uniform_(-7.5, -1.0, generator=generator)
    if name.endswith("e_score_correction_bias"):
        return torch.full(shape, 2.0)  # only differences choose experts; the real model has an offset too
    if "conv1d" in name:
        return noise * 0.5
    if re.search(r"hc_(attn|ffn)_fn$", name) or "index_kpool_compress_gate" in name:
        return 0.02 * noise
    if re.search(r"hc_(attn|ffn)_base$", name):
        return _initial_mixing(shape[0])
    if name.endswith(("A_log", ".bias", "compress_ape")):
        return torch.zeros(shape)
    return torch.ones(shape)  # norms and mHC scales


def _initial_mixing(length: int) -> torch.Tensor:
    """mHC: read and write every stream alike, and keep each stream mostly to itself."""
    streams = math.isqrt(length + 1) - 1
    base = torch.zeros(length)
    base[2 * streams :] = 3.0 * torch.eye(streams).flatten()
    return base


@dataclass
class Perturbation:
    """What only training does: noise where an engine may round differently, and notes about the routers.

    An engine in bf16 must answer as this model does in fp32. So each sub-layer's input is off by more than
    bf16 would put it off, and the choice of experts likewise; `shortfalls` of the lead of the last chosen
    expert are a loss that keeps tokens away from ties.
    """

    input_noise: float = 0.01  # relative; bf16 rounds by up to 0.004
    router_noise: float = 0.01
    lead: float = 0.06  # of the last chosen expert's score over the next one's
    loads: list[tuple[str, torch.Tensor]] = field(default_factory=list)  # (layer, share of each expert)
    shortfalls: list[torch.Tensor] = field(default_factory=list)  # per layer [rows]: 0 (kept) to 1 (tied)

    def disturbed(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + self.input_noise * torch.randn_like(x))


def logits(parameters: Parameters, ids: torch.Tensor, text: dict, training: Perturbation | None = None) -> torch.Tensor:
    """ids [batch, tokens] (padding on the right is harmless) -> logits [batch, tokens, vocabulary]."""
    for streams in residual_streams(parameters, ids, text, training):
        last = streams
    hidden = rms_norm(last.mean(2), parameters["norm.weight"], text["rms_norm_eps"])
    return F.linear(training.disturbed(hidden) if training else hidden, parameters["lm_head.weight"])


def residual_streams(
    parameters: Parameters, ids: torch.Tensor, text: dict, training: Perturbation | None = None
) -> Iterator[torch.Tensor]:
    """The residual streams [batch, tokens, n, hidden] that leave each layer, first to last."""
    p = parameters
    disturbed = training.disturbed if training else lambda x: x
    streams = p["embed_tokens.weight"][ids].unsqueeze(2).expand(-1, -1, text["hc_mult"], -1)
    for index in range(text["num_hidden_layers"]):
        prefix = f"layers.{index}."
        attention = kda if text["layer_types"][index] == "linear_attention" else mla
        attend = partial(attention, p, prefix + "self_attn.", text=text)
        streams = _hyper_connected(p, prefix, "attn", streams, text, lambda x, block=attend: block(disturbed(x)))
        if text["mlp_layer_types"][index] == "dense":
            feed_forward = partial(swiglu_mlp, p, prefix + "mlp.", text=text)
        else:
            feed_forward = partial(moe, p, prefix + "mlp.", text=text, training=training)
        streams = _hyper_connected(p, prefix, "ffn", streams, text, lambda x, block=feed_forward: block(disturbed(x)))
        yield streams


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return normed if weight is None else normed * weight


def _hyper_connected(p: Parameters, prefix: str, side: str, streams: torch.Tensor, text: dict, block):
    """One sub-layer inside manifold-constrained hyper-connections; streams [batch, tokens, n, hidden]."""
    n, eps = text["hc_mult"], text["hc_eps"]
    mixes = F.linear(rms_norm(streams.flatten(2), None, text["rms_norm_eps"]), p[f"{prefix}hc_{side}_fn"])
    base, scale = p[f"{prefix}hc_{side}_base"], p[f"{prefix}hc_{side}_scale"]
    pre, post, comb = (
        mix * scale[i] + bias
        for i, (mix, bias) in enumerate(zip(mixes.split([n, n, n * n], -1), base.split([n, n, n * n]), strict=True))
    )
    read = torch.sigmoid(pre) + eps
    norm = "input_layernorm" if side == "attn" else "post_attention_layernorm"
    x = (read.unsqueeze(-1) * streams).sum(2)
    y = block(rms_norm(x, p[f"{prefix}{norm}.weight"], text["rms_norm_eps"]))
    mixing = _sinkhorn(comb.unflatten(-1, (n, n)), text["hc_sinkhorn_iters"], eps)
    return 2 * torch.sigmoid(post).unsqueeze(-1) * y.unsqueeze(2) + mixing.transpose(-1, -2) @ streams


def _sinkhorn(scores: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """Alternately normalise columns and rows until the matrix is doubly stochastic."""
    matrix = scores.softmax(-1) + eps
    matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    return matrix


def kda(p: Parameters, prefix: str, x: torch.Tensor, text: dict) -> torch.Tensor:
    """Kimi delta attention; x [batch, tokens, hidden]."""
    settings = text["linear_attn_config"]
    heads, dim = settings["num_heads"], settings["head_dim"]

    def split(y: torch.Tensor) -> torch.Tensor:  # -> [batch, heads, tokens, dim]
        return y.unflatten(-1, (heads, dim)).transpose(1, 2)

    q, k, v = (
        split(_short_conv(F.linear(x, p[f"{prefix}{s}_proj.weight"]), p[f"{prefix}{s}_conv1d.weight"])) for s in "qkv"
    )
    q, k = (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6) for y in (q, k))
    gate = F.linear(F.linear(x, p[prefix + "f_a_proj.weight"]), p[prefix + "f_b_proj.weight"])
    rate = p[prefix + "A_log"].exp()[:, None, None]
    decay = settings["gate_lower_bound"] * torch.sigmoid(rate * split(gate + p[prefix + "dt_bias"]))
    beta = torch.sigmoid(F.linear(x, p[prefix + "b_proj.weight"])).transpose(1, 2)
    with _full_precision():
        mixed = delta_rule(q * dim**-0.5, k, v, decay, beta)
    out_gate = split(F.linear(F.linear(x, p[prefix + "g_a_proj.weight"]), p[prefix + "g_b_proj.weight"]))
    out = rms_norm(mixed, p[prefix + "o_norm.weight"], text["rms_norm_eps"]) * torch.sigmoid(out_gate)
    return F.linear(out.transpose(1, 2).flatten(2), p[prefix + "o_proj.weight"])


@contextmanager
def _full_precision():
    """No TF32: inverting a chunk's triangular matrix amplifies rounding."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _short_conv(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Causal depthwise convolution and SiLU; as shifted sums, which beat cuDNN at width 4."""
    width = weight.shape[-1]
    padded = F.pad(x, (0, 0, width - 1, 0))
    return F.silu(sum(padded[:, i : i + x.shape[1]] * weight[:, 0, i] for i in range(width)))


def delta_rule(q, k, v, decay, beta) -> torch.Tensor:
    """S_t = diag(e^g) S_{t-1} + k (beta (v - k^T diag(e^g) S_{t-1}))^T and o_t = q^T S_t, by chunks.

    q, k, v, decay [batch, heads, tokens, dim] with decay = g <= 0; beta [batch, heads, tokens].
    Inside a chunk e^(G_i - G_j) is split at the middle: with |g| <= 5 and 16 steps both halves fit fp32.
    """
    tokens = q.shape[2]
    pad = -tokens % CHUNK
    q, k, v, decay = (F.pad(y, (0, 0, 0, pad)).unflatten(2, (-1, CHUNK)) for y in (q, k, v, decay))
    beta = F.pad(beta, (0, pad)).unflatten(2, (-1, CHUNK)).unsqueeze(-1)
    total = decay.cumsum(-2)
    middle = total[..., CHUNK // 2 - 1 : CHUNK // 2, :]
    k_late, k_early, q_late = k * (total - middle).exp(), k * (middle - total).exp(), q * (total - middle).exp()
    attend = (k_late @ k_early.mT * beta).tril(-1)
    solve = _inverse_unit_lower(attend)
    from_state = solve @ (beta * k * total.exp())
    from_values = solve @ (beta * v)
    read_keys, read_state = (q_late @ k_early.mT).tril(), q * total.exp()
    end = total[..., -1:, :]
    k_end, fade = k * (end - total).exp(), end.exp().mT
    state = torch.zeros(*q.shape[:2], q.shape[-1], v.shape[-1], device=q.device, dtype=q.dtype)
    outputs = []
    for chunk in range(q.shape[2]):
        update = from_values[:, :, chunk] - from_state[:, :, chunk] @ state
        outputs.append(read_state[:, :, chunk] @ state + read_keys[:, :, chunk] @ update)
        state = fade[:, :, chunk] * state + k_end[:, :, chunk].mT @ update
    return torch.stack(outputs, 2).flatten(2, 3)[:, :, :tokens]


def _inverse_unit_lower(strict: torch.Tensor) -> torch.Tensor:
    """(I + N)^-1 for strictly lower N [.., 16, 16]: (I - N)(I + N^2)(I + N^4)(I + N^8), since N^16 = 0."""
    identity = torch.eye(CHUNK, device=strict.device, dtype=strict.dtype)
    inverse, power = identity - strict, strict
    for _ in range(CHUNK.bit_length() - 2):
        power = power @ power
        inverse = inverse @ (identity + power)
    return inverse


def mla(p: Parameters, prefix: str, x: torch.Tensor, text: dict) -> torch.Tensor:
    """Multi-head latent attention without positions, over the whole causal context."""
    heads, nope, value = text["num_attention_heads"], text["qk_nope_head_dim"], text["v_head_dim"]
    eps = text["rms_norm_eps"]
    q = rms_norm(F.linear(x, p[prefix + "q_a_proj.weight"]), p[prefix + "q_a_layernorm.weight"], eps)
    q = F.linear(q, p[prefix + "q_b_proj.weight"]).unflatten(-1, (heads, nope)).transpose(1, 2)
    latent = F.linear(x, p[prefix + "kv_a_proj_with_mqa.weight"])
    latent = rms_norm(latent, p[prefix + "kv_a_layernorm.weight"], eps)
    kv = F.linear(latent, p[prefix + "kv_b_proj.weight"]).unflatten(-1, (heads, nope + value)).transpose(1, 2)
    k, v = kv.split([nope, value], -1)
    scores = (q @ k.mT) * nope**-0.5
    ahead = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
    weights = scores.masked_fill(ahead, -torch.inf).softmax(-1)
    return F.linear((weights @ v).transpose(1, 2).flatten(2), p[prefix + "o_proj.weight"])


def swiglu_mlp(p: Parameters, prefix: str, x: torch.Tensor, text: dict) -> torch.Tensor:
    gate, up = (F.linear(x, p[f"{prefix}{side}_proj.weight"]) for side in ("gate", "up"))
    return F.linear(clamped_swiglu(gate, up, text["swiglu_limit"]), p[prefix + "down_proj.weight"])


def clamped_swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def route(
    p: Parameters, prefix: str, x: torch.Tensor, text: dict, training: Perturbation | None = None
) -> torch.Tensor:
    """Weight of every expert for every row of x [rows, hidden]: zero where not chosen."""
    scores = torch.sigmoid(F.linear(x, p[prefix + "gate.weight"]))
    top_k, biased = text["num_experts_per_tok"], scores + p[prefix + "gate.e_score_correction_bias"]
    if training is not None:
        ordered = biased.topk(top_k + 1, -1).values
        training.shortfalls.append(F.relu(1 - (ordered[:, -2] - ordered[:, -1]) / training.lead))
        biased = biased + training.router_noise * torch.randn_like(biased)
    chosen = biased.topk(top_k, -1).indices
    kept = torch.zeros_like(scores).scatter(1, chosen, 1.0) * scores
    weights = text["routed_scaling_factor"] * kept / (kept.sum(-1, keepdim=True) + 1e-20)
    if training is not None:
        training.loads.append((prefix, (weights > 0).float().mean(0) / top_k))
    return weights


def moe(p: Parameters, prefix: str, x: torch.Tensor, text: dict, training: Perturbation | None = None) -> torch.Tensor:
    rows = x.flatten(0, 1)
    weights = route(p, prefix, rows, text, training)
    gate, up = (rows @ p[prefix + "experts.gate_up"]).chunk(2, -1)  # [experts, rows, width]
    inner = clamped_swiglu(gate, up, text["swiglu_limit"]) * weights.T.unsqueeze(-1)
    routed = (inner @ p[prefix + "experts.down"]).sum(0)
    return routed.view_as(x) + swiglu_mlp(p, prefix + "shared_experts.", x, text)
