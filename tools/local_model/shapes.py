"""Shapes of our small GLM-5.3-Flash models: config.json and the list of checkpoint tensors.

Everything that writes or reads such a checkpoint (training, export, random test models, the reference)
takes names and shapes from here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

EXPERTS_SCOPE = "glm53_routed_experts_only"
NAMESPACES = {"text": "model.", "vl": "model.language_model."}
ARCHITECTURES = {"text": "Glm5NextForCausalLM", "vl": "Glm5NextForConditionalGeneration"}

# Ids of the special tokens follow from this order; the tokenizer appends them after its ordinary
# words, so a config and a tokenizer with the same vocabulary size agree.
SPECIAL_TOKENS = (
    "<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>",
    "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
    "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>",
    "<|image|>", "<|video|>",
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
)  # fmt: skip


def special_token_id(vocab_size: int, token: str) -> int:
    return vocab_size - len(SPECIAL_TOKENS) + SPECIAL_TOKENS.index(token)


def text_config(**overrides) -> dict:
    """The `text_config` of config.json; keys that only vLLM reads are the last block."""
    vocab_size = overrides.get("vocab_size", 1024)
    config = {
        "model_type": "glm5_next_text",
        "vocab_size": vocab_size,
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "layer_types": ["linear_attention"] * 3 + ["deepseek_sparse_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "indexer_types": ["full"] * 4,
        "q_lora_rank": 64,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 256,
        "qk_rope_head_dim": 0,
        "v_head_dim": 256,
        "index_topk": 2048,
        "index_kpool": 4,
        "index_kpool_always_select_tail": True,
        "index_head_dim": 128,
        "index_n_heads": 32,
        "linear_attn_config": {
            "head_dim": 128,
            "num_heads": 2,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
            "safe_gate": True,
        },
        "hc_mult": 4,
        "hc_eps": 1e-6,
        "hc_sinkhorn_iters": 20,
        "swiglu_limit": 10.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.02,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "use_cache": True,
        "dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": eos_token_ids(vocab_size),
        "pad_token_id": special_token_id(vocab_size, "<|endoftext|>"),
        "mhc": True,
        "mla_use_nope": True,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "num_nextn_predict_layers": 0,
        "indexer_rope_interleave": True,
    }
    unknown = set(overrides) - set(config)
    if unknown:
        raise ValueError(f"text_config: no such field: {sorted(unknown)}. Use the names of config.json.")
    return config | overrides


def eos_token_ids(vocab_size: int) -> list[int]:
    stops = ("<|endoftext|>", "<|user|>", "<|observation|>")
    return [special_token_id(vocab_size, token) for token in stops]


def vision_config() -> dict:
    """A vision tower that is just large enough to construct and load."""
    return {
        "model_type": "glm5_next_vision",
        "depth": 1,
        "hidden_size": 64,
        "num_heads": 2,
        "in_channels": 3,
        "image_size": 112,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 128,
        "intermediate_size": 128,
        "projection_intermediate_size": 256,
        "rms_norm_eps": 1e-5,
        "swiglu_limit": 10.0,
        "attention_bias": True,
        "hidden_act": "silu",
    }


def model_config(text: dict, quantization: dict | None, namespace: str = "text") -> dict:
    """The whole config.json. MTP needs the top-level model_type, so text models have it too."""
    vocab = text["vocab_size"]
    config = {
        "architectures": [ARCHITECTURES[namespace]],
        "model_type": "glm5_next",
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": eos_token_ids(vocab),
        "pad_token_id": special_token_id(vocab, "<|endoftext|>"),
        "image_token_id": special_token_id(vocab, "<|image|>"),
        "video_token_id": special_token_id(vocab, "<|video|>"),
        "image_start_token_id": special_token_id(vocab, "<|begin_of_image|>"),
        "image_end_token_id": special_token_id(vocab, "<|end_of_image|>"),
        "video_start_token_id": special_token_id(vocab, "<|begin_of_video|>"),
        "video_end_token_id": special_token_id(vocab, "<|end_of_video|>"),
        "text_config": text,
    }
    if namespace == "vl":
        config["vision_config"] = vision_config() | {"out_hidden_size": text["hidden_size"]}
    if quantization is not None:
        config["quantization_config"] = quantization
    return config


@dataclass(frozen=True)
class Linear:
    """A weight matrix that may be stored natively or as EXL3. `rows` x `cols` is nn.Linear's order."""

    rows: int  # output features
    cols: int  # input features


def linear_modules(text: dict) -> dict[str, Linear]:
    """Every matrix of the text model that exllamav3 or the experts-only packs may quantise.

    Keys are module names without namespace prefix, in HF's naming (q, k and v separate).
    """
    modules: dict[str, Linear] = {}
    for index in range(text["num_hidden_layers"]):
        prefix = f"layers.{index}."
        if text["layer_types"][index] == "linear_attention":
            modules |= _kda_linears(text, prefix + "self_attn.")
        else:
            modules |= _mla_linears(text, prefix + "self_attn.")
        modules |= _mlp_linears(text, prefix + "mlp.", text["mlp_layer_types"][index])
    modules["lm_head"] = Linear(text["vocab_size"], text["hidden_size"])
    return modules


