"""Damaged checkpoints, each refused by name while vLLM loads, before it could serve; and registration."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from engines import VOCAB, Engine, in_process_vllm
from test_checkpoint import change, key, tensor
from vllm_exl3.checkpoint import Exl3LoadError
from vllm_exl3.format import Codebook, Exl3FormatError

from tools.local_model.make_random import write_random_model

EXPERT = "model.layers.1.mlp.experts.2"
PARTS = ("trellis", "suh", "svh", "mcg")
FLIPPED = torch.tensor(Codebook.MCG.marker_value ^ 1, dtype=torch.int32)


@pytest.fixture
def folder(tmp_path):
    write_random_model(tmp_path / "model", experts="mcg4", dense={"layers.*.mlp.shared_experts.*": "mcg5"},
                       vocab_size=VOCAB)  # fmt: skip
    return tmp_path / "model"


def refused(folder) -> str:
    with in_process_vllm(), pytest.raises(Exl3FormatError) as caught:
        Engine(folder)
    return str(caught.value)


def test_a_flipped_marker_of_an_expert_is_named(folder):
    change(folder, **{key(f"{EXPERT}.up_proj.mcg"): FLIPPED})
    assert "layers.1.mlp.experts.2.up_proj.mcg: marker is 0xcbac1fec, expected 0xcbac1fed" in refused(folder)


def test_a_flipped_marker_of_a_dense_layer_is_named(folder):
    change(folder, **{key("model.layers.1.mlp.shared_experts.up_proj.mcg"): FLIPPED})
    assert "layers.1.mlp.shared_experts.up_proj.mcg: marker is 0xcbac1fec" in refused(folder)


def test_a_missing_expert_is_named(folder):
    names = [f"{EXPERT}.{p}_proj.{part}" for p in ("gate", "up", "down") for part in PARTS]
    change(folder, **dict.fromkeys(map(key, names)))
    assert "layers.1.mlp.experts.2.gate_proj.trellis: is missing" in refused(folder)


def test_an_extra_expert_is_named(folder):
    names = [f"{p}_proj.{part}" for p in ("gate", "up", "down") for part in PARTS]
    other = "model.layers.1.mlp.experts.9"
    change(folder, **{key(f"{other}.{name}"): tensor(folder, f"{EXPERT}.{name}") for name in names})
    assert "layers.1.mlp.experts.9: is in the checkpoint, but config.json says 4 experts" in refused(folder)


def test_other_bits_of_up_than_of_gate_are_named(folder):
    changed = {}
    for expert in range(4):
        name = f"model.layers.1.mlp.experts.{expert}.up_proj.trellis"
        changed[key(name)] = tensor(folder, name)[..., :48].contiguous()
    change(folder, **changed)
    assert "layers.1.mlp.experts.0.up_proj.trellis: is 128x256 at 3 bits, mcg, but gate_proj is" in refused(folder)


def test_other_bits_of_one_expert_are_named(folder):
    name = f"{EXPERT}.down_proj.trellis"
    change(folder, **{key(name): tensor(folder, name)[..., :48].contiguous()})
    assert "layers.1.mlp.experts.2.down_proj: is 256x128 at 3 bits, mcg, but" in refused(folder)


def test_an_extra_tensor_is_named(folder):
    change(folder, model__layers__0__mlp__stray__weight=torch.zeros(2, 2))
    with in_process_vllm(), pytest.raises((KeyError, ValueError), match=r"layers\.0\.mlp\.stray\.weight"):
        Engine(folder)


def test_a_missing_norm_is_named(folder):
    change(folder, model__layers__1__input_layernorm__weight=None)
    said = r"not initialized from.*layers\.1\.input_layernorm\.weight"
    with in_process_vllm(), pytest.raises(ValueError, match=said):
        Engine(folder)


def test_a_width_of_another_model_is_named(tmp_path):
    write_random_model(tmp_path, vocab_size=VOCAB)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"moe_intermediate_size": 256', '"moe_intermediate_size": 384'))
    said = refused(tmp_path)
    assert "holds 128x256 at 4 bits, mcg, config.json asks for 128x384" in said


# The slots of a loader


def test_a_tensor_that_arrives_twice_is_refused():
    from vllm_exl3.format import TensorShape
    from vllm_exl3.linear import LoadedPart, Part

    part = Part("m", (0,), TensorShape(128, 128, 4, Codebook.MCG))
    loaded = LoadedPart(part, (0, 128), [(0, 128)], torch.device("cpu"))
    loaded.store("suh", torch.zeros(128, dtype=torch.float16))
    with pytest.raises(Exl3LoadError, match=r"m\.suh: is in the checkpoint twice"):
        loaded.store("suh", torch.zeros(128, dtype=torch.float16))
    with pytest.raises(Exl3LoadError, match=r"m\.svh: is torch.float16 \[64\]"):
        loaded.store("svh", torch.zeros(64, dtype=torch.float16))
    assert loaded.missing() == ["trellis", "svh", "mcg"]


# On a GPU


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """vLLM's platform says that it is no CPU; nothing is computed."""
    from vllm_exl3 import linear, ops

    monkeypatch.setattr(type(linear.current_platform), "is_cpu", lambda self: False)
    monkeypatch.setenv("VLLM_DISABLE_SHARED_EXPERTS_STREAM", "1")
    ops.load.cache_clear()
    yield
    ops.load.cache_clear()


