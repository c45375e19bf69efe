"""Dense attention in place of GLM-5.3's sparse attention, as far as both are equal.

The indexer selects `index_topk` tokens; up to that many there is nothing to select, so leaving it out
changes no result. Longer contexts would, and are refused.
"""

import functools
import re
from collections.abc import Iterable, Iterator

TEXT_MODEL_TYPE = "glm5_next_text"

# What a layer's indexer has in a checkpoint; its one large projection may be EXL3.
_INDEXER_TENSOR = re.compile(r"layers\.(\d+)\.self_attn\.indexer\.(.+)")
_INDEXER_PARTS = {
    "wq_b.weight", "wq_b.trellis", "wq_b.suh", "wq_b.svh", "wq_b.mcg", "wq_b.mul1",
    "wk.weight", "weights_proj.weight", "k_norm.weight", "k_norm.bias",
    "index_kpool_compress_ape", "index_kpool_compress_gate",
}  # fmt: skip


# When the engine is configured


def create_model_config(original):
    """EngineArgs.create_model_config: the one place that every entry point of vLLM passes."""

    @functools.wraps(original)
    def create(self):
        config = original(self)
        if config.hf_text_config.model_type == TEXT_MODEL_TYPE:
            limit = config.hf_text_config.index_topk
            _refuse_long_context(config.max_model_len, self.max_model_len, limit)
            _refuse_unavailable(self)
            _use_dense_attention(self, config)
            # Decided here, since the platform would change them after other settings were derived.
            self.enable_prefix_caching = self.enable_chunked_prefill = False
            # Otherwise vLLM warms up GPU kernels that the CPU build does not have.
            self.enforce_eager = config.enforce_eager = True
        return config

    return create


def _refuse_long_context(length: int, asked: int | None, limit: int) -> None:
    if length <= limit:
        return
    origin = "--max-model-len" if asked == length else "config.json (no --max-model-len was given)"
    raise ValueError(
        f"GLM-5.3 on the CPU platform has dense attention only, and dense and sparse attention are equal up to "
        f"index_topk = {limit:,} tokens, but {origin} asks for {length:,}: start with --max-model-len {limit} or less."
    )


def _refuse_unavailable(args) -> None:
    """Features that vLLM would switch off, or fail in, without saying that they were asked for."""
    asked = {
        "--enable-prefix-caching": args.enable_prefix_caching,
        "--enable-chunked-prefill": args.enable_chunked_prefill,
        "--speculative-config": args.speculative_config,
    }
    for flag, value in asked.items():
        if value:
            raise ValueError(
                f"GLM-5.3 on the CPU platform: {flag} was given, but vLLM's CPU attention for MLA reads whole "
                f"prompts of one model only and cannot continue from cached tokens; start without {flag}."
            )


def _use_dense_attention(args, config) -> None:
    # Past transformers' setter, whose type check allows no None. vLLM builds layers without an indexer then.
    config.hf_text_config.__dict__["index_topk"] = None
    # One attention backend on every CPU: the other one needs AMX and another cache layout.
    if args.attention_backend is None and args.attention_config.backend is None:
        args.attention_backend = "CPU_MLA"


# When the weights are loaded


def load_weights(original):
    """Glm5NextModel.load_weights without the tensors of the indexers that were not built."""

    @functools.wraps(original)
    def load(self, weights):
        return original(self, without_indexer(weights, self.config))

    return load


def without_indexer(weights: Iterable, config) -> Iterator:
    """Pass on everything but the indexers' tensors. vLLM calls with parts of the checkpoint."""
    for item in weights:
        match = _INDEXER_TENSOR.fullmatch(item[0])
        if match is None or int(match[1]) >= config.num_hidden_layers:
            yield item
        else:
            _check_indexer_tensor(item[0], config.layer_types[int(match[1])], match[2])


def _check_indexer_tensor(name: str, layer_type: str, part: str) -> None:
    """Only what vLLM would load elsewhere may be left out here."""
    if layer_type == "linear_attention" or part not in _INDEXER_PARTS:
        raise ValueError(
            f"{name}: unknown tensor in a {layer_type} layer; an indexer belongs to a layer of another type and has "
            f"{', '.join(sorted(_INDEXER_PARTS))}. Check layer_types in config.json, or convert the checkpoint again."
        )
