"""What a scheduler must add so that a block of the prefix cache, and a running state, are of what was computed.

vLLM enters a block into the prefix cache when it schedules the step that will fill it. With `--scheduling-policy
priority` it may take the step back in the same breath, for a request that is more urgent; the entry stays, and who asks
for the same beginning next gets a state that nobody wrote.

It also fills the first step of a prompt of one token up with drafts that are none, so that all rows of a step are
alike. Its runner takes such a row for a prompt, whose state it cannot set back: the state has read them for good.
"""

from vllm_exl3 import overrides
from vllm_exl3.guards import state_targets


class ComputedStates:
    """What chunk_ends.scheduler adds to vLLM's schedulers."""

    def __init__(self, *args, **kwargs) -> None:
        overrides.require(state_targets.TABLE)
        super().__init__(*args, **kwargs)
        # vLLM asks about a split only where states are prefix-cached; prompts of one token need an answer without, too.
        self.splits_at_blocks, self.need_mamba_block_aligned_split = self.need_mamba_block_aligned_split, True

    def _preempt_request(self, request, *args, **kwargs) -> None:
        self.kv_cache_manager.evict_blocks(self._never_filled(request))
        super()._preempt_request(request, *args, **kwargs)

    def _never_filled(self, request) -> set[int]:
        """Blocks entered for a step that is not counted yet, so not given out; every other step runs to its end."""
        held = [
            manager.req_to_blocks.get(request.request_id, ())[request.num_computed_tokens // manager.block_size :]
            for manager in self.kv_cache_manager.coordinator.single_type_managers
        ]
        return {block.block_id for blocks in held for block in blocks if block.block_hash is not None}

    def _mamba_block_aligned_split(self, request, num_new_tokens: int, *args, **kwargs) -> int:
        if request.num_computed_tokens == 0 and request.num_tokens == 1:
            return 1  # vLLM leaves out the filling where the split cuts into it
        if not self.splits_at_blocks:
            return num_new_tokens
        return super()._mamba_block_aligned_split(request, num_new_tokens, *args, **kwargs)
