"""A small DFlash2 draft as plain functions: what vLLM's `qwen3_dflash2` computes, for training and for measuring.

The draft reads the target's residual streams (`own_text.TAPS`) as context. A block is the last known token (the
anchor) and k mask tokens; each of them attends to the context before the anchor and to the whole block, and each mask
gives the token of its own position. Parameters carry the names of the checkpoint.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from tools.local_model.model import Parameters, rms_norm
from tools.local_model.own_text import TAPS
from tools.local_model.shapes import special_token_id


def draft_config(text: dict, taps: tuple[int, ...] = TAPS, **sizes) -> dict:
    """config.json of a draft for a target with this `text_config`."""
    config = {
        "architectures": ["DFlash2DraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "vocab_size": text["vocab_size"],
        "hidden_size": text["hidden_size"],
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": text["max_position_embeddings"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "use_sliding_window": True,
        "sliding_window": 256,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": text["eos_token_id"],
        "pad_token_id": text["pad_token_id"],
        "dflash_config": {
            "target_layer_ids": list(taps),
            "mask_token_id": special_token_id(text["vocab_size"], "[MASK]"),
            "causal": False,
            "conv_kernel_size": 3,
            "conv_group_size": 32,
            "selector_rank": 16,
            "selector_top_k": 4,
        },
    } | sizes
    return config | {"layer_types": ["sliding_attention"] * config["num_hidden_layers"]}


def draft_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the checkpoint's tensors; embedding and head are the target's."""
    hidden, draft = config["hidden_size"], config["dflash_config"]
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, len(draft["target_layer_ids"]) * hidden)}
    for index in range(config["num_hidden_layers"]):
        shapes |= _layer_shapes(config, f"layers.{index}.")
    table = (config["vocab_size"], draft["selector_rank"])
    return shapes | {
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        "candidate_selector.predecessor_codebook": table,
        "candidate_selector.successor_codebook": table,
        "candidate_selector.hidden_projection.weight": (draft["selector_rank"], hidden),
    }


