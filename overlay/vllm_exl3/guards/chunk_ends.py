"""A scheduler whose prefill chunks start on whole pools of the indexer, for vLLM's --scheduler-cls.

The indexer of GLM-5.3 pools `index_kpool` neighbouring tokens. vLLM builds the pools of a prefill chunk from the
chunk's own tokens and takes for granted that it starts with a pool. A pool that begins before the chunk is lost, or is
built from the tokens of another request that happen to lie in front. Short chunks, up to the tokens of one decoding
step, are pooled the way decoded tokens are, which is right from any start (with the guard decode-rows in every batch).
"""

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_exl3 import guards, overrides
from vllm_exl3.guards import chunk_targets
from vllm_exl3.guards.state_blocks import ComputedStates
from vllm_exl3.switches import switches


def chunk_tokens(start: int, count: int, last: int, pool: int, short: int, at_image: bool = False) -> int:
    """Tokens of a chunk that may start at `start` and would have `count` tokens; 0 lets it wait for one step.

    Position `last` ends what is known of the request, and a chunk that reaches it may end anywhere. Chunks of up to
    `short` tokens are pooled like decoded tokens. `at_image` says that the chunk ends before an image that cannot be
    encoded yet, so that waiting might not help.
    """
    if count <= short and start % pool:
        return count
    if start % pool:
        return min(pool - start % pool, short)
    if start + count >= last:
        return count
    return count // pool * pool or (count if at_image else 0)


def needed_budget(seats: int, pool: int, short: int, draft_slots: int = 0) -> int:
    """Least number of tokens of a step that leaves a whole pool beside all other requests while they decode."""
    return seats * (short + draft_slots) + pool


class WholePools:
    """What the scheduler below adds to vLLM's."""

    def __init__(self, vllm_config, *args, **kwargs) -> None:
        overrides.require(chunk_targets.TABLE)
        super().__init__(vllm_config, *args, **kwargs)
        self.pool = getattr(vllm_config.model_config.hf_text_config, "index_kpool", None) or 1
        self.short = 1 + self.num_spec_tokens
        if self.pool > 1:
            self._check_settings(vllm_config)

    def _check_settings(self, vllm_config) -> None:
        """Raise ValueError if a prompt might never get a whole pool into a step, or hit the cache inside a pool."""
        drafts = vllm_config.speculative_config
        slots = drafts.max_num_new_slots_for_drafting if drafts is not None else 0
        budget = min(self.max_num_scheduled_tokens, self.scheduler_config.max_num_batched_tokens)
        needed = needed_budget(self.max_num_running_reqs, self.pool, self.short, slots)
        if budget < needed:
            raise ValueError(
                f"max_num_batched_tokens is {budget}: beside {self.max_num_running_reqs} decoding requests a prompt "
                f"must get a whole pool of {self.pool} tokens, else it may wait for ever; set it to {needed} or more, "
                f"or lower max_num_seqs."
            )
        threshold = self.scheduler_config.long_prefill_token_threshold
        if 0 < threshold < self.pool:
            raise ValueError(
                f"long_prefill_token_threshold is {threshold}: a chunk must hold a whole pool of {self.pool} tokens; "
                f"set it to {self.pool} or more, or to 0."
            )
        if self.hash_block_size % self.pool:
            raise ValueError(
                f"prefix_match_unit makes hits of the prefix cache end on multiples of {self.hash_block_size} tokens: "
                f"they must be whole pools of {self.pool}; set a multiple of that or leave it out."
            )

    def _reserve_prefill_lookahead(self, request, num_computed_tokens: int, num_new_tokens: int) -> int:
        count = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        end = num_computed_tokens + count
        if count <= self.short and end >= request.num_tokens:
            return count  # decoding, which is most of what is asked: chunk_tokens would say the same
        # As in vLLM's own alignment: a resumed request recomputes its answer too, all but the newest token.
        last = max(request.num_prompt_tokens, request.num_tokens - 1)
        at_image = any(image.mm_position.offset == end for image in request.mm_features or ())
        return chunk_tokens(num_computed_tokens, count, last, self.pool, self.short, at_image)


def scheduler(vllm_config, *args, **kwargs) -> Scheduler:
    """The scheduler for --scheduler-cls: vLLM's own with this guard and state_blocks; EXL3_GUARDS_OFF leaves them out.

    A function, since vLLM settles whether it schedules ahead only after the flag was given. Raises RuntimeError where
    vLLM's scheduler is not one that a guard was written for, ValueError where the settings could make a prompt wait for
    ever.
    """
    off = switches().guards_off
    own = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    table = {guards.CHUNK_ENDS: WholePools, guards.STATE_BLOCKS: ComputedStates}
    added = tuple(added for name, added in table.items() if name not in off)
    made = type(f"Guarded{own.__name__}", (*added, own), {}) if added else own
    return made(vllm_config, *args, **kwargs)
