"""Lets torchvision be imported when its compiled library does not fit a CPU torch.

PyPI's torchvision is a CUDA build. Beside a CPU torch its library does not load; torchvision accepts
that, but then registers shape functions for two operators which only the library defines, and the
import fails. transformers needs torchvision's Python part, and vLLM imports transformers before it
loads general plugins, but after platform plugins. Hence the entry point `vllm.platform_plugins`.
"""

from types import ModuleType

from vllm_exl3.after_import import after_import

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_OPERATORS = ("nms", "qnms")
_installed = False
_library = None  # torch forgets the operators when this object dies


def platform_plugin() -> None:
    """Entry point: vLLM asks which platform we bring. None, but this is the first moment of ours."""
    install()


def install() -> None:
    """Define the two operators once torchvision has tried, and failed, to load its own."""
    global _installed
    if not _installed:
        _installed = True
        after_import("torchvision.extension", _define_missing_operators)


def _define_missing_operators(extension: ModuleType) -> None:
    global _library
    import torch

    is_cpu_build = torch.version.cuda is None and torch.version.hip is None
    if extension._has_ops() or not is_cpu_build:
        return
    # Without an implementation: calling one raises NotImplementedError, as it should.
    _library = torch.library.Library("torchvision", "FRAGMENT")
    for name in _OPERATORS:
        if not hasattr(torch.ops.torchvision, name):
            _library.define(name + _SCHEMA)
