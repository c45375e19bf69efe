"""Dense attention in place of sparse: which contexts and flags are refused, which tensors left out."""

import json
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from vllm_exl3.cpu import dense

from tools.local_model.make_random import write_random_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("dense") / "model"
    write_random_model(path, experts=None, vocab_size=256, max_position_embeddings=4096)
    return path


def model_config(path, **arguments):
    from vllm_exl3 import cpu

    cpu.install()
    from vllm.engine.arg_utils import EngineArgs

    args = EngineArgs(model=str(path), skip_tokenizer_init=True, **arguments)
    return args, args.create_model_config()


def with_fields(path, tmp_path, **fields):
    """The model's config.json with other fields of text_config; the weights are not needed here."""
    config = json.loads((path / "config.json").read_text())
    config["text_config"] |= fields
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_a_context_within_the_limit_is_dense(model):
    args, config = model_config(model, max_model_len=2048)
    assert config.max_model_len == 2048 and config.hf_text_config.index_topk is None
    assert args.attention_backend == "CPU_MLA"
    assert args.enable_prefix_caching is False and args.enable_chunked_prefill is False
    assert config.enforce_eager is True


@pytest.mark.parametrize(
    "arguments, origin",
    [({"max_model_len": 2049}, "--max-model-len asks for 2,049"), ({}, "config.json .* asks for 4,096")],
)
def test_a_longer_context_is_refused(model, arguments, origin):
    with pytest.raises(ValueError, match=rf"up to index_topk = 2,048 tokens, but {origin}: .*--max-model-len 2048"):
        model_config(model, **arguments)


def test_the_limit_is_the_models_own(model, tmp_path):
    small = with_fields(model, tmp_path, index_topk=1024)
    assert model_config(small, max_model_len=1024)[1].max_model_len == 1024
    with pytest.raises(ValueError, match="start with --max-model-len 1024 or less"):
        model_config(small, max_model_len=2048)


def test_a_model_within_the_limit_needs_no_flag(model, tmp_path):
    short = with_fields(model, tmp_path, max_position_embeddings=2048)
    assert model_config(short)[1].max_model_len == 2048


@pytest.mark.parametrize(
    "flag, arguments",
    [
        ("--enable-prefix-caching", {"enable_prefix_caching": True}),
        ("--enable-chunked-prefill", {"enable_chunked_prefill": True}),
        ("--speculative-config", {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}),
    ],
)
def test_what_cannot_work_is_refused_by_its_flag(model, flag, arguments):
    with pytest.raises(ValueError, match=f"{flag} was given.*start without {flag}"):
        model_config(model, max_model_len=2048, **arguments)


LAYERS = SimpleNamespace(num_hidden_layers=2, layer_types=["linear_attention", "indexed_attention"])


def kept(*names):
    weights = ((name, torch.zeros(1)) for name in names)
    return [name for name, _ in dense.without_indexer(weights, LAYERS)]


def test_indexer_tensors_are_left_out_and_nothing_else():
    others = ["embed_tokens.weight", "layers.1.self_attn.q_a_proj.weight", "layers.0.self_attn.A_log"]
    # A draft layer's tensors are vLLM's to skip.
    others.append("layers.2.self_attn.indexer.wk.weight")
    indexer = [f"layers.1.self_attn.indexer.{part}" for part in sorted(dense._INDEXER_PARTS)]
    assert kept(*others, *indexer) == others


@pytest.mark.parametrize(
    "name",
    ["layers.1.self_attn.indexer.wk.scale", "layers.0.self_attn.indexer.wk.weight", "layers.1.self_attn.indexer.x"],
)
def test_an_unknown_indexer_tensor_is_refused(name):
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        kept(name)