def dense_method():
    from vllm_exl3 import linear
    from vllm_exl3.checkpoint import Layout
    from vllm_exl3.format import TensorShape

    layout = Layout({"layers.0.mlp.down_proj": TensorShape(128, 128, 4, Codebook.MCG)}, frozenset())
    return linear.method_for(layout, "layers.0.mlp.down_proj", torch.nn.Identity())


def experts_method():
    from types import SimpleNamespace

    from vllm_exl3 import moe
    from vllm_exl3.checkpoint import Layout
    from vllm_exl3.format import TensorShape

    name = "layers.1.mlp.experts.0.gate_proj"
    layout = Layout({name: TensorShape(128, 128, 4, Codebook.MCG)}, frozenset())
    return moe.method_for(layout, "layers.1.mlp.experts", SimpleNamespace())


def test_a_gpu_needs_the_kernels(as_on_a_gpu, monkeypatch, tmp_path):
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm_exl3 import ops

    monkeypatch.setattr(ops, "LIBRARY", tmp_path / "_kernels.so")
    with set_current_vllm_config(VllmConfig()), pytest.raises(Exl3LoadError, match=r"_kernels\.so: is not there.*pip"):
        experts_method().create_weights(None, 1, 128, 128, torch.bfloat16)


def test_a_gpu_needs_exllamav3(as_on_a_gpu, monkeypatch):
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm_exl3 import few_rows

    monkeypatch.setattr(few_rows, "EXTENSION", "exllamav3_ext_that_is_not_there")
    few_rows.extension.cache_clear()
    with set_current_vllm_config(VllmConfig()), pytest.raises(Exl3LoadError, match=r"install exllamav3 1\.6\.5"):
        dense_method().create_weights(None, 128, [128], 128, 128, torch.bfloat16)


# The draft layer


def loaded_by_draft(weights):
    from vllm_exl3 import glm5_next

    arrived = {}

    def original(model, weights):
        arrived.update(weights)
        return set(arrived)

    return glm5_next.mtp_load_weights(original)(None, iter(weights)), arrived


def test_the_draft_takes_a_decoded_eh_proj():
    from safetensors.torch import load_file

    vectors = load_file(Path(__file__).parents[1] / "data" / "exl3_vectors.safetensors")
    prefix, marker = "model.layers.8.eh_proj", torch.tensor(Codebook.MCG.marker_value, dtype=torch.int32)
    parts = {name: vectors[f"mcg.k4.{name}"] for name in ("trellis", "suh", "svh")} | {"mcg": marker}
    _, arrived = loaded_by_draft([*((f"{prefix}.{name}", tensor) for name, tensor in parts.items())])
    assert list(arrived) == [f"{prefix}.weight"]
    torch.testing.assert_close(arrived[f"{prefix}.weight"], vectors["mcg.k4.weight"].T.float(), rtol=0, atol=2e-3)


def test_the_draft_needs_no_embedding_of_its_own():
    loaded, _ = loaded_by_draft([("model.layers.8.enorm.weight", torch.ones(4))])
    assert loaded == {"model.layers.8.enorm.weight", "model.embed_tokens.weight"}


# Registration


def python(code: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"VLLM_PLUGINS": "none"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)


def test_importing_the_package_loads_neither_torch_nor_vllm():
    done = python("import sys, vllm_exl3; print([m for m in ('torch', 'vllm') if m in sys.modules])")
    assert done.stdout.strip() == "[]", done.stderr


def test_registering_twice_is_once_and_vllm_knows_the_method():
    done = python(
        "import vllm_exl3; vllm_exl3.register(); vllm_exl3.register()\n"
        "from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, get_quantization_config\n"
        "import sys\n"
        "print(QUANTIZATION_METHODS.count('exl3'), get_quantization_config('exl3').__module__, "
        "'vllm.models.glm5next' in sys.modules)"
    )
    assert done.stdout.split()[-3:] == ["1", "vllm_exl3.config", "False"], done.stderr


def test_another_exl3_plugin_is_refused():
    done = python(
        "from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS\n"
        "QUANTIZATION_METHODS.append('exl3')\nimport vllm_exl3; vllm_exl3.register()"
    )
    assert "RuntimeError: vLLM already has a quantization method named exl3" in done.stderr
