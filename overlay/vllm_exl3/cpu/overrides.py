"""The table of overrides: what is replaced inside vLLM on the CPU platform, why, and until when."""

import hashlib
import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from vllm_exl3.cpu import dense, kda, mla, moe, norms
from vllm_exl3.cpu.after_import import after_import


@dataclass(frozen=True)
class Override:
    """One replaced attribute of vLLM."""

    module: str
    attribute: str  # dotted below the module
    why: str
    until: str  # what has to happen for this entry to go
    known: tuple[str, ...]  # fingerprints of the target that the replacement was written for
    replace: Callable[[Any], Any]  # from the original to its replacement

    @property
    def name(self) -> str:
        return f"{self.module}:{self.attribute}"


def instead(replacement: Any) -> Callable[[Any], Any]:
    """A replacement that does not need the original."""
    return lambda _original: replacement


_NO_TRITON = "The original is a Triton kernel, and CPU builds have no Triton."
_TRITON_GONE = "vLLM has a CPU version of it or a Triton backend for the CPU."
_MHC_WHY = "The CPU version drops norm_weight (wrong logits, no error) and needs a CPU with AVX512-BF16."
_MHC_UNTIL = "vLLM's forward_cpu applies norm_weight and runs on every CPU."
_NOPE_UNTIL = "vLLM's CPU_MLA accepts a model without rotary channels."
_MLA = "vllm.v1.attention.backends.mla.cpu_mla"
_EXPERTS = "vllm.model_executor.layers.fused_moe.experts.cpu_moe"
_CLAMP = "The CPU kernel ignores swiglu_limit (wrong outputs for large activations, no error)."
_CLAMP_UNTIL = "the CPU kernel applies swiglu_limit or refuses it."
_KDA = "vllm.models.glm5next.common.kda"
_MHC = "vllm.model_executor.layers.mhc"

