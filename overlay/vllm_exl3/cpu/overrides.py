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


def _because(why: str, until: str, module: str, *entries: tuple[str, str, Callable[[Any], Any]]) -> list[Override]:
    """Overrides that share a reason and a module: (attribute, fingerprint, replacement) each."""
    return [Override(module, attribute, why, until, (known,), replace) for attribute, known, replace in entries]


_MODEL = "vllm.models.glm5next.common.model"
_MLA = "vllm.v1.attention.backends.mla.cpu_mla"
_NO_TRITON = "the original is a Triton kernel, and CPU builds have no Triton"
_TRITON_GONE = "vLLM has a CPU version of it or a Triton backend for the CPU"

TABLE = (
    *_because(
        "Inductor needs a C++ compiler at run time, which a user's machine may lack",
        "vLLM compiles these leaves on the CPU without one",
        "vllm.platforms.cpu",
        ("CpuPlatform.simple_compile_backend", "c45734b1e47aff70", instead("eager")),
    ),
    *_because(
        "the CPU platform has no sparse attention; dense attention is equal up to index_topk tokens",
        "vLLM has sparse MLA and the pooled indexer on the CPU",
        "vllm.engine.arg_utils",
        ("EngineArgs.create_model_config", "6f756e6ee2c53b34", dense.create_model_config),
    ),
    *_because(
        "without an indexer its tensors would be unknown names",
        "vLLM has sparse MLA and the pooled indexer on the CPU",
        _MODEL,
        ("Glm5NextModel.load_weights", "034dc858cf7e34ac", dense.load_weights),
    ),
    *_because(
        "the CPU path rounds the router's logits to bf16, which swaps experts with close scores",
        "vLLM computes this model's router in fp32 on the CPU",
        _MODEL,
        ("GateLinear", "985ce4494e867faf", moe.fp32_router),
    ),
    *_because(
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
    *_because(
        "beside KDA layers a block holds as many tokens as fill a KDA state; the backend refuses all but 16",
        "the backend accepts multiples of its kernel's block",
        _MLA,
        ("CPUMLABackend.supports_block_size", "e600780e321985bb", instead(classmethod(mla.supports_block_size))),
    ),
    *_because(
        "it takes the manager's block numbers for the kernel's and wipes KDA states of running requests",
        "it multiplies by the kernel blocks per block",
        "vllm.v1.worker.cpu_model_runner",
        ("CPUModelRunner._zero_block_ids", "93e5ea9760f46fef", instead(mla.zero_block_ids)),
    ),
    *_because(
        "the originals are made for rows of 512 latent and 64 rotary channels; GLM-5.3 has no rotary ones",
        "vLLM's CPU_MLA accepts a model without rotary channels",
        _MLA,
        ("CPUMLAImpl.do_kv_cache_update", "e86b54c5f8d5433f", instead(mla.do_kv_cache_update)),
        ("CPUMLAImpl.forward_mqa", "eb14aa75d4dfccc3", instead(mla.forward_mqa)),
    ),
    *_because(
        _NO_TRITON,
        _TRITON_GONE,
        "vllm.models.glm5next.common.kda",
        ("gather_initial_states", "b0d69d2952420a27", instead(kda.gather_initial_states)),
        ("scatter_states", "2d759be9fe05b9c7", instead(kda.ScatterStates())),
        ("chunk_kda_with_fused_gate", "6fbadad3ed8e5079", instead(kda.chunk_kda_with_fused_gate)),
        ("fused_recurrent_kda", "18e8d5850ba7cdf5", instead(kda.fused_recurrent_kda)),
    ),
    *_because(
        _NO_TRITON,
        _TRITON_GONE,
        "vllm.model_executor.layers.mla",
        ("fused_q_kv_rmsnorm", "4b7c7ed58ac310a5", instead(norms.fused_q_kv_rmsnorm)),
    ),
    *_because(
        "the CPU version drops norm_weight (wrong logits, no error) and needs a CPU with AVX512-BF16",
        "vLLM's forward_cpu applies norm_weight and runs on every CPU",
        "vllm.model_executor.layers.mhc",
        ("MHCPreOp.forward_cpu", "b86ae80b29e1b60d", instead(norms.mhc_pre)),
        ("MHCPostOp.forward_cpu", "952698bf528f9981", instead(norms.mhc_post)),
        ("MHCFusedPostPreOp.forward_cpu", "571196d172a10cd4", instead(norms.mhc_fused_post_pre)),
    ),
)

_installed: set[Override] = set()


def install(table: Iterable[Override]) -> None:
    """Replace every target of the table, each once per process."""
    for override in table:
        if override not in _installed:
            _installed.add(override)
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
        f"are {', '.join(override.known)}. It is replaced because {override.why}. Install the vLLM version of "
        f"requirements/, or review the override in {__name__} and add the fingerprint."
    )


def fingerprint(target: Any) -> str:
    """A short hash of the target's source text; of its value where it is plain data."""
    if isinstance(target, (str, int, float, bool, type(None))):
        return _hash(repr(target))
    try:
        return _hash(inspect.getsource(_definition(target)))
    except (OSError, TypeError):
        return "(no source)"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _definition(target: Any) -> Any:
    """The function or class that was written down: below decorators; an object's module for an object."""
    target = inspect.unwrap(target)
    if inspect.isroutine(target) or inspect.isclass(target):
        return target
    return sys.modules[target.__module__]
