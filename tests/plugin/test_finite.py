"""A NaN or an infinity in a checkpoint is refused at load, by the tensor's name; nothing else is."""

import math
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors import safe_open
from test_checkpoint import change, key, tensor
from vllm_exl3.checkpoint import Exl3LoadError
from vllm_exl3.finite import LAYER_VALUES, refuse_not_finite

from tools.local_model.make_random import write_random_model

LOCAL = Path(__file__).parents[2] / "models" / "local"
BAD = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def all_of(folder):
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as shard:
            for name in shard.keys():
                yield name, shard.get_tensor(name)


def refused(weights) -> str:
    with pytest.raises(Exl3LoadError) as caught:
        list(refuse_not_finite(weights))
    return str(caught.value)


@pytest.fixture(scope="module")
def stored():
    return list(all_of(LOCAL))


def test_the_shipped_model_passes_whole(stored):
    assert [name for name, _ in refuse_not_finite(stored)] == [name for name, _ in stored]


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("at", [0, -1], ids=["first", "last"])
def test_one_bad_value_of_any_float_tensor_is_named(stored, at, value):
    """Every EXL3 scale and every other float tensor of the shipped model, wherever a rank's slice would begin."""
    seen = 0
    for name, sound in stored:
        if sound.dtype in (torch.float16, torch.bfloat16, torch.float32):
            damaged = sound.clone()
            damaged.view(-1)[at] = BAD[value]
            said = refused([(name, damaged)])
            place = [0 if at == 0 else size - 1 for size in sound.shape]
            assert said.startswith(f"{name}: holds {value} at {place}, and 1 of its {sound.numel()} values")
            seen += 1
    assert seen > 100


def test_what_only_looks_like_one_passes():
    words = torch.full((2, 2, 64), 0x7E00, dtype=torch.int16)  # as fp16 these would be NaN
    largest = torch.tensor([65504.0, -65504.0], dtype=torch.float16).repeat(2048)
    weights = [("layers.1.mlp.experts.0.up_proj.trellis", words), ("layers.1.mlp.experts.0.up_proj.suh", largest),
               ("a", torch.empty(0)), ("b", torch.full((4,), 3e38)), ("c", torch.tensor(1.0)),
               ("d", torch.zeros(4).to(torch.float8_e4m3fn))]  # fmt: skip
    assert list(refuse_not_finite(weights)) == weights


def test_items_with_more_than_two_parts_pass_whole():
    assert list(refuse_not_finite([("a", torch.ones(1), "more")])) == [("a", torch.ones(1), "more")]


def test_only_large_matrices_of_a_layer_are_left_out():
    large = torch.empty(LAYER_VALUES + 1, dtype=torch.bfloat16).fill_(math.nan)
    left_out = [("model.language_model.layers.3.self_attn.o_proj.weight", large)]
    assert list(refuse_not_finite(left_out)) == left_out
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.visual.blocks.0.attn.qkv.weight"):
        assert refused([(name, large)]).startswith(name)


# vLLM


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [("model.layers.1.mlp.experts.3.down_proj.svh", -1, math.nan),
     ("model.layers.1.mlp.shared_experts.up_proj.suh", 0, -math.inf)],
)  # fmt: skip
def test_vllm_does_not_load_it(tmp_path, name, place, value):
    pytest.importorskip("vllm")
    from engines import VOCAB, Engine, in_process_vllm

    write_random_model(tmp_path / "model", experts="mcg4", dense={"layers.*.mlp.shared_experts.*": "mcg5"},
                       vocab_size=VOCAB)  # fmt: skip
    damaged = tensor(tmp_path / "model", name).clone()
    damaged[place] = value
    change(tmp_path / "model", **{key(name): damaged})
    with in_process_vllm(), pytest.raises(Exl3LoadError) as caught:
        Engine(tmp_path / "model")
    assert str(caught.value).startswith(f"{name}: holds {value} at [{place % len(damaged)}]")