TABLE = (
    Override(
        "vllm.platforms.cpu", "CpuPlatform.simple_compile_backend",
        "Inductor needs a C++ compiler at run time, which a user's machine may lack.",
        "vLLM compiles these leaves on the CPU without one.",
        ("c45734b1e47aff70",),
        instead("eager"),
    ),
    Override(
        "vllm.engine.arg_utils", "EngineArgs.create_model_config",
        "The CPU platform has no sparse attention; dense attention is equal up to index_topk tokens.",
        "vLLM has sparse MLA and the pooled indexer on the CPU.",
        ("6f756e6ee2c53b34",),
        dense.create_model_config,
    ),
    Override(
        "vllm.models.glm5next.common.model", "Glm5NextModel.load_weights",
        "Without an indexer its tensors would be unknown names.",
        "vLLM has sparse MLA and the pooled indexer on the CPU.",
        ("034dc858cf7e34ac",),
        dense.load_weights,
    ),
    Override(
        _MLA, "CPUMLABackend.supports_block_size",
        "Beside KDA layers a block holds as many tokens as fill a KDA state; the backend refuses all but 16.",
        "the backend accepts multiples of its kernel's block.",
        ("e600780e321985bb",),
        instead(classmethod(mla.supports_block_size)),
    ),
    Override(
        "vllm.v1.worker.cpu_model_runner", "CPUModelRunner._zero_block_ids",
        "It takes the manager's block numbers for the kernel's and wipes KDA states of running requests.",
        "it multiplies by the kernel blocks per block.",
        ("93e5ea9760f46fef",),
        instead(mla.zero_block_ids),
    ),
    Override(
        _MLA, "CPUMLAImpl.do_kv_cache_update",
        "The original cannot write rows without rotary channels.", _NOPE_UNTIL,
        ("e86b54c5f8d5433f",),
        instead(mla.do_kv_cache_update),
    ),
    Override(
        _MLA, "CPUMLAImpl.forward_mqa",
        "The original's kernel is compiled for rows of 576 channels only.", _NOPE_UNTIL,
        ("eb14aa75d4dfccc3",),
        instead(mla.forward_mqa),
    ),
    Override(
        "vllm.models.glm5next.common.model", "GateLinear",
        "The CPU path rounds the router's logits to bf16, which swaps experts with close scores.",
        "vLLM computes this model's router in fp32 on the CPU.",
        ("985ce4494e867faf",),
        moe.fp32_router,
    ),
    Override(
        _EXPERTS, "CPUUnquantizedExperts.process_weights_after_loading", _CLAMP, _CLAMP_UNTIL,
        ("7233c2501b8a69a2",),
        moe.process_weights_after_loading,
    ),
    Override(_EXPERTS, "CPUUnquantizedExperts.apply", _CLAMP, _CLAMP_UNTIL, ("babf24f200ecd002",), moe.apply_experts),
    Override(_KDA, "gather_initial_states", _NO_TRITON, _TRITON_GONE, ("b0d69d2952420a27",), instead(kda.gather_initial_states)),
    Override(_KDA, "scatter_states", _NO_TRITON, _TRITON_GONE, ("2d759be9fe05b9c7",), instead(kda.ScatterStates())),
    Override(_KDA, "chunk_kda_with_fused_gate", _NO_TRITON, _TRITON_GONE, ("6fbadad3ed8e5079",), instead(kda.chunk_kda_with_fused_gate)),
    Override(_KDA, "fused_recurrent_kda", _NO_TRITON, _TRITON_GONE, ("18e8d5850ba7cdf5",), instead(kda.fused_recurrent_kda)),
    Override(
        "vllm.model_executor.layers.mla", "fused_q_kv_rmsnorm", _NO_TRITON, _TRITON_GONE, ("4b7c7ed58ac310a5",),
        instead(norms.fused_q_kv_rmsnorm),
    ),
    Override(_MHC, "MHCPreOp.forward_cpu", _MHC_WHY, _MHC_UNTIL, ("b86ae80b29e1b60d",), instead(norms.mhc_pre)),
    Override(_MHC, "MHCPostOp.forward_cpu", _MHC_WHY, _MHC_UNTIL, ("952698bf528f9981",), instead(norms.mhc_post)),
    Override(_MHC, "MHCFusedPostPreOp.forward_cpu", _MHC_WHY, _MHC_UNTIL, ("571196d172a10cd4",), instead(norms.mhc_fused_post_pre)),
)  # fmt: skip

_installed: set[str] = set()


def install(table: Iterable[Override]) -> None:
    """Replace every target of the table, each once per process."""
    for override in table:
        if override.name not in _installed:
            _installed.add(override.name)
            after_import(override.module, lambda module, override=override: apply(override, module))


def apply(override: Override, module: ModuleType) -> None:
    *path, last = override.attribute.split(".")
    holder = module
    for name in path:
        holder = _get(override, holder, name)
    original = _get(override, holder, last)
    seen = fingerprint(original)
    if seen not in override.known:
        raise RuntimeError(_changed(override, f"its source has the fingerprint {seen}"))
    setattr(holder, last, override.replace(original))


def _get(override: Override, holder: Any, name: str) -> Any:
    if not hasattr(holder, name):
        raise RuntimeError(_changed(override, f"there is no {name}"))
    return getattr(holder, name)


def _changed(override: Override, seen: str) -> str:
    import vllm

    return (
        f"{override.name} of vLLM {vllm.__version__} is not what the CPU override was written for: {seen}, known "
        f"are {', '.join(override.known)}. Install the vLLM version of requirements/, or review the override in "
        f"{__name__} and add the fingerprint."
    )


def fingerprint(target: Any) -> str:
    """A short hash of the target's source text; of its value where it is plain data."""
    if isinstance(target, (str, int, float, bool, type(None))):
        text = repr(target)
    else:
        text = inspect.getsource(_definition(target))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _definition(target: Any) -> Any:
    """The function or class that was written down: below decorators; an object's module for an object."""
    target = inspect.unwrap(target)
    if inspect.isroutine(target) or inspect.isclass(target):
        return target
    return sys.modules[target.__module__]
