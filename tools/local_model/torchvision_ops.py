"""Lets transformers import beside a CPU torch: PyPI's torchvision is a CUDA build without its operators.

Only the Python part of torchvision is used (image modes and names); its import fails unless the two
operators that it registers shapes for exist. They are declared here and never run.
"""

from __future__ import annotations

import torch

_library = torch.library.Library("torchvision", "FRAGMENT")


def declare_missing_operators() -> None:
    if torch.version.cuda is not None:
        return
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
