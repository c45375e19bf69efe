"""Rounding as an engine's own, only larger: which of a judge's readings would another order of sums have changed?

Between two experts, or two pools at the edge of a selection, bf16 decides, and a tie that falls the other way can cost
whole nats. An arm reads in other chunks and in company, so its ties fall otherwise than the judge's. A token that the
judge takes too, once it reads with noise of that size, is no finding.
"""

from __future__ import annotations

from contextlib import contextmanager

import torch

# Relative, of each layer's output; bf16 itself rounds by up to 2**-9, many times in a layer.
SIZES = (2**-8, 2**-7, 2**-6)
LAYER, EMBEDDING = "DecoderLayer", "VocabParallelEmbedding"


class Noise:
    """Multiplies what the embedding and each layer hand on, in an engine of this process that runs eagerly."""

    def __init__(self, llm) -> None:
        (model,) = llm.collective_rpc(lambda worker: worker.get_model())
        modules = [module for module in model.modules() if type(module).__name__.endswith((LAYER, EMBEDDING))]
        layers = sum(type(module).__name__.endswith(LAYER) for module in modules)
        wanted = llm.llm_engine.vllm_config.model_config.hf_text_config.num_hidden_layers
        if layers != wanted or layers == len(modules):
            raise RuntimeError(
                f"vLLM's model shows {layers} layers of {wanted} and {len(modules) - layers} embeddings; "
                f"rounding.Noise looks for names that are gone."
            )
        self.size, self.seed, self.used = 0.0, 0, 0
        for module in modules:
            module.register_forward_hook(self._after)

    @contextmanager
    def of(self, number: int):
        """The noise of reading `number`, the same each time. Raises RuntimeError where the engine ran past it."""
        self.size, self.seed, self.used = SIZES[number % len(SIZES)], number, 0
        try:
            yield
        finally:
            self.size = 0.0
        if not self.used:
            raise RuntimeError("the judge's engine ran past the noise: it does not run eagerly.")

    def _after(self, module, _inputs, output):
        """Of a layer the block's output and the residual streams, not the weights that mix them."""
        if not self.size:
            return None
        self.used += 1
        if isinstance(output, torch.Tensor):
            return self._noisy(output)
        return (*(one if one is None else self._noisy(one) for one in output[:2]), *output[2:])

    def _noisy(self, values: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator(values.device).manual_seed(1000 * self.seed + self.used)
        noise = torch.randn(values.shape, generator=generator, device=values.device, dtype=torch.float32)
        return (values.float() * (1 + self.size * noise)).to(values.dtype)