def _layer_shapes(config: dict, prefix: str) -> dict[str, tuple[int, ...]]:
    hidden, width, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, shared = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    draft = config["dflash_config"]
    taps, groups = draft["conv_kernel_size"], hidden // draft["conv_group_size"]
    shapes = {
        "self_attn.q_proj.weight": (heads, hidden),
        "self_attn.k_proj.weight": (shared, hidden),
        "self_attn.v_proj.weight": (shared, hidden),
        "self_attn.o_proj.weight": (hidden, heads),
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
        "mlp.gate_proj.weight": (width, hidden),
        "mlp.up_proj.weight": (width, hidden),
        "mlp.down_proj.weight": (hidden, width),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    for conv in ("attention_conv", "mlp_conv"):
        shapes[f"{conv}.base_kernel"] = (2, taps, hidden)
        shapes[f"{conv}.kernel_projection.weight"] = (2 * taps * groups, hidden)
    return {prefix + name: shape for name, shape in shapes.items()}


def initial_parameters(config: dict, seed: int) -> Parameters:
    """Convolutions start as the identity, the selector without a say."""
    generator = torch.Generator().manual_seed(seed)
    parameters = {}
    for name, shape in draft_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            parameters[name] = torch.ones(shape)
        elif name.endswith("base_kernel"):
            parameters[name] = 0.02 * noise
            parameters[name][:, 0] += 1.0
        elif "codebook" in name or "kernel_projection" in name:
            parameters[name] = 0.02 * noise
        else:
            parameters[name] = noise * shape[-1] ** -0.5
    return parameters


def block_states(
    p: Parameters, config: dict, embedding: torch.Tensor, ids: torch.Tensor, taps: torch.Tensor, anchors: torch.Tensor,
    k: int,
) -> torch.Tensor:  # fmt: skip
    """The mask tokens' final states [rows, anchors, k, hidden].

    ids [rows, tokens]; taps [rows, tokens, n, hidden]; anchors [rows, anchors]: positions in ids.
    """
    eps = config["rms_norm_eps"]
    context = rms_norm(F.linear(taps.float().flatten(2), p["fc.weight"]), p["hidden_norm.weight"], eps)
    block = torch.full((*anchors.shape, k + 1), config["dflash_config"]["mask_token_id"], device=ids.device)
    block[..., 0] = ids.gather(1, anchors)
    positions = anchors.unsqueeze(-1) + torch.arange(k + 1, device=ids.device)
    x = embedding[block]
    for index in range(config["num_hidden_layers"]):
        attend = partial(_attention, p, config, f"layers.{index}.self_attn.", positions=positions, context=context)
        x = _half_layer(p, config, f"layers.{index}.", ("input_layernorm", "attention_conv"), x, attend)
        feed_forward = partial(_mlp, p, f"layers.{index}.mlp.")
        x = _half_layer(p, config, f"layers.{index}.", ("post_attention_layernorm", "mlp_conv"), x, feed_forward)
    return rms_norm(x, p["norm.weight"], eps)[..., 1:, :]


def _half_layer(p: Parameters, config: dict, prefix: str, names: tuple[str, str], x: torch.Tensor, block):
    norm, conv = names
    y = rms_norm(x, p[f"{prefix}{norm}.weight"], config["rms_norm_eps"])
    y, finish = _convolved(p, config, f"{prefix}{conv}.", y)
    return x + finish(block(y))


def _mlp(p: Parameters, prefix: str, x: torch.Tensor) -> torch.Tensor:
    gate, up = (F.linear(x, p[f"{prefix}{side}_proj.weight"]) for side in ("gate", "up"))
    return F.linear(F.silu(gate) * up, p[prefix + "down_proj.weight"])


def _convolved(p: Parameters, config: dict, prefix: str, x: torch.Tensor):
    """(x through the first convolution, the second one as a function); along the block, from the left."""
    base, group = p[prefix + "base_kernel"], config["dflash_config"]["conv_group_size"]
    taps = base.shape[1]
    delta = F.linear(x, p[prefix + "kernel_projection.weight"]).unflatten(-1, (2, taps, -1))

    def convolve(y: torch.Tensor, side: int) -> torch.Tensor:
        kernel = base[side] + delta[..., side, :, :].repeat_interleave(group, -1)  # [.., block, taps, hidden]
        shifted = (F.pad(y, (0, 0, tap, 0))[..., : y.shape[-2], :] for tap in range(taps))
        return sum(kernel[..., tap, :] * part for tap, part in enumerate(shifted))

    return convolve(x, 0), lambda y: convolve(y, 1)


def _attention(
    p: Parameters, config: dict, prefix: str, x: torch.Tensor, positions: torch.Tensor, context: torch.Tensor
) -> torch.Tensor:
    """x [rows, anchors, block, hidden], their positions, context [rows, tokens, hidden]."""
    head, eps, window = config["head_dim"], config["rms_norm_eps"], config["sliding_window"]
    groups = config["num_attention_heads"] // config["num_key_value_heads"]
    at = torch.arange(context.shape[1], device=x.device)

    def heads(y: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(y, p[f"{prefix}{name}_proj.weight"]).unflatten(-1, (-1, head))

    def keys(y: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        k = rotated(rms_norm(heads(y, "k"), p[prefix + "k_norm.weight"], eps), where, config)
        return k.repeat_interleave(groups, -2)

    q = rotated(rms_norm(heads(x, "q"), p[prefix + "q_norm.weight"], eps), positions, config)
    own = torch.einsum("rabhd,rachd->rahbc", q, keys(x, positions))
    past = torch.einsum("rabhd,rthd->rahbt", q, keys(context, at))
    hidden = (at >= positions[..., :1, None]) | (positions[..., None] - at >= window)  # [rows, anchors, block, tokens]
    past = past.masked_fill(hidden.unsqueeze(2), -torch.inf)
    weights = (torch.cat([past, own], -1) * head**-0.5).softmax(-1)
    past, own = weights.split([context.shape[1], x.shape[-2]], -1)
    values = lambda y: heads(y, "v").repeat_interleave(groups, -2)
    out = torch.einsum("rahbt,rthd->rabhd", past, values(context))
    out = out + torch.einsum("rahbc,rachd->rabhd", own, values(x))
    return F.linear(out.flatten(-2), p[prefix + "o_proj.weight"])


def rotated(x: torch.Tensor, positions: torch.Tensor, config: dict) -> torch.Tensor:
    """Rotary positions, halves rotated against each other; x [.., heads, dim], positions [..]."""
    half = x.shape[-1] // 2
    rates = config["rope_parameters"]["rope_theta"] ** (-torch.arange(half, device=x.device) / half)
    angles = (positions.unsqueeze(-1) * rates).unsqueeze(-2)
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def edges(p: Parameters, states: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
    """What the selector adds to the logits of every token, given the token before: [.., vocabulary]."""
    projected = F.linear(states, p["candidate_selector.hidden_projection.weight"])
    query = p["candidate_selector.predecessor_codebook"][previous] * projected
    return F.linear(query, p["candidate_selector.successor_codebook"])


def chosen_tokens(p: Parameters, config: dict, head: torch.Tensor, states: torch.Tensor, first: torch.Tensor):
    """Greedy tokens [rows, anchors, k]: at each position the best of its candidates after the one chosen before."""
    unary, candidates = F.linear(states, head).topk(config["dflash_config"]["selector_top_k"], -1)
    previous, tokens = first, []
    for step in range(states.shape[-2]):
        added = edges(p, states[..., step, :], previous).gather(-1, candidates[..., step, :])
        best = (unary[..., step, :] + added).argmax(-1, keepdim=True)
        previous = candidates[..., step, :].gather(-1, best)[..., 0]
        tokens.append(previous)
    return torch.stack(tokens, -1)
