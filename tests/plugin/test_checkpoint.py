"""What the header scan accepts, and what it refuses by name."""

import json
import os
import struct
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from safetensors.torch import load_file, save_file
from vllm_exl3.checkpoint import Exl3LoadError, canonical, check_claims, read_layout
from vllm_exl3.format import Codebook

from tools.local_model.make_random import write_random_model

EXPERT = "model.layers.1.mlp.experts.2"


@pytest.fixture
def folder(tmp_path) -> Path:
    write_random_model(tmp_path / "model", experts="mcg4")
    return tmp_path / "model"


def change(folder: Path, **tensors) -> None:
    """Replace tensors (dots as __) in whatever shard has them; None deletes; keeps the index true."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    for key, value in tensors.items():
        name = key.replace("__", ".")
        shard = index["weight_map"].get(name, min(index["weight_map"].values()))
        content = load_file(folder / shard)
        if value is None:
            del content[name], index["weight_map"][name]
        else:
            content[name], index["weight_map"][name] = value, shard
        save_file(content, folder / shard, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def tensor(folder: Path, name: str):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return load_file(folder / index["weight_map"][name])[name]


def key(name: str) -> str:
    return name.replace(".", "__")


def refused(folder: Path) -> str:
    with pytest.raises(Exl3LoadError) as caught:
        check_claims(read_layout(folder), json.loads((folder / "config.json").read_text())["quantization_config"])
    return str(caught.value)


def test_namespaces_have_the_same_canonical_names():
    names = ["model.layers.3.x", "model.language_model.layers.3.x", "language_model.model.layers.3.x"]
    assert {canonical(name) for name in names} == {"layers.3.x"}
    assert canonical("language_model.lm_head") == canonical("lm_head") == "lm_head"
    assert canonical("model.layers.45.mtp_block.mlp.gate") == "layers.45.mlp.gate"


@pytest.mark.parametrize("namespace", ["text", "vl"])
@pytest.mark.parametrize("all_exl3", [False, True])
def test_what_is_exl3_comes_from_the_headers(tmp_path, namespace, all_exl3):
    write_random_model(tmp_path, experts="mul13", all_exl3=all_exl3, namespace=namespace)
    layout = read_layout(tmp_path)
    shape = layout.exl3["layers.1.mlp.experts.2.up_proj"]
    assert (shape.bits, shape.codebook) == (3, Codebook.MUL1)
    assert ("lm_head" in layout.exl3) == all_exl3 == ("layers.0.self_attn.qkv_proj" in layout.exl3)
    assert layout.is_native("layers.3.self_attn.kv_b_proj") and layout.is_native("layers.1.mlp.gate")


def test_the_shipped_model_is_read():
    root = Path(__file__).parent.parent.parent / "models" / "local"
    layout = read_layout(root)
    check_claims(layout, json.loads((root / "config.json").read_text())["quantization_config"])
    assert all(".mlp.experts." in name for name in layout.exl3)


def test_a_truncated_shard_is_named(folder):
    shard = folder / "model-00002-of-00002.safetensors"
    os.truncate(shard, shard.stat().st_size - 100)
    assert str(shard) in refused(folder)


def test_a_shard_without_header_is_named(folder):
    shard = folder / "model-00001-of-00002.safetensors"
    shard.write_bytes(struct.pack("<Q", 2**40) + b"{}")
    assert str(shard) in refused(folder)


def test_a_missing_shard_is_named(folder):
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors: the shard is missing" in refused(folder)


def test_a_transposed_trellis_is_named(folder):
    name = "model.layers.1.mlp.experts.2.up_proj.trellis"
    change(folder, **{key(name): tensor(folder, name).transpose(0, 1).contiguous()})
    assert "layers.1.mlp.experts.2.up_proj.suh: is F16" in refused(folder)


def test_a_missing_projection_is_named(folder):
    change(folder, **{key(f"{EXPERT}.down_proj.{part}"): None for part in ("trellis", "suh", "svh", "mcg")})
    assert "layers.1.mlp.experts.2.down_proj: neither" in refused(folder)


def test_a_missing_scale_is_named(folder):
    change(folder, **{key(f"{EXPERT}.gate_proj.suh"): None})
    assert "layers.1.mlp.experts.2.gate_proj.suh: missing" in refused(folder)


def test_a_missing_native_half_is_named(folder):
    change(folder, model__layers__0__mlp__up_proj__weight=None)
    assert "layers.0.mlp.up_proj: neither" in refused(folder)


def test_a_tensor_in_two_shards_is_named(folder):
    name = f"{EXPERT}.gate_proj.suh"
    for shard in folder.glob("*.safetensors"):
        save_file(load_file(shard) | {name: torch.zeros(128, dtype=torch.float16)}, shard)
    (folder / "model.safetensors.index.json").unlink()
    assert name in refused(folder) and "expected once" in refused(folder)


def test_a_tensor_that_the_index_lacks_is_named(folder):
    shard = folder / "model-00001-of-00002.safetensors"
    save_file(load_file(shard) | {"model.stray.weight": torch.zeros(2)}, shard)
    assert "model.stray.weight: is in the file but not in the index" in refused(folder)


def test_both_forms_of_one_matrix_are_refused(folder):
    change(folder, **{key(f"{EXPERT}.gate_proj.weight"): torch.zeros(256, 128)})
    assert "layers.1.mlp.experts.2.gate_proj: has both .weight and" in refused(folder)


def test_an_exl3_matrix_without_a_loader_is_refused(folder):
    parts = {part: tensor(folder, f"{EXPERT}.gate_proj.{part}") for part in ("trellis", "suh", "svh", "mcg")}
    change(folder, model__layers__3__self_attn__kv_b_proj__weight=None)
    change(folder, **{key(f"model.layers.3.self_attn.kv_b_proj.{part}"): value for part, value in parts.items()})
    assert "layers.3.self_attn.kv_b_proj.trellis: this plugin loads no EXL3 weight" in refused(folder)


@pytest.mark.parametrize(("claim", "said"), [({"bits": 3}, "bits 3"), ({"codebook": "mul1"}, "codebook mul1")])
def test_a_false_claim_is_refused(folder, claim, said):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= claim
    (folder / "config.json").write_text(json.dumps(config))
    assert "at 4 bits, mcg, but config.json says " + said in refused(folder)


def test_dense_exl3_outside_the_scope_is_refused(tmp_path):
    write_random_model(tmp_path, experts="mcg4", dense={"layers.*.mlp.shared_experts.*": "mul16"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["scope"] = "glm53_routed_experts_only"
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "layers.1.mlp.shared_experts" in refused(tmp_path)


def test_a_checkpoint_without_exl3_is_refused(tmp_path):
    write_random_model(tmp_path, experts=None)
    with pytest.raises(Exl3LoadError, match="no tensor of the checkpoint is EXL3"):
        check_claims(read_layout(tmp_path), {"quant_method": "exl3"})
