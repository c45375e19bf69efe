"""The MTP layer as plain functions: what vLLM's `Glm5NextMTP` computes, for training and for measuring.

Its parameters carry the checkpoint's names without `layers.<n>.`. It is a copy of the target's last layer without
hyper-connections, led by `eh_proj`; the routed experts stay those of that layer, bit for bit, so nothing has to be
quantised again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from tools.local_model import model
from tools.local_model.model import Parameters, rms_norm


def initial_parameters(target: Parameters, text: dict, seed: int) -> Parameters:
    """From the target's last layer; at first the layer sees the target's state and hardly the next token."""
    prefix, hidden = f"layers.{text['num_hidden_layers'] - 1}.", text["hidden_size"]
    copied = {
        name.removeprefix(prefix): tensor.clone()
        for name, tensor in target.items()
        if name.startswith(prefix) and ".hc_" not in name
    }
    noise = torch.randn(hidden, hidden, generator=torch.Generator().manual_seed(seed)) * 0.5 * hidden**-0.5
    eh_proj = torch.cat([noise, torch.eye(hidden)], 1).to(target["norm.weight"].device)
    norms = {f"{name}.weight": torch.ones_like(target["norm.weight"]) for name in ("enorm", "hnorm")}
    return copied | norms | {"eh_proj.weight": eh_proj, "shared_head.norm.weight": target["norm.weight"].clone()}


def is_trained(name: str) -> bool:
    """The experts are quantised; the indexer selects everything below index_topk tokens and has no gradient."""
    return not name.startswith(("mlp.experts.", "self_attn.indexer.")) and not name.endswith("correction_bias")


def drafted_states(
    p: Parameters, text: dict, embedding: torch.Tensor, ids: torch.Tensor, final: torch.Tensor, anchors: torch.Tensor,
    k: int, next_token: Callable[[int, torch.Tensor], torch.Tensor],
) -> Iterator[torch.Tensor]:  # fmt: skip
    """k times the state [rows, anchors, hidden] that gives the next drafted token.

    ids [rows, tokens]; final [rows, tokens, hidden]: the target's states; anchors [rows, anchors]: positions of the
    last known token, at least 1; next_token(step, state) -> tokens [rows, anchors] that the next step goes on from.
    """
    following = F.pad(embedding[ids[:, 1:]], (0, 0, 0, 1))
    following[:, 0] = 0.0  # as vLLM does at position 0
    x = _joined(p, text, following, final)
    past = _latents(p, text, x)
    at = anchors - 1  # the state there is the last one that the target gave
    hidden = torch.arange(ids.shape[1], device=ids.device) > at.unsqueeze(-1)  # [rows, anchors, tokens]
    x = x.gather(1, at.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
    own: list[torch.Tensor] = []  # latents of the later steps, which the anchor alone sees
    state = _block(p, text, x, past, hidden, own)
    yield state
    for step in range(1, k):
        x = _joined(p, text, embedding[next_token(step - 1, state)], state)
        own.append(_latents(p, text, x))
        state = _block(p, text, x, past, hidden, own)
        yield state


def _joined(p: Parameters, text: dict, embedded: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    eps = text["rms_norm_eps"]
    parts = (rms_norm(embedded, p["enorm.weight"], eps), rms_norm(state, p["hnorm.weight"], eps))
    return F.linear(torch.cat(parts, -1), p["eh_proj.weight"])


def _latents(p: Parameters, text: dict, x: torch.Tensor) -> torch.Tensor:
    eps = text["rms_norm_eps"]
    latent = F.linear(rms_norm(x, p["input_layernorm.weight"], eps), p["self_attn.kv_a_proj_with_mqa.weight"])
    return rms_norm(latent, p["self_attn.kv_a_layernorm.weight"], eps)


def _block(p: Parameters, text: dict, x: torch.Tensor, past, hidden, own) -> torch.Tensor:
    eps = text["rms_norm_eps"]
    x = x + _attention(p, text, rms_norm(x, p["input_layernorm.weight"], eps), past, hidden, own)
    x = x + model.moe(p, "mlp.", rms_norm(x, p["post_attention_layernorm.weight"], eps), text)
    return rms_norm(x, p["shared_head.norm.weight"], eps)


def _attention(p: Parameters, text: dict, x: torch.Tensor, past, hidden, own: list[torch.Tensor]) -> torch.Tensor:
    """Absorbed: scores and sums on the latents. past [rows, tokens, rank], hidden [rows, anchors, tokens], own of
    [rows, anchors, rank] each."""
    heads, nope = text["num_attention_heads"], text["qk_nope_head_dim"]
    q = rms_norm(F.linear(x, p["self_attn.q_a_proj.weight"]), p["self_attn.q_a_layernorm.weight"], text["rms_norm_eps"])
    q = F.linear(q, p["self_attn.q_b_proj.weight"]).unflatten(-1, (heads, nope))
    to_keys, to_values = p["self_attn.kv_b_proj.weight"].unflatten(0, (heads, -1)).split([nope, text["v_head_dim"]], 1)
    q = torch.einsum("rahd,hdl->rahl", q, to_keys) * nope**-0.5
    scores = torch.einsum("rahl,rtl->raht", q, past).masked_fill(hidden.unsqueeze(2), -torch.inf)
    mine = torch.stack(own, 2) if own else past.new_zeros(*x.shape[:2], 0, past.shape[-1])  # [rows, anchors, n, rank]
    weights = torch.cat([scores, torch.einsum("rahl,ranl->rahn", q, mine)], -1).softmax(-1)
    weights, own_weights = weights.split([past.shape[1], mine.shape[2]], -1)
    mixed = torch.einsum("raht,rtl->rahl", weights, past) + torch.einsum("rahn,ranl->rahl", own_weights, mine)
    return F.linear(torch.einsum("rahl,hdl->rahd", mixed, to_values).flatten(-2), p["self_attn.o_proj.weight"])
