"""No start where a cache group's blocks differ from the recurrent state's.

vLLM's scheduler ends chunks on multiples of the smallest block of all groups that the prefix cache knows, its workers
keep states by the state's own block. Where the two differ, half a block's state can be stored as a whole one and be
loaded by a later request.
"""

import functools

from vllm_exl3.overrides import because


def check_block_sizes(kv_cache_config, vllm_config) -> None:
    """Raise ValueError naming the groups whose block is not the state's. States that are never reused may differ."""
    from vllm.v1.kv_cache_interface import MambaSpec, iter_layer_specs

    if vllm_config.cache_config.mamba_cache_mode != "align" or not kv_cache_config.has_mamba_layers:
        return
    # Not cache_config.mamba_block_size: with several ranks only the workers know it, and this is asked elsewhere.
    block = next(spec.block_size for group in kv_cache_config.kv_cache_groups
                 for spec in iter_layer_specs(group.kv_cache_spec) if isinstance(spec, MambaSpec))  # fmt: skip
    groups = [group for group in kv_cache_config.kv_cache_groups if group.kv_cache_spec.prefix_cacheable]
    odd = [f"{group.layer_names[0]} has {group.kv_cache_spec.block_size}"
           for group in groups if group.kv_cache_spec.block_size != block]  # fmt: skip
    if odd:
        raise ValueError(
            f"cache blocks: a block of the recurrent state has {block} tokens, but that of {', of '.join(odd)}; vLLM "
            f"would store and reuse half computed states. Give the draft the FLASH_ATTN backend, or start without "
            f"drafts or with --no-enable-prefix-caching."
        )


def checked(original):
    """resolve_kv_cache_block_sizes, which vLLM asks once the groups are final and before anything is computed."""

    @functools.wraps(original)
    def resolve(kv_cache_config, vllm_config):
        check_block_sizes(kv_cache_config, vllm_config)
        return original(kv_cache_config, vllm_config)

    return resolve


TABLE = because(
    "vLLM's scheduler and workers disagree where blocks differ (vllm#54076)",
    "vLLM's scheduler aligns chunks to the state's own block",
    "vllm.v1.engine.core",
    ("resolve_kv_cache_block_sizes", "b3833fa6b3549968", checked),
)
