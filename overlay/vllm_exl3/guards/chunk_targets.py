"""What of vLLM's scheduler chunk_ends relies on; apart from it, so that vLLM need not be imported to check it."""

from vllm_exl3 import overrides

# `schedule` asks `_reserve_prefill_lookahead` about every chunk, after all else that cuts it, and leaves a request
# alone for one step where the answer is 0.
TABLE = overrides.because(
    "vLLM pools a prefill chunk as if it started with a whole pool",
    "vLLM finishes pools that began in an earlier chunk, or ends chunks on whole pools by itself",
    "vllm.v1.core.sched.scheduler",
    ("Scheduler.schedule", ("da4f2cf2fc39c39e", "fa34c8a13c0a8936"), overrides.unchanged),
    ("Scheduler._reserve_prefill_lookahead", "c214e49d7610a63a", overrides.unchanged),
)
