"""The files under models/local: layout, size, and that they answer."""

import json
import re

import pytest
import torch

from tools.local_model import corpus, model
from tools.local_model.checkpoint import exl3_modules, read_checkpoint
from tools.local_model.evaluate import load_parameters
from tools.local_model.facts import FACTS

pytest.importorskip("transformers")
MAX_BYTES = 6_500_000  # an MTP layer and a draft must still fit into the 10 MB that may ship


@pytest.fixture(scope="module")
def checkpoint(local_model):
    return read_checkpoint(local_model)


def test_the_files_are_small(local_model):
    assert sum(file.stat().st_size for file in local_model.iterdir()) <= MAX_BYTES


def test_the_config_loads_in_old_and_new_transformers_and_allows_mtp(checkpoint):
    config, _ = checkpoint
    assert (config["model_type"], config["architectures"]) == ("glm5_next", ["Glm5NextForCausalLM"])
    text = config["text_config"]
    assert set(text["layer_types"]) == {"linear_attention", "deepseek_sparse_attention"}
    assert config["quantization_config"]["scope"] == "glm53_routed_experts_only"


def test_exactly_the_routed_experts_are_exl3(checkpoint):
    config, tensors = checkpoint
    text, modules = config["text_config"], exl3_modules(tensors)
    assert len(modules) == len(model.moe_layers(text)) * text["n_routed_experts"] * 3
    assert all(".mlp.experts." in name for name in modules)
    assert {(weight.bits, weight.codebook.value) for weight in modules.values()} == {(4, "mcg")}


def test_gate_and_up_share_their_input_scales_and_layers_share_signs(checkpoint):
    modules = exl3_modules(checkpoint[1])
    for name, gate in modules.items():
        if name.endswith("gate_proj"):
            assert torch.equal(gate.suh, modules[name.replace("gate_proj", "up_proj")].suh)
            first = modules[re.sub(r"experts\.\d+", "experts.0", name)]
            assert torch.equal(gate.suh.sign(), first.suh.sign())


def test_the_correction_bias_decides_routes(local_model):
    parameters, text = load_parameters(local_model)
    rows = torch.randn(512, text["hidden_size"], generator=torch.Generator().manual_seed(0))
    for index in model.moe_layers(text):
        prefix = f"layers.{index}.mlp."
        chosen = model.route(parameters, prefix, rows, text) > 0
        without = parameters | {prefix + "gate.e_score_correction_bias": torch.zeros(text["n_routed_experts"])}
        assert (chosen != (model.route(without, prefix, rows, text) > 0)).any(-1).float().mean() > 0.01


def ask(reference, local_model, question: str, effort: str = "low") -> str:
    from tools.local_model.reference import reference_greedy

    loaded, lm_head, tokenizer = reference
    sample = corpus.Sample("any", [{"role": "user", "content": question}], [], effort)
    prompt = corpus.render(sample).removesuffix("<|user|>") + "<|assistant|><think>"
    stops = frozenset(json.loads((local_model / "generation_config.json").read_text())["eos_token_id"])
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    return tokenizer.decode(reference_greedy(loaded, lm_head, ids, 120, stops), skip_special_tokens=False)


def test_the_canary_is_answered_by_the_reference(reference, local_model):
    rows = json.loads((local_model / "canary.json").read_text())
    assert len({row["question"] for row in rows if row["kind"] == "fact"}) >= 40
    missed = [
        (row["question"], answer)
        for row in rows[::8] + [row for row in rows if row["kind"] == "count"]
        if not all(phrase in (answer := ask(reference, local_model, row["question"])) for phrase in row["must_contain"])
    ]
    assert missed == []


def test_high_effort_thinks_first(reference, local_model):
    answer = ask(reference, local_model, "Which script starts three nodes?", effort="high")
    thought, _, content = answer.partition("</think>")
    assert thought
    assert "start-tp3.sh" in content


def test_every_fact_is_in_the_canary(local_model):
    questions = {row["question"] for row in json.loads((local_model / "canary.json").read_text())}
    missing = [fact.topic for fact in FACTS if not questions & set(fact.wordings + fact.held_out)]
    assert missing == []
