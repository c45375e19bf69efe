"""Refuses a NaN or an infinity in a checkpoint as its tensors are read, by the tensor's name. No vLLM import."""

import math
import re
from collections.abc import Iterable, Iterator

import torch

from vllm_exl3.checkpoint import Exl3LoadError, canonical

FLOATS = (torch.float16, torch.bfloat16, torch.float32)

# Of a layer's native matrices only those up to so many values are looked at. The larger ones take seconds, and every
# token passes through them: the first answer shows what is wrong there. A scale of one expert shows with few tokens.
LAYER_VALUES = 1 << 22
_LAYER_MATRIX = re.compile(r"layers\.\d+\..*\.weight")


def refuse_not_finite(weights: Iterable) -> Iterator:
    """Pass on (name, tensor, ...); raises Exl3LoadError at a tensor that holds a NaN or an infinity."""
    for item in weights:
        name, tensor = item[:2]
        if is_looked_at(name, tensor) and not is_finite(tensor):
            raise Exl3LoadError(described(name, tensor))
        yield item


def is_looked_at(name: str, tensor: torch.Tensor) -> bool:
    if tensor.dtype not in FLOATS or not tensor.numel():
        return False
    return tensor.numel() <= LAYER_VALUES or not _LAYER_MATRIX.fullmatch(canonical(name))


def is_finite(tensor: torch.Tensor) -> bool:
    """In one pass without a temporary: a NaN is both extremes, an infinity is one."""
    return all(math.isfinite(float(extreme)) for extreme in tensor.aminmax())


def described(name: str, tensor: torch.Tensor) -> str:
    bad = (~tensor.isfinite()).nonzero()
    place = bad[0].tolist()
    return (
        f"{name}: holds {float(tensor[tuple(place)])} at {place}, and {len(bad)} of its {tensor.numel()} values are no "
        f"finite numbers; the file is damaged or was converted wrongly: verify the checkpoint (./download.sh verify), "
        f"or get it again"
    )
