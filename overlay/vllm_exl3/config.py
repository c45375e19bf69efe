"""Exl3Config: what vLLM asks to learn how each layer of an EXL3 checkpoint is quantised.

Module level, since vLLM pickles it to the engine core and the workers before plugins are loaded there.
"""

from pathlib import Path
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from vllm_exl3.checkpoint import Exl3LoadError, Layout, canonical, check_claims, read_layout
from vllm_exl3.format import Codebook

logger = init_logger("vllm.exl3")  # below "vllm", so that vLLM's handlers show it


class Exl3Config(QuantizationConfig):
    """The `quantization_config` of config.json together with what the checkpoint's headers say.

    The headers decide: a module is EXL3 if and only if the checkpoint has its trellis.
    """

    def __init__(self, quantization: dict[str, Any]) -> None:
        super().__init__()
        self.quantization = quantization
        self.layout: Layout | None = None

    def __repr__(self) -> str:
        modules = len(self.layout.exl3) if self.layout else "unread"
        return f"Exl3Config(bits={self.quantization.get('bits')}, EXL3 modules: {modules})"

    @classmethod
    def get_name(cls) -> str:
        return "exl3"

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return ["quantization_config.json"]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Exl3Config":
        """Raises Exl3LoadError if config.json names a codebook that does not exist."""
        known = [codebook.value for codebook in Codebook]
        if config.get("codebook", known[0]) not in known:
            raise Exl3LoadError(f"config.json: quantization_config.codebook is {config['codebook']!r}, known: {known}")
        # The per-tensor ledger of exllamav3 can be tens of megabytes and says nothing that the headers do not.
        return cls({key: value for key, value in config.items() if key != "tensor_storage"})

    def maybe_update_config(self, model_name: str, hf_config=None, revision: str | None = None) -> None:
        """vLLM's hook with the model's place: read the headers. Raises Exl3LoadError."""
        folder = _local_folder(model_name, revision)
        self.layout = read_layout(folder)
        check_claims(self.layout, self.quantization)
        counts = len(self.layout.exl3), len(self.layout.native)
        logger.info("exl3: %d EXL3 matrices and %d native tensors in %s", *counts, folder)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        from vllm.model_executor.layers.fused_moe import RoutedExperts
        from vllm.model_executor.layers.linear import LinearBase
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        from vllm_exl3 import linear, moe

        if self.layout is None:
            raise Exl3LoadError(f"{prefix}: built before the checkpoint's headers were read")
        name = canonical(prefix)
        if isinstance(layer, RoutedExperts):
            return moe.method_for(self.layout, name.removesuffix(".routed_experts"), layer.moe_config)
        if isinstance(layer, (LinearBase, ParallelLMHead)):
            return linear.method_for(self.layout, name, layer)
        return None


def _local_folder(model: str, revision: str | None) -> Path:
    """The checkpoint's folder: a path, or a snapshot that is already in the Hugging Face cache."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError) as error:
        raise Exl3LoadError(
            f"{model}: is no folder and is not in the local Hugging Face cache; EXL3 checkpoints are read from disk, "
            f"download it first"
        ) from error
