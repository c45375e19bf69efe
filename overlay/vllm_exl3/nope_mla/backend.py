"""vLLM's sparse MLA backend for SM12x with the geometry chosen by MLA_GEOMETRY. Imported when vLLM selects it."""

import functools
from dataclasses import replace

import torch
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.v1.attention.backends.mla.flashinfer_mla_sparse import (
    FlashInferMLASparseSM120Backend,
    _get_workspace_buffer,
)
from vllm.v1.attention.backends.mla.flashinfer_mla_sparse_sm120 import FlashInferMLASparseSM120Impl

from vllm_exl3 import overrides
from vllm_exl3.nope_mla import geometry, rows, seams
from vllm_exl3.nope_mla.geometry import COMPACT, LATENT, NATIVE, PADDED, Choice, MlaGeometryError
from vllm_exl3.nope_mla.write_rows import write_rows
from vllm_exl3.switches import switches

overrides.require(seams.TABLE)

logger = init_logger("vllm.exl3")


@functools.cache
def choose(heads: int, candidates: int, index_topk: int) -> Choice:
    """The geometry of this process; says it once. Raises MlaGeometryError if there is no kernel for it."""
    choice = geometry.decide(switches().mla_geometry, geometry.installed_kernels(), heads, candidates, index_topk)
    form, notes = choice.geometry, []
    if choice.heads != heads:
        notes.append(f"{heads} heads padded to {choice.heads}")
    if choice.candidates != candidates:
        notes.append(f"the lowest-ranked pool gives way to the recent tail, {choice.candidates} candidates in all")
    logger.info(
        "exl3: MLA geometry %s (%s): %d bytes per token and layer, queries %d wide%s", form.name, choice.reason,
        form.row_bytes, form.columns, "".join(f", {note}" for note in notes),
    )  # fmt: skip
    return choice


def refuse_row_movers(what: str, config) -> None:
    """Raise MlaGeometryError if vLLM would also move or slice cache rows, where `what` has not been tested."""
    movers = {
        "decode context parallelism": config.parallel_config.decode_context_parallel_size > 1,
        "a KV connector": config.kv_transfer_config is not None,
        "HiSparse": config.attention_config.hisparse_config is not None,
    }
    if found := [name for name, used in movers.items() if used]:
        raise MlaGeometryError(
            f"MLA geometry {what} together with {' and '.join(found)} has not been tested, and a wrong row is a wrong "
            f"answer without an error; set MLA_GEOMETRY=auto or start without it"
        )


class NopeMlaBackend(FlashInferMLASparseSM120Backend):
    """Other models than GLM-5.3-Flash, which have rotary columns, get vLLM's own behaviour."""

    @staticmethod
    def get_impl_cls():
        return NopeMlaImpl

    @classmethod
    def customize_spec(cls, spec):
        if spec.head_size == LATENT and switches().mla_geometry == COMPACT.name:
            spec = replace(spec, state_content_bytes=COMPACT.row_bytes)
        return super().customize_spec(spec)


class NopeMlaImpl(FlashInferMLASparseSM120Impl):
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.choice: Choice | None = None
        if (self.kv_lora_rank, self.qk_rope_head_dim, self.kv_scale_format) != (LATENT, 0, "arbitrary_fp32"):
            return
        config = get_current_vllm_config()
        model, candidates = config.model_config.hf_text_config, self.topk_indices_buffer.shape[1]
        self.pool = int(model.index_kpool)
        self.choice = choose(self.num_heads, candidates, int(model.index_topk))
        if self.choice.geometry is COMPACT:
            refuse_row_movers(f"compact ({COMPACT.row_bytes}-byte rows)", config)
            compile_writer(self.topk_indices_buffer.device)
        if self.choice.candidates != candidates:
            refuse_row_movers(f"padded with {self.choice.candidates} candidates", config)
            overrides.install(seams.RANKED_POOLS)

    def do_kv_cache_update(self, kv_c_normed, k_pe, kv_cache, slot_mapping, *rest, **named) -> None:
        """Quantise and store latents kv_c_normed [tokens, 512] at their slots."""
        form = self.choice.geometry if self.choice else NATIVE
        if form is COMPACT:
            if kv_cache.numel():
                write_rows(kv_c_normed, kv_cache, slot_mapping.flatten())
            return
        if form is PADDED:
            # Blocks come back from other layers' state, so the kernel must find zeros that we wrote.
            k_pe = kv_c_normed.new_zeros(kv_c_normed.shape[0], 1, form.rope)
        super().do_kv_cache_update(kv_c_normed, k_pe, kv_cache, slot_mapping, *rest, **named)

    def _run_mqa_kernel(self, q, kv_cache, topk_indices_physical):
        """q [tokens, heads, 512], kv_cache uint8 [pages, 64, row bytes], rows of candidates -> [tokens, heads, 512]."""
        if self.choice is None:
            return super()._run_mqa_kernel(q, kv_cache, topk_indices_physical)
        form = self.choice.geometry
        candidates = rows.fit_candidates(topk_indices_physical, self.choice.candidates, self.pool)
        result = self._attend(rows.widen_query(q, self.choice.heads, form.columns), kv_cache, candidates)
        if form is PADDED:
            rows.zero_empty(result, candidates)
        return result[:, : self.num_heads].contiguous()

    def _attend(self, query: torch.Tensor, kv_cache: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        from vllm.utils.flashinfer import flashinfer_trtllm_batch_decode_with_kv_cache_mla

        if self._workspace_buffer is None:
            self._workspace_buffer = _get_workspace_buffer(query.device)
        result = query.new_empty(*query.shape[:2], self.kv_lora_rank)
        width = candidates.shape[1]
        return flashinfer_trtllm_batch_decode_with_kv_cache_mla(
            query=query.unsqueeze(1),
            kv_cache=kv_cache.view(torch.uint8).unsqueeze(1),
            workspace_buffer=self._workspace_buffer,
            qk_nope_head_dim=self.qk_nope_head_dim,
            kv_lora_rank=self.kv_lora_rank,
            qk_rope_head_dim=self.choice.geometry.rope,
            block_tables=candidates.unsqueeze(1),
            seq_lens=None,
            max_seq_len=width,
            out=result.unsqueeze(1),
            bmm1_scale=self.scale,
            bmm2_scale=1.0,
            sparse_mla_top_k=width,
            kv_scale_format=self.kv_scale_format,
        ).squeeze(1)


@functools.cache
def compile_writer(device: torch.device) -> None:
    """Have Triton compile the writer now: inside a CUDA graph's capture it could not."""
    if device.type == "cuda":
        cache = torch.empty(1, 64, COMPACT.row_bytes, dtype=torch.uint8, device=device)
        nowhere = torch.full((1,), -1, dtype=torch.int64, device=device)
        write_rows(torch.zeros(1, LATENT, dtype=torch.bfloat16, device=device), cache, nowhere)
