"""The table of overrides on the CPU platform."""

from vllm_exl3.cpu import dense, kda, mla, moe, norms, precision
from vllm_exl3.overrides import because, instead

_MODEL = "vllm.models.glm5next.common.model"
_MLA = "vllm.v1.attention.backends.mla.cpu_mla"
_NO_TRITON = "the original is a Triton kernel, and CPU builds have no Triton"
_ROUNDING = "in bf16 rounding alone moves probabilities and swaps experts, which hides errors of the plugin"
_NO_ROUNDING = "vLLM can run a bf16 model with fp32 activations"
_TRITON_GONE = "vLLM has a CPU version of it or a Triton backend for the CPU"

TABLE = (
    *because(
        "Inductor needs a C++ compiler at run time, which a user's machine may lack",
        "vLLM compiles these leaves on the CPU without one",
        "vllm.platforms.cpu",
        ("CpuPlatform.simple_compile_backend", "c45734b1e47aff70", instead("eager")),
    ),
    *because(
        "the CPU platform has no sparse attention; dense attention is equal up to index_topk tokens",
        "vLLM has sparse MLA and the pooled indexer on the CPU",
        "vllm.engine.arg_utils",
        ("EngineArgs.create_model_config", "6f756e6ee2c53b34", dense.create_model_config),
    ),
    *because(
        "without an indexer its tensors would be unknown names",
        "vLLM has sparse MLA and the pooled indexer on the CPU",
        _MODEL,
        ("Glm5NextModel.load_weights", "034dc858cf7e34ac", dense.load_weights),
    ),
    *because(
        _ROUNDING,
        _NO_ROUNDING,
        "vllm.engine.arg_utils",
        ("EngineArgs.create_model_config", "6f756e6ee2c53b34", precision.create_model_config),
    ),
    *because(
        _ROUNDING,
        _NO_ROUNDING,
        _MODEL,
        ("Glm5NextForCausalLM.__init__", "106c715acbb1ab4b", precision.build_in_fp32),
        ("hc_expand", "ffc2debff734ea2f", instead(precision.expand_streams)),
    ),
    *because(
        "it casts the projections that decoding absorbs to the engine's dtype, while queries are fp32",
        _NO_ROUNDING,
        "vllm.model_executor.layers.attention.mla_attention",
        ("MLAAttention.process_weights_after_loading", "ab2c9c182f1222cd", precision.absorb_in_own_dtype),
    ),
    *because(
        "the CPU kernel ignores swiglu_limit: wrong outputs for large activations, no error",
        "the CPU kernel applies swiglu_limit or refuses it",
        "vllm.model_executor.layers.fused_moe.experts.cpu_moe",
        (
            "CPUUnquantizedExperts.process_weights_after_loading",
            "7233c2501b8a69a2",
            moe.process_weights_after_loading,
        ),
        ("CPUUnquantizedExperts.apply", "babf24f200ecd002", moe.apply_experts),
    ),
    *because(
        "beside KDA layers a block holds as many tokens as fill a KDA state; the backend refuses all but 16",
        "the backend accepts multiples of its kernel's block",
        _MLA,
        ("CPUMLABackend.supports_block_size", "e600780e321985bb", instead(classmethod(mla.supports_block_size))),
    ),
    *because(
        "it takes the manager's block numbers for the kernel's and wipes KDA states of running requests",
        "it multiplies by the kernel blocks per block",
        "vllm.v1.worker.cpu_model_runner",
        ("CPUModelRunner._zero_block_ids", "93e5ea9760f46fef", instead(mla.zero_block_ids)),
    ),
    *because(
        "the originals are made for rows of 512 latent and 64 rotary channels; GLM-5.3 has no rotary ones",
        "vLLM's CPU_MLA accepts a model without rotary channels",
        _MLA,
        ("CPUMLAImpl.do_kv_cache_update", "e86b54c5f8d5433f", instead(mla.do_kv_cache_update)),
        ("CPUMLAImpl.forward_mqa", "eb14aa75d4dfccc3", instead(mla.forward_mqa)),
    ),
    *because(
        _NO_TRITON,
        _TRITON_GONE,
        "vllm.models.glm5next.common.kda",
        ("gather_initial_states", "b0d69d2952420a27", instead(kda.gather_initial_states)),
        ("scatter_states", "2d759be9fe05b9c7", instead(kda.ScatterStates())),
        ("chunk_kda_with_fused_gate", "6fbadad3ed8e5079", instead(kda.chunk_kda_with_fused_gate)),
        ("fused_recurrent_kda", "18e8d5850ba7cdf5", instead(kda.fused_recurrent_kda)),
    ),
    *because(
        _NO_TRITON,
        _TRITON_GONE,
        "vllm.model_executor.layers.mla",
        ("fused_q_kv_rmsnorm", "4b7c7ed58ac310a5", instead(norms.fused_q_kv_rmsnorm)),
    ),
    *because(
        "the CPU version drops norm_weight (wrong logits, no error) and needs a CPU with AVX512-BF16",
        "vLLM's forward_cpu applies norm_weight and runs on every CPU",
        "vllm.model_executor.layers.mhc",
        ("MHCPreOp.forward_cpu", "b86ae80b29e1b60d", instead(norms.mhc_pre)),
        ("MHCPostOp.forward_cpu", "952698bf528f9981", instead(norms.mhc_post)),
        ("MHCFusedPostPreOp.forward_cpu", "571196d172a10cd4", instead(norms.mhc_fused_post_pre)),
    ),
)
