"""The places of vLLM that the NoPE MLA backend rests on: what it extends, and the one place that it changes."""

import functools

from vllm_exl3.nope_mla import rows
from vllm_exl3.overrides import Override, unchanged

_WHY = "the NoPE MLA backend extends it"
_UNTIL = "vLLM has the geometries itself"


def _extended(module: str, attribute: str, *known: str) -> Override:
    return Override(module, attribute, _WHY, _UNTIL, known, unchanged)


_BACKENDS = "vllm.v1.attention.backends.mla"
_IMPL = f"{_BACKENDS}.flashinfer_mla_sparse_sm120"

# Fingerprints of vLLM 0.32.0, whose CPU build the tests use, and 0.33.0.
TABLE = (
    _extended(_IMPL, "FlashInferMLASparseSM120Impl", "3595131046cc8b95", "6f32e473d1e61328"),
    _extended(f"{_BACKENDS}.flashinfer_mla_sparse", "FlashInferMLASparseSM120Backend", "2c80aeecea92c8a5"),
    _extended(f"{_BACKENDS}.flashinfer_mla_sparse", "_FlashInferMLASparseBackendBase", "ea17bb08b8b836c3"),
    _extended(f"{_BACKENDS}.sparse_utils", "align_blocks_to_rows", "3c3f508bfaff96f2"),
    _extended(f"{_BACKENDS}.sparse_utils", "flat_kv_row_view", "9519c5826273775b"),
    _extended(
        "vllm.v1.attention.backend", "MLAAttentionImpl.do_kv_cache_update", "11058684b9c2f676", "cd1660bbc6a7f30a"
    ),
    _extended(
        "vllm.model_executor.layers.attention.mla_attention", "MLAAttention.get_kv_cache_spec",
        "b8ab6526732f6761", "f184daa0cee6aac8",
    ),
)  # fmt: skip


def rank_pools(original):
    """_merge_dcp_topk_global, which follows every top-k of pools, with each row's lowest-ranked pool put last."""

    @functools.wraps(original)
    def merge(logits, pools, *args, **named):
        original(logits, pools, *args, **named)
        rows.put_lowest_last(logits, pools)

    return merge


# Installed only where a kernel takes fewer candidates than pools and tail together.
RANKED_POOLS = (
    Override(
        "vllm.models.glm5next.nvidia.sparse_indexer", "_merge_dcp_topk_global",
        "vLLM's top-k leaves pools in any order, and the lowest-ranked one has to give way to the recent tail",
        "FlashInfer has no kernels of 2,048 candidates any more",
        ("fc5bdaa8ce147927",), rank_pools,
    ),
)  # fmt: skip
