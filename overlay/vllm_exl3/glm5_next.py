"""Where vLLM's GLM-5.3-Flash keeps EXL3 out: attention projections, exllamav3's fused names, completeness.

vLLM builds attention without a quantization config because the published FP8 checkpoints keep it native.
Each entry of TABLE changes one such place, on every platform, and only for EXL3 checkpoints.
"""

import functools
from collections.abc import Iterable, Iterator

import torch

from vllm_exl3 import overrides
from vllm_exl3.checkpoint import Exl3LoadError
from vllm_exl3.finite import refuse_not_finite
from vllm_exl3.format import Codebook, Exl3Tensors, check_marker
from vllm_exl3.overrides import Override
from vllm_exl3.reference import decode_weight


def _exl3_config(vllm_config):
    """The model's Exl3Config, or None for any other checkpoint."""
    config = vllm_config.quant_config
    return config if config is not None and config.get_name() == "exl3" else None


# Attention


def mla_init(original):
    """Glm5NextMLAAttention.__init__ with the quantization config that its caller leaves out."""

    @functools.wraps(original)
    def init(self, vllm_config, *args, **kwargs):
        if config := _exl3_config(vllm_config):
            kwargs["quant_config"] = config
        original(self, vllm_config, *args, **kwargs)

    return init


def kda_class(original: type) -> type:
    """Glm5NextLinearAttention whose projections see the quantization config that it hides from itself."""

    class Exl3LinearAttention(original):
        def __init__(self, config, vllm_config, prefix: str = "") -> None:
            self.__dict__["_exl3_config"] = _exl3_config(vllm_config)
            super().__init__(config, vllm_config, prefix)

        @property
        def quant_config(self):
            return self.__dict__["_exl3_config"] or self.__dict__.get("_own_quant_config")

        @quant_config.setter
        def quant_config(self, value) -> None:
            self.__dict__["_own_quant_config"] = value

    Exl3LinearAttention.__name__ = original.__name__
    Exl3LinearAttention.__qualname__ = original.__qualname__
    return Exl3LinearAttention


# Weights


def model_load_weights(original):
    """Glm5NextModel.load_weights for exllamav3's names of KDA's fused tensors."""

    @functools.wraps(original)
    def load(self, weights):
        return original(self, split_kda(weights))

    return load


def split_kda(weights: Iterable) -> Iterator:
    """Give `qkv_proj` the name of vLLM's merged layer and cut `conv1d.weight` into q, k and v."""
    for name, tensor, *rest in weights:
        if name.endswith(".self_attn.conv1d.weight"):
            if tensor.shape[0] % 3:
                raise Exl3LoadError(f"{name}: has {tensor.shape[0]} channels, expected q, k and v of equal width")
            for side, part in zip("qkv", tensor.chunk(3), strict=True):
                yield name.replace(".conv1d.", f".{side}_conv1d."), part, *rest
        else:
            yield name.replace(".self_attn.qkv_proj.", ".self_attn.in_proj_qkvbfg_a."), tensor, *rest


def mtp_load_weights(original):
    """Glm5NextMTP.load_weights; its `eh_proj` is a plain torch layer and takes a decoded weight."""

    @functools.wraps(original)
    def load(self, weights):
        # A checkpoint need not repeat the embedding: vLLM puts the target's in the draft's place after loading.
        return original(self, decode_eh_proj(weights)) | {"model.embed_tokens.weight"}

    return load


def decode_eh_proj(weights: Iterable) -> Iterator:
    """Replace the EXL3 tensors of each `eh_proj` by its weight [out, in]."""
    pending: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor, *rest in weights:
        module, _, part = name.rpartition(".")
        if module.endswith(".eh_proj") and part != "weight":
            pending.setdefault(module, {})[part] = tensor
        else:
            yield name, tensor, *rest
    for module, tensors in pending.items():
        yield f"{module}.weight", _decode(module, tensors)


def _decode(module: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    codebook = next((c for c in Codebook if c.marker in tensors), Codebook.THREE_INST)
    if codebook.marker:
        check_marker(f"{module}.{codebook.marker}", tensors[codebook.marker], codebook)
    weight = Exl3Tensors(tensors["trellis"], tensors["suh"], tensors["svh"], codebook)
    return decode_weight(weight).T.contiguous()


def check_all_loaded(original):
    """DefaultModelLoader.load_weights with vLLM's own check for parameters that nothing was loaded into, and with one
    for values that are no finite numbers."""

    @functools.wraps(original)
    def load(self, model, model_config):
        if model_config.quantization == "exl3":
            self.enable_weights_track = True
            read = type(self).get_all_weights
            self.get_all_weights = lambda *sources: refuse_not_finite(read(self, *sources))
        original(self, model, model_config)

    return load


_HIDDEN = "vLLM builds this layer without a quantization config; an EXL3 checkpoint may quantise it."
_HIDDEN_UNTIL = "vLLM passes its quantization config to the attention of GLM-5.3-Flash."

TABLE = (
    Override(
        "vllm.models.glm5next.common.attention", "Glm5NextMLAAttention.__init__", _HIDDEN, _HIDDEN_UNTIL,
        ("6596588ee309eb8e",), mla_init,
    ),
    Override(
        "vllm.models.glm5next.common.kda", "Glm5NextLinearAttention", _HIDDEN, _HIDDEN_UNTIL,
        ("4164dd69ce7117d1",), kda_class,
    ),
    Override(
        "vllm.models.glm5next.common.model", "Glm5NextModel.load_weights",
        "exllamav3 stores KDA's q, k and v as one matrix under a name that vLLM does not know.",
        "vLLM knows exllamav3's names.",
        ("034dc858cf7e34ac",), model_load_weights,
    ),
    Override(
        "vllm.models.glm5next.common.mtp", "Glm5NextMTP.load_weights",
        "eh_proj is a plain torch layer, which has no place for EXL3 tensors.",
        "vLLM builds eh_proj as one of its linear layers.",
        ("1b4323692ee852cf",), mtp_load_weights,
    ),
    Override(
        "vllm.model_executor.model_loader.default_loader", "DefaultModelLoader.load_weights",
        "For quantised models vLLM does not check that every parameter was loaded, and never what was.",
        "vLLM checks both for every model.",
        ("62d3b9cf8de5e872",), check_all_loaded,
    ),
)  # fmt: skip


def install() -> None:
    """Install TABLE (idempotent); targets that are not imported yet are replaced right after their import."""
    overrides.install(TABLE)
