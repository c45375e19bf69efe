"""Guards against known defects of vLLM, one module each; docs/engine-truth.md says which defect and what lifts it.

Importing this imports neither torch nor vLLM.
"""

from vllm_exl3 import overrides

CHUNK_ENDS = "chunk-ends"  # not an override: chunk_ends.scheduler is vLLM's --scheduler-cls
BLOCK_SIZES = "block-sizes"
TOPK_IDS = "topk-ids"
DECODE_ROWS = "decode-rows"
STATE_BLOCKS = "state-blocks"  # as CHUNK_ENDS

NAMES = (CHUNK_ENDS, BLOCK_SIZES, TOPK_IDS, DECODE_ROWS, STATE_BLOCKS)


def install(off: tuple[str, ...] = ()) -> None:
    """Install the guards that are overrides, but for those named in `off` (idempotent)."""
    from vllm_exl3.guards import block_sizes, decode_rows, topk_ids

    tables = {BLOCK_SIZES: block_sizes.TABLE, TOPK_IDS: topk_ids.TABLE, DECODE_ROWS: decode_rows.TABLE}
    for name, table in tables.items():
        if name not in off:
            overrides.install(table)
