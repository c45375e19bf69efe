"""NoPE sparse MLA of GLM-5.3-Flash on SM12x: three geometries of cache rows and queries (docs/architecture.md).

`install` only tells vLLM the name of the backend class; nothing is imported before vLLM chooses it.
"""

from vllm_exl3.nope_mla import geometry
from vllm_exl3.switches import switches

BACKEND = "vllm_exl3.nope_mla.backend.NopeMlaBackend"


def install() -> None:
    """Put our class in the place of FLASHINFER_MLA_SPARSE_SM120 where the GPU is an SM12x, or cannot be asked.

    Raises MlaGeometryError if MLA_GEOMETRY names a geometry on another GPU, RuntimeError if a third package has
    already replaced the backend.
    """
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if not geometry.applies(switches().mla_geometry, current_platform.get_device_capability()):
        return
    backend = AttentionBackendEnum.FLASHINFER_MLA_SPARSE_SM120
    if backend.is_overridden() and backend.get_path() != BACKEND:
        raise RuntimeError(
            f"vLLM's attention backend {backend.name} is already replaced by {backend.get_path()}; remove that plugin "
            f"or set VLLM_PLUGINS to the one that should load."
        )
    register_backend(backend, BACKEND)
