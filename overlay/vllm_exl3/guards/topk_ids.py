"""Ids of selected pools: unwritten entries are -1, and no id lies behind a row's own pools.

vLLM allocates the list of selected pools without a value and later looks only at the sign of its entries. An entry that
the selection kernel leaves out is then a random pool: wrong attention, or an illegal access.

The price of a step in each indexer layer: one fill in place of an allocation, and three small kernels over the list
([rows, index_topk / index_kpool]).
"""

import functools
import inspect

import torch

from vllm_exl3.overrides import Override, because

_SELECTS = "vllm.models.glm5next.nvidia.sparse_indexer"
_EXPANDS = "vllm.models.glm5next.nvidia.ops.kpool_compress"
_WHY = "vLLM checks only the sign of pool ids, and their list starts as whatever the memory held (vllm#55201)"
_UNTIL = "vLLM fills the list and bounds its ids"


class FilledIds:
    """`torch` for the one module that allocates the list: int32 tensors start as -1. All else is torch's own."""

    def __getattr__(self, name: str):
        return getattr(torch, name)

    @staticmethod
    def empty(*size, dtype=None, **options) -> torch.Tensor:
        if dtype is torch.int32:
            return torch.full(*size, -1, dtype=dtype, **options)
        return torch.empty(*size, dtype=dtype, **options)


def filled(original):
    """sparse_attn_indexer_kpool, which is left as it is; its module's name `torch` changes."""
    inspect.unwrap(original).__globals__["torch"] = FilledIds()
    return original


def bounded(original):
    """expand_pools_and_append_tail for ids of any origin.

    pool_ids [rows, selected] of any integer type, changed in place; seq_lens [rows], in tokens. Ids of pools that a
    row has not completed become -1, which means none.
    """

    @functools.wraps(original)
    def expand(pool_ids: torch.Tensor, seq_lens: torch.Tensor, pool_size: int) -> torch.Tensor:
        pool_ids.masked_fill_(pool_ids >= (seq_lens // pool_size).unsqueeze(1), -1)
        return original(pool_ids, seq_lens, pool_size)

    return expand


TABLE = (
    Override(_SELECTS, "sparse_attn_indexer_kpool", _WHY, _UNTIL, ("2ccb6a362b5a6359", "21704f6c4d68a19a"), filled),
    *because(_WHY, _UNTIL, _EXPANDS, ("expand_pools_and_append_tail", "7fbc5a33d2f86898", bounded)),
)
