"""Keeps vLLM from programmatic dependent launch on SM12x unless PDL=1."""

from vllm_exl3 import overrides
from vllm_exl3.nope_mla.geometry import is_sm12x
from vllm_exl3.overrides import Override, instead
from vllm_exl3.switches import switches

TABLE = (
    Override(
        "vllm.platforms.cuda", "CudaPlatformBase.is_arch_support_pdl",
        "vLLM lets kernels start before their predecessors end on every GPU from 9.0 on, which is untested on SM12x",
        "warm and cold answers of a Spark are equal with it in the soak test",
        ("f5072f19dce0c436", "a1cb2fe444b25517"), instead(classmethod(lambda _cls: False)),
    ),
)  # fmt: skip


def install() -> None:
    """For `register()`: before any of vLLM's kernels is imported."""
    from vllm.platforms import current_platform

    if is_sm12x(current_platform.get_device_capability()) and not switches().pdl:
        overrides.install(TABLE)
