"""The DFlash2 draft as `tools.local_model.dflash2` computes it, against vLLM's own class with the written files."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from engines import in_process_vllm
from torch import nn

from tools.local_model import dflash2, draft_files, shapes
from tools.local_model.make_random import write_random_model

K, CONTEXT, WINDOW = 7, 23, 16
TEXT = shapes.text_config()


class PlainAttention(nn.Module):
    """In the place of vLLM's attention: keeps the context that the draft stores, and attends to all in the window."""

    def __init__(self, config: dict) -> None:
        super().__init__()
        self.config, self.impl, self.kv_cache = config, self, None

    def do_kv_cache_update(self, _layer, keys, values, _cache, _slots) -> None:
        self.context = keys.clone(), values.clone()

    def forward(self, q, k, v):
        head, heads = self.config["head_dim"], self.config["num_attention_heads"]
        q, k, v = (x.view(-1, x.shape[-1] // head, head) for x in (q, k, v))
        k, v = (torch.cat([old, new]).expand(-1, heads, -1) for old, new in zip(self.context, (k, v), strict=True))
        at = torch.arange(len(k))
        far = (at[-len(q) :, None] - at).abs() >= self.config["sliding_window"]
        scores = torch.einsum("qhd,khd->hqk", q, k) * head**-0.5
        weights = scores.masked_fill(far, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)


def vllms_class(folder, target, config: dict, embedding, head):
    """vLLM's draft with these weights, in fp32, inside the current vLLM configuration."""
    from safetensors.torch import load_file
    from vllm.config import SpeculativeConfig, set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import process_weights_after_loading
    from vllm.model_executor.models.qwen3_dflash2 import DFlash2Qwen3ForCausalLM

    settings = EngineArgs(
        str(target), skip_tokenizer_init=True, dtype="float32", max_model_len=256, enforce_eager=True
    ).create_engine_config()
    # vLLM on a CPU does not speculate, so the configuration gets its draft behind the engine's back.
    draft = SpeculativeConfig(
        method="dflash", model=str(folder), num_speculative_tokens=K, kv_cache_dtype="auto",
        target_model_config=settings.model_config, target_parallel_config=settings.parallel_config,
    )  # fmt: skip
    settings.speculative_config = draft
    init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
    with set_current_vllm_config(settings):
        ensure_model_parallel_initialized(1, 1)
        model = DFlash2Qwen3ForCausalLM(vllm_config=settings).float()
        model.load_weights(load_file(folder / "model.safetensors").items())
        model.model.embed_tokens.weight.data.copy_(embedding)
        model.lm_head.weight.data.copy_(head)
        model.model._attn_layers = [PlainAttention(config) for _ in model.model.layers]
        for layer, attention in zip(model.model.layers, model.model._attn_layers, strict=True):
            layer.self_attn.attn = attention
        process_weights_after_loading(model, draft.draft_model_config, torch.device("cpu"))
    return settings, model


@torch.no_grad()
def vllms_draft(settings, model, ids, taps) -> tuple[torch.Tensor, list[int]]:
    """(states [k, hidden], tokens) after the context `taps` and the anchor, ids[CONTEXT]."""
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context

    block = torch.full((K + 1,), model.model.mask_token_id)
    block[0] = ids[CONTEXT]
    with set_current_vllm_config(settings), set_forward_context(None, settings):
        context = model.combine_hidden_states(taps[:CONTEXT].flatten(1))
        model.precompute_and_store_context_kv(context, torch.arange(CONTEXT), torch.arange(CONTEXT))
        states = model(block, torch.arange(CONTEXT, CONTEXT + K + 1))[1:]
        candidates, unary = model.compute_candidates(states)
        scores = model.model.candidate_selector(candidates[None], unary[None], states[None], block[:1])[0]
    chosen, tokens = 0, []
    for step in range(K):
        chosen = int(scores[step, chosen].argmax())
        tokens.append(int(candidates[step, chosen]))
    return states, tokens


def test_the_draft_is_what_vllm_computes_from_the_files(tmp_path):
    generator = torch.Generator().manual_seed(0)
    noise = lambda *shape: torch.randn(shape, generator=generator)
    config = dflash2.draft_config(TEXT, sliding_window=WINDOW)
    start = dflash2.initial_parameters(config, seed=0)
    parameters = draft_files.rounded({name: t + 0.1 * noise(*t.shape) for name, t in start.items()})
    # vLLM normalises the context's keys of all layers at once, for which its CPU kernel takes one weight only.
    parameters["layers.1.self_attn.k_norm.weight"] = parameters["layers.0.self_attn.k_norm.weight"]
    draft_files.write_dflash2(tmp_path / "draft", config, parameters)
    write_random_model(tmp_path / "target", experts=None)
    embedding, head = 0.5 * noise(TEXT["vocab_size"], 128), 0.3 * noise(TEXT["vocab_size"], 128)
    ids, taps = torch.randint(0, 900, (1, CONTEXT + 8), generator=generator), 3 * noise(1, CONTEXT + 8, 3, 128)
    anchors = torch.tensor([[CONTEXT]])

    def ours(p):
        states = dflash2.block_states(p, config, embedding, ids, taps, anchors, K)
        tokens = dflash2.chosen_tokens(p, config, head, states, ids.gather(1, anchors))
        return states[0, 0], tokens[0, 0].tolist()

    with in_process_vllm():
        settings, model = vllms_class(tmp_path / "draft", tmp_path / "target", config, embedding, head)
        theirs, tokens = vllms_draft(settings, model, ids[0], taps[0])
    states, chosen = ours(parameters)
    assert (states - theirs).norm() / theirs.norm() < 1e-5
    assert chosen == tokens
    for name in ("layers.1.mlp_conv.base_kernel", "layers.0.self_attn.k_norm.weight"):  # planted bugs must show
        states, _ = ours(parameters | {name: parameters[name].flip(-1)})
        assert (states - theirs).norm() / theirs.norm() > 1e-2
