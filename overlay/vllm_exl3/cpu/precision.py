"""GLM-5.3 computes in fp32 on the CPU, also where the engine's dtype is bf16.

The CPU is what other platforms are compared with, so its own rounding must not show in an answer. Weights
and activations are fp32 (bf16 weights stay what they are), and so are the states of KDA layers; the cache
of MLA layers keeps the engine's dtype, for which vLLM has no fp32 setting.
"""

import functools

import torch

from vllm_exl3.cpu.dense import TEXT_MODEL_TYPE


def create_model_config(original):
    """EngineArgs.create_model_config that asks for an fp32 head and fp32 states of KDA layers."""

    @functools.wraps(original)
    def create(self):
        config = original(self)
        if config.hf_text_config.model_type == TEXT_MODEL_TYPE:
            # A vision model's head reads the text part's config.
            for part in (config.hf_config, config.hf_text_config):
                if getattr(part, "head_dtype", None) is None:
                    part.head_dtype = "float32"
            if self.mamba_cache_dtype == "auto":
                self.mamba_cache_dtype = "float32"
        return config

    return create


def build_in_fp32(original):
    """Glm5NextForCausalLM.__init__: vLLM's layers take torch's default dtype for their parameters."""
    from vllm.utils.torch_utils import set_default_torch_dtype

    return set_default_torch_dtype(torch.float32)(original)  # keeps __wrapped__


def expand_streams(x: torch.Tensor, n: int) -> torch.Tensor:
    """[tokens, hidden] -> n equal residual streams. A vision model's inputs come in the engine's dtype."""
    return x.float().unsqueeze(1).expand(-1, n, -1).contiguous()


def absorb_in_own_dtype(original):
    """MLAAttention.process_weights_after_loading: decoding multiplies by parts of kv_b_proj as fp32 if that is fp32."""

    @functools.wraps(original)
    def process(self, act_dtype):
        own = self.kv_b_proj.weight.dtype
        return original(self, own if own == torch.float32 else act_dtype)

    return process
