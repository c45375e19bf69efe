"""The model in transformers, in fp32 on the CPU, with EXL3 tensors decoded: the oracle for vLLM's logits.

Any matrix may be EXL3, exllamav3's fused KDA tensors (`qkv_proj`, `conv1d`) are taken apart or put
together, and both namespaces (`model.` and `model.language_model.`) are read.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from vllm_exl3.format import HADAMARD_BLOCK
from vllm_exl3.reference import decode_weight

from tools.local_model.checkpoint import CheckpointError, exl3_modules, read_checkpoint
from tools.local_model.torchvision_ops import declare_missing_operators

if TYPE_CHECKING:
    from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextModel

# Checkpoint name -> transformers' parameter name, inside one layer.
_RENAMES = (
    (r"self_attn\.(f_[ab]_proj\.|dt_bias|A_log)", r"self_attn.forget_gate.\1"),
    (r"hc_(attn|ffn)_(fn|base|scale)", r"\1_hc.\2"),
)


def load_reference(path: str | Path) -> tuple[Glm5NextTextModel, nn.Linear]:
    """(text model, lm_head) of a checkpoint directory, in fp32, ready for inference."""
    config, stored = read_checkpoint(Path(path))
    text = dict(config["text_config"])
    dense = strip_namespace(decode_all(stored))
    head = dense.pop("lm_head.weight")
    state = to_transformers(dense, text)
    model = _transformers_model(text)
    _load_strictly(model, state, path)
    lm_head = nn.Linear(text["hidden_size"], text["vocab_size"], bias=False)
    lm_head.weight.data.copy_(head.float())
    return model.eval(), lm_head.eval()


def _transformers_model(text: dict) -> Glm5NextTextModel:
    declare_missing_operators()  # transformers looks for torchvision when it is imported
    from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
    from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextModel

    config = Glm5NextTextConfig(**text)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    return Glm5NextTextModel(config).to(torch.float32)


def decode_all(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every EXL3 module replaced by its `.weight` [out, in] in fp32; all else unchanged."""
    modules = exl3_modules(stored)
    parts = ("trellis", "suh", "svh", "mcg", "mul1")
    spent = {f"{module}.{part}" for module in modules for part in parts}
    dense = {name: tensor for name, tensor in stored.items() if name not in spent}
    for module, weight in modules.items():
        dense[f"{module}.weight"] = decode_weight(weight).T.contiguous()
    return dense


def strip_namespace(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Names without `model.` or `model.language_model.`; the vision tower is left out."""
    stripped = {}
    for name, tensor in tensors.items():
        if name.startswith("model.visual."):
            continue
        stripped[re.sub(r"^model\.(language_model\.)?", "", name)] = tensor
    return stripped


def to_transformers(tensors: dict[str, torch.Tensor], text: dict) -> dict[str, torch.Tensor]:
    """HF checkpoint names (without namespace) -> state dict of Glm5NextTextModel."""
    layers = text["num_hidden_layers"]
    state = {}
    for name, tensor in tensors.items():
        layer = re.match(r"layers\.(\d+)\.", name)
        if layer and int(layer[1]) >= layers:  # an MTP block, which this model does not run
            continue
        for pattern, target in _RENAMES:
            name = re.sub(pattern, target, name)
        state[name] = tensor
    for index in range(layers):
        attention = f"layers.{index}.self_attn."
        if text["layer_types"][index] == "linear_attention":
            _split_fused_qkv(state, attention)
            _join_conv(state, attention)
        if text["mlp_layer_types"][index] == "sparse":
            _stack_experts(state, f"layers.{index}.mlp.experts.", text["n_routed_experts"])
    return state


def _split_fused_qkv(state: dict[str, torch.Tensor], attention: str) -> None:
    fused = state.pop(attention + "qkv_proj.weight", None)
    if fused is not None:
        for side, part in zip("qkv", fused.chunk(3), strict=True):
            state[f"{attention}{side}_proj.weight"] = part


def _join_conv(state: dict[str, torch.Tensor], attention: str) -> None:
    parts = [state.pop(f"{attention}{side}_conv1d.weight", None) for side in "qkv"]
    if None not in parts:
        state[attention + "conv1d.weight"] = torch.cat(parts)


def _stack_experts(state: dict[str, torch.Tensor], experts: str, count: int) -> None:
    def weights(side: str) -> torch.Tensor:
        return torch.stack([state.pop(f"{experts}{e}.{side}_proj.weight").float() for e in range(count)])

    state[experts + "gate_up_proj"] = torch.cat([weights("gate"), weights("up")], dim=1)
    state[experts + "down_proj"] = weights("down")


def _load_strictly(model: nn.Module, state: dict[str, torch.Tensor], path: str | Path) -> None:
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    fitting = {name: _cut_padding(tensor.float(), shapes.get(name, tensor.shape)) for name, tensor in state.items()}
    result = model.load_state_dict(fitting, strict=False)
    if result.missing_keys or result.unexpected_keys:
        raise CheckpointError(
            f"{path}: does not match its config.json: missing {result.missing_keys[:3]}, "
            f"unexpected {result.unexpected_keys[:3]} (transformers' names). Copy the checkpoint again."
        )


def _cut_padding(tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Without the zeros that EXL3 adds up to whole Hadamard blocks; any other size stays and is refused."""
    whole_blocks = tuple(-(-size // HADAMARD_BLOCK) * HADAMARD_BLOCK for size in shape)
    if tensor.dim() == 2 and tuple(tensor.shape) == whole_blocks:
        return tensor[: shape[0], : shape[1]]
    return tensor


@torch.inference_mode()
def reference_logits(model: Glm5NextTextModel, lm_head: nn.Linear, token_ids: list[int]) -> torch.Tensor:
    """Logits after every position: fp32 [tokens, vocabulary]."""
    hidden = model(input_ids=torch.tensor([token_ids]), use_cache=False).last_hidden_state
    return lm_head(hidden)[0]


@torch.inference_mode()
def reference_greedy(
    model: Glm5NextTextModel,
    lm_head: nn.Linear,
    token_ids: list[int],
    max_tokens: int,
    stop_ids: frozenset[int] = frozenset(),
) -> list[int]:
    """The most likely continuation, token by token, without the stop token itself."""
    cache, step, produced = None, token_ids, []
    for _ in range(max_tokens):
        output = model(input_ids=torch.tensor([step]), past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        token = int(lm_head(output.last_hidden_state[0, -1]).argmax())
        if token in stop_ids:
            break
        produced.append(token)
        step = [token]
    return produced
