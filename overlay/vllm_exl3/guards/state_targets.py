"""What of vLLM's scheduler state_blocks relies on; apart from it, so that vLLM need not be imported to check it."""

from vllm_exl3 import overrides

# `schedule` calls `_preempt_request` before `num_computed_tokens` counts the step, and takes an answer of
# `_mamba_block_aligned_split` other than a full row of drafts for a row without them. It asks where
# `need_mamba_block_aligned_split` says so, and reads that for nothing else.
TABLE = overrides.because(
    "vLLM keeps blocks in the prefix cache that no step filled, and lets a prompt of one token read drafts for good",
    "vLLM forgets the blocks of a step that it takes back, and gives the first token of a prompt no drafts",
    "vllm.v1.core.sched.scheduler",
    ("Scheduler.schedule", ("da4f2cf2fc39c39e", "fa34c8a13c0a8936"), overrides.unchanged),
    ("Scheduler._preempt_request", ("4113f5de8a84ec25", "8d67cc4e85688724"), overrides.unchanged),
    ("Scheduler._mamba_block_aligned_split", ("b2a08c774ae495bf", "9af6739dbbdf081f"), overrides.unchanged),
)