def _kda_linears(text: dict, prefix: str) -> dict[str, Linear]:
    hidden, kda = text["hidden_size"], text["linear_attn_config"]
    width = kda["head_dim"] * kda["num_heads"]
    return {
        prefix + "q_proj": Linear(width, hidden),
        prefix + "k_proj": Linear(width, hidden),
        prefix + "v_proj": Linear(width, hidden),
        prefix + "b_proj": Linear(kda["num_heads"], hidden),
        prefix + "f_a_proj": Linear(kda["head_dim"], hidden),
        prefix + "f_b_proj": Linear(width, kda["head_dim"]),
        prefix + "g_a_proj": Linear(kda["head_dim"], hidden),
        prefix + "g_b_proj": Linear(width, kda["head_dim"]),
        prefix + "o_proj": Linear(hidden, width),
    }


def _mla_linears(text: dict, prefix: str) -> dict[str, Linear]:
    hidden, heads, rank = text["hidden_size"], text["num_attention_heads"], text["q_lora_rank"]
    latent, nope, value = text["kv_lora_rank"], text["qk_nope_head_dim"], text["v_head_dim"]
    return {
        prefix + "q_a_proj": Linear(rank, hidden),
        prefix + "q_b_proj": Linear(heads * nope, rank),
        prefix + "kv_a_proj_with_mqa": Linear(latent, hidden),
        prefix + "kv_b_proj": Linear(heads * (nope + value), latent),
        prefix + "o_proj": Linear(hidden, heads * value),
        prefix + "indexer.wq_b": Linear(text["index_n_heads"] * text["index_head_dim"], rank),
        prefix + "indexer.wk": Linear(text["index_head_dim"], hidden),
        prefix + "indexer.weights_proj": Linear(text["index_n_heads"], hidden),
    }


def _mlp_linears(text: dict, prefix: str, kind: str) -> dict[str, Linear]:
    hidden = text["hidden_size"]
    if kind == "dense":
        return _swiglu_linears(prefix, hidden, text["intermediate_size"])
    width = text["moe_intermediate_size"]
    modules = {prefix + "gate": Linear(text["n_routed_experts"], hidden)}
    for expert in range(text["n_routed_experts"]):
        modules |= _swiglu_linears(f"{prefix}experts.{expert}.", hidden, width)
    shared = width * text["n_shared_experts"]
    return modules | _swiglu_linears(prefix + "shared_experts.", hidden, shared)


def _swiglu_linears(prefix: str, hidden: int, width: int) -> dict[str, Linear]:
    return {
        prefix + "gate_proj": Linear(width, hidden),
        prefix + "up_proj": Linear(width, hidden),
        prefix + "down_proj": Linear(hidden, width),
    }


def native_tensors(text: dict) -> dict[str, tuple[int, ...]]:
    """Shapes of everything that is no matrix of `linear_modules`; never EXL3."""
    hidden = text["hidden_size"]
    tensors: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (text["vocab_size"], hidden),
        "norm.weight": (hidden,),
    }
    for index in range(text["num_hidden_layers"]):
        prefix = f"layers.{index}."
        tensors |= _block_tensors(text, prefix)
        if text["layer_types"][index] == "linear_attention":
            tensors |= _kda_tensors(text, prefix + "self_attn.")
        else:
            tensors |= _mla_tensors(text, prefix + "self_attn.")
        if text["mlp_layer_types"][index] == "sparse":
            tensors[prefix + "mlp.gate.e_score_correction_bias"] = (text["n_routed_experts"],)
    return tensors


def _block_tensors(text: dict, prefix: str) -> dict[str, tuple[int, ...]]:
    hidden, streams = text["hidden_size"], text["hc_mult"]
    mixes = (2 + streams) * streams
    tensors: dict[str, tuple[int, ...]] = {
        prefix + "input_layernorm.weight": (hidden,),
        prefix + "post_attention_layernorm.weight": (hidden,),
    }
    for side in ("attn", "ffn"):
        tensors[f"{prefix}hc_{side}_fn"] = (mixes, streams * hidden)
        tensors[f"{prefix}hc_{side}_base"] = (mixes,)
        tensors[f"{prefix}hc_{side}_scale"] = (3,)
    return tensors


def _kda_tensors(text: dict, prefix: str) -> dict[str, tuple[int, ...]]:
    kda = text["linear_attn_config"]
    width = kda["head_dim"] * kda["num_heads"]
    conv = (width, 1, kda["short_conv_kernel_size"])
    return {
        prefix + "q_conv1d.weight": conv,
        prefix + "k_conv1d.weight": conv,
        prefix + "v_conv1d.weight": conv,
        prefix + "A_log": (kda["num_heads"],),
        prefix + "dt_bias": (width,),
        prefix + "o_norm.weight": (kda["head_dim"],),
    }


def _mla_tensors(text: dict, prefix: str) -> dict[str, tuple[int, ...]]:
    head = text["index_head_dim"]
    return {
        prefix + "q_a_layernorm.weight": (text["q_lora_rank"],),
        prefix + "kv_a_layernorm.weight": (text["kv_lora_rank"],),
        prefix + "indexer.k_norm.weight": (head,),
        prefix + "indexer.k_norm.bias": (head,),
        prefix + "indexer.index_kpool_compress_ape": (text["index_kpool"], head),
        prefix + "indexer.index_kpool_compress_gate": (head, text["hidden_size"]),
    }


# These stay fp32 in the checkpoint, as transformers keeps them in memory.
_FP32 = re.compile(r"(conv1d\.weight|A_log|dt_bias|e_score_correction_bias|hc_(attn|ffn)_(base|scale))$")


def is_kept_fp32(name: str) -> bool:
    return _FP32.search(name) is not None


def is_routed_expert(module: str) -> bool:
    return ".mlp.experts." in module
