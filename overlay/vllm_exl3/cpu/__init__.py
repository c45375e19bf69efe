"""What vLLM's CPU build lacks for GLM-5.3-Flash. Installed on the CPU platform only."""


def install() -> None:
    """Install every override of this package (idempotent).

    Targets that vLLM has not imported yet are replaced right after their import, so that a process
    which needs no model does not load one. Raises RuntimeError if a target is not the code that the
    override was written for.
    """
    from vllm_exl3 import overrides
    from vllm_exl3.cpu import torchvision_ops
    from vllm_exl3.cpu.overrides import TABLE

    torchvision_ops.install()
    overrides.install(TABLE)
