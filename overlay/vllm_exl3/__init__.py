"""EXL3 for vLLM. `register` is the `vllm.general_plugins` entry point.

Importing this package imports neither torch nor vLLM: vLLM calls `register` in every process it
starts (API server, engine core, workers, model inspection), some of which need nothing from us.
"""

_registered = False


def register() -> None:
    """Teach vLLM the `exl3` quantization method; on the CPU platform also what it lacks for GLM-5.3, and on SM12x
    GPUs the geometries of its attention.

    vLLM may call this several times in one process; only the first call does anything.
    Raises RuntimeError if another package has already registered `exl3`.
    """
    global _registered
    if _registered:
        return
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config

    if "exl3" in QUANTIZATION_METHODS:
        raise RuntimeError(
            "vLLM already has a quantization method named exl3; remove the other EXL3 plugin "
            "or set VLLM_PLUGINS to the one that should load."
        )
    from vllm.platforms import current_platform

    from vllm_exl3 import glm5_next, guards
    from vllm_exl3.config import Exl3Config
    from vllm_exl3.switches import switches

    register_quantization_config("exl3")(Exl3Config)
    glm5_next.install()
    guards.install(switches().guards_off)
    if current_platform.is_cpu():
        from vllm_exl3 import cpu

        cpu.install()
    else:
        from vllm_exl3 import few_rows, nope_mla, pdl

        few_rows.keep_one_stream()
        nope_mla.install()
        pdl.install()
    _registered = True
