"""Decoding requests count as decoding, however many drafts each of them has.

Where vLLM's indexer kernel takes several rows of a request at once, vLLM wants the same number from each and treats
requests with another number as prefill chunks. Their tokens then miss the pools that began in earlier steps, or are
pooled with tokens of other requests. Without that path each row is a request of its own to the kernel, as it is
already for most numbers of drafts.
"""

from vllm_exl3.overrides import because, instead


def only_single_rows(next_n: int) -> bool:
    """Whether the kernel is given `next_n` rows of a request at once."""
    return next_n == 1


TABLE = because(
    "vLLM pools decoded tokens as a prefill chunk where decoding requests have unequal numbers of drafts",
    "vLLM finishes pools that began in an earlier chunk, or keeps decoding requests apart by what they do",
    "vllm.v1.attention.backends.mla.indexer",
    ("_supports_native_decode", "56e3f20ebbddcfb5", instead(only_single_rows)),
)
