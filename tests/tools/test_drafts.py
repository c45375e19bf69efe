"""The local model's drafts: their arithmetic, how they learn, what is measured, and the files."""

import json
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from vllm_exl3.checkpoint import read_layout

from tools.local_model import dflash2, draft_files, model, mtp, train_drafts
from tools.local_model.checkpoint import CheckpointError, read_checkpoint
from tools.local_model.corpus import held_out_samples
from tools.local_model.own_text import OwnText, acceptance, measured_samples, own_text


@pytest.fixture(scope="module")
def target(local_model):
    return train_drafts.load_target(local_model, "cpu")


@pytest.fixture(scope="session")
def drafts(local_model):
    return local_model.parent / "local-drafts"


@pytest.fixture(scope="module")
def answered(target, local_model) -> list[OwnText]:
    """Six questions of those that are measured, of every length up to forty tokens."""
    tokenizer = Tokenizer.from_file(str(local_model / "tokenizer.json"))
    short = [s for s in measured_samples() if len(s.messages[-1]["content"] or "") < 120 and not s.tools]
    return list(own_text(target.parameters, target.text, short[::6][:6], tokenizer))


@pytest.fixture(scope="module")
def spoken(target, local_model) -> OwnText:
    """Two short conversations with the model's states."""
    tokenizer = Tokenizer.from_file(str(local_model / "tokenizer.json"))
    samples = [sample for sample in held_out_samples() if sample.kind in ("sum", "greeting")][::29]
    (part,) = own_text(target.parameters, target.text, samples[:2], tokenizer)
    return part


def test_the_states_are_those_that_the_model_speaks_from(target, spoken):
    part = spoken
    logits = model.logits(target.parameters, part.ids, target.text)
    again = F.linear(target.final(part), target.head)
    assert (again - logits).norm() / logits.norm() < 2e-3  # kept in fp16
    assert part.said.any()
    said = part.said[:, 1:]
    assert (logits.argmax(-1)[:, :-1][said] == part.ids[:, 1:][said]).all()


# MTP


def layer_one_by_one(p, text, embedding, ids: list[int], final, anchor: int, tokens: list[int]):
    """The layer as an engine runs it: the whole prompt, then one token after the other, with plain attention."""
    inputs = [embedding[i] for i in ids[1 : anchor + 1]]
    inputs[0] = torch.zeros_like(inputs[0])
    states, outputs = [final[i] for i in range(anchor)], []
    for token in [None, *tokens]:
        if token is not None:
            inputs.append(embedding[token])
            states.append(outputs[-1])
        eps = text["rms_norm_eps"]
        parts = [
            model.rms_norm(torch.stack(x), p[f"{n}.weight"], eps) for x, n in ((inputs, "enorm"), (states, "hnorm"))
        ]
        x = F.linear(torch.cat(parts, -1), p["eh_proj.weight"])[None]
        x = x + model.mla(p, "self_attn.", model.rms_norm(x, p["input_layernorm.weight"], eps), text)
        x = x + model.moe(p, "mlp.", model.rms_norm(x, p["post_attention_layernorm.weight"], eps), text)
        outputs.append(model.rms_norm(x, p["shared_head.norm.weight"], eps)[0, -1])
    return outputs


@pytest.mark.parametrize("fault", [None, "scaled-norm", "other-order"])
def test_the_layer_drafts_as_an_engine_runs_it(target, spoken, fault):
    part, text = spoken, target.text
    p = mtp.initial_parameters(target.parameters, text, seed=1)
    ids, final = part.ids[:1], target.final(part)[:1]
    anchor, tokens = 17, [5, 77]
    embedding = target.embedding
    expected = layer_one_by_one(p, text, embedding, ids[0].tolist(), final[0], anchor, tokens)
    if fault == "scaled-norm":
        p = p | {"enorm.weight": 1.1 * p["enorm.weight"]}
    if fault == "other-order":
        tokens = tokens[::-1]
    given = torch.tensor(tokens).view(2, 1, 1)
    got = mtp.drafted_states(p, text, embedding, ids, final, torch.tensor([[anchor]]), 3, lambda i, _: given[i])
    errors = [float((a[0, 0] - b).norm() / b.norm()) for a, b in zip(got, expected, strict=True)]
    assert (max(errors) < 1e-4) is (fault is None), errors


def test_the_layers_experts_are_not_trained(target):
    names = [
        name for name in mtp.initial_parameters(target.parameters, target.text, seed=0) if not mtp.is_trained(name)
    ]
    assert {"mlp.experts.gate_up", "mlp.experts.down"} <= set(names)
    assert all(name.startswith(("mlp.experts.", "self_attn.indexer.", "mlp.gate.e_score")) for name in names)


# DFlash2 (against vLLM's class: tests/plugin/test_dflash2_draft.py)


def test_a_block_sees_its_context_and_all_of_itself(target, spoken):
    config = dflash2.draft_config(target.text)
    p = dflash2.initial_parameters(config, seed=0)

    def states(taps: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return dflash2.block_states(p, config, target.embedding, ids, taps, torch.tensor([[20]] * len(ids)), k=7)

    before = states(spoken.taps, spoken.ids)
    ahead, behind, anchor = spoken.taps.clone(), spoken.taps.clone(), spoken.ids.clone()
    ahead[:, 20:] += 1  # the anchor's own state is not known yet
    behind[:, 19] += 1
    anchor[:, 20] += 1
    assert torch.equal(states(ahead, spoken.ids), before)
    for changed in (states(behind, spoken.ids), states(spoken.taps, anchor)):
        assert ((changed - before).abs().amax(-1) > 1e-4).all()  # non-causal: every position feels it


def test_the_window_ends_the_context(target):
    config = dflash2.draft_config(target.text, sliding_window=9)
    p = dflash2.initial_parameters(config, seed=0)
    ids = torch.zeros(1, 40, dtype=torch.long)
    taps = torch.randn(1, 40, 3, target.text["hidden_size"], generator=torch.Generator().manual_seed(0))

    def states(taps):
        return dflash2.block_states(p, config, target.embedding, ids, taps, torch.tensor([[30]]), k=7)

    far, near = taps.clone(), taps.clone()
    far[:, 21] += 1  # nine before the anchor: the anchor's window ends after it
    near[:, 22] += 1
    assert torch.equal(states(far), states(taps))
    assert not torch.equal(states(near), states(taps))


# Learning and measuring


def made_up_text(rows: int = 8, tokens: int = 24) -> OwnText:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 900, (rows, tokens), generator=generator)
    said = torch.zeros(rows, tokens, dtype=torch.bool)
    said[:, 10:20] = True
    return OwnText(ids, torch.randn(rows, tokens, 3, 128, generator=generator).half(), said)


@pytest.mark.parametrize("kind", [train_drafts.BlockDraft, train_drafts.LayerDraft])
def test_a_few_steps_learn_the_same_again(target, kind):
    text, args = made_up_text(rows=2), SimpleNamespace(
        seed=5, steps=6, minutes=99, rows=2, anchors=4, peak=2e-2, check_every=3, aim=2.0, device="cpu",
    )  # fmt: skip

    def learned() -> tuple[list[dict], dict]:
        log, draft = [], kind(target, seed=5)
        train_drafts.train(draft, [text], [text], args, lambda **fields: log.append(fields))
        return log, draft.parameters

    (log, one), (_, two) = learned(), learned()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert log[-1]["loss"] < log[0]["loss"]
    moved = {name for name, tensor in kind(target, seed=5).parameters.items() if not torch.equal(tensor, one[name])}
    frozen = set(one) - set(kind(target, seed=5).trained)
    assert moved and not moved & frozen


def test_nothing_is_learned_behind_the_end_of_what_the_model_says():
    text = made_up_text()
    part, anchors, labels, weights = train_drafts.training_rows(text, 7, 4, 16, torch.Generator().manual_seed(1))
    assert ((anchors >= 10) & (anchors < 20)).all()
    at = anchors.unsqueeze(-1) + torch.arange(1, 8)
    assert torch.equal(weights > 0, at < 20)
    row = torch.arange(len(part.ids)).view(-1, 1, 1)
    assert torch.equal(labels[at < 20], part.ids[row, at.clamp_max(23)][at < 20])


def perfect(part: OwnText, anchors: torch.Tensor) -> torch.Tensor:
    at = (anchors.unsqueeze(-1) + torch.arange(1, 4)).clamp_max(part.ids.shape[1] - 1)
    return part.ids[torch.arange(len(part.ids)).view(-1, 1, 1), at]


def wrong_at(position: int):
    def draft(part: OwnText, anchors: torch.Tensor) -> torch.Tensor:
        tokens = perfect(part, anchors)
        tokens[..., position] += 1
        return tokens

    return draft


def test_acceptance_walks_as_an_engine_does():
    text = [made_up_text(rows=2)]  # answers of ten tokens: the first one is the target's own
    whole = acceptance(text, perfect, k=3)
    # Anchors 0, 4 and 8: 3 and 3 accepted, then the one token that is left.
    assert (whole.steps, whole.drafted, whole.accepted_at.tolist()) == (6, 18, [6, 4, 4])
    never = acceptance(text, wrong_at(0), k=3)
    assert (never.steps, never.accepted_at.tolist(), never.share) == (18, [0, 0, 0], 0.0)
    second = acceptance(text, wrong_at(1), k=3)
    assert (second.steps, second.accepted_at.tolist()) == (10, [10, 0, 0])
    assert "10 of 30 drafted tokens accepted, 33.3%" in str(second)


# The shipped ones


@pytest.fixture(scope="module", params=[train_drafts.BlockDraft, train_drafts.LayerDraft], ids=["dflash2", "mtp"])
def shipped(request, target, drafts):
    draft = request.param(target, seed=0)
    draft.read(drafts / draft.name)
    return draft


def test_all_that_ships_is_within_ten_megabytes(local_model, drafts):
    files = [file for folder in (local_model, drafts) for file in folder.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= 10_000_000


def test_shipped_drafts_are_sometimes_right(shipped, answered):
    good = acceptance(answered, shipped.draft, shipped.k)
    assert 0.2 <= good.share <= 0.95  # few questions; report.json has all that are measured
    name = {"dflash2": "fc.weight", "mtp": "eh_proj.weight"}[shipped.name]
    whole = shipped.parameters
    shipped.parameters = whole | {name: whole[name].flip(1)}  # damage must show
    damaged = acceptance(answered, shipped.draft, shipped.k)
    shipped.parameters = whole
    assert damaged.share < 0.5 * good.share


def test_the_report_is_of_drafts_that_are_sometimes_right(drafts):
    report = json.loads((drafts / "report.json").read_text())
    assert set(report) == {"dflash2, 7 tokens", "mtp, 3 tokens", "mtp, 1 tokens"}
    least, most = train_drafts.ACCEPTED
    assert all(least <= found["accepted"] <= most for found in report.values())


def test_the_shipped_files_are_what_vllm_expects(local_model, drafts, target, tmp_path):
    config, parameters = draft_files.read_dflash2(drafts / "dflash2")
    assert config == dflash2.draft_config(target.text)
    assert {name: tuple(tensor.shape) for name, tensor in parameters.items()} == dflash2.draft_shapes(config)
    draft_files.join(tmp_path, local_model, drafts / "mtp")
    _, tensors = read_checkpoint(tmp_path)
    experts = [name for name in tensors if name.startswith("model.layers.3.mlp.experts.")]
    assert experts
    assert all(torch.equal(tensors[name.replace(".3.", ".4.", 1)], tensors[name]) for name in experts)
    layer = draft_files.read_layer(drafts / "mtp", target.text, target.parameters)
    expected = mtp.initial_parameters(target.parameters, target.text, seed=0)
    assert {n: t.shape for n, t in layer.items()} == {n: t.shape for n, t in expected.items()}


# Files


@pytest.fixture
def layer(local_model, target, tmp_path):
    parameters = mtp.initial_parameters(target.parameters, target.text, seed=0)
    draft_files.write_layer(tmp_path / "mtp", local_model, draft_files.rounded(parameters))
    return tmp_path / "mtp"


def test_the_layer_joins_the_model_as_a_draft_layer(local_model, layer, tmp_path):
    draft_files.join(tmp_path / "joined", local_model, layer)
    config, tensors = read_checkpoint(tmp_path / "joined")
    own_config, own = read_checkpoint(local_model)
    assert config["text_config"] == own_config["text_config"] | {"num_nextn_predict_layers": 1}
    assert all(torch.equal(tensors[name], tensor) for name, tensor in own.items())
    added = {name.removeprefix("model.layers.4."): tensor for name, tensor in tensors.items() if name not in own}
    last = {name.removeprefix("model.layers.3."): own[name] for name in own if name.startswith("model.layers.3.")}
    draft_only = {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"}
    assert set(added) == {name for name in last if ".hc_" not in f".{name}"} | draft_only
    assert all(added[name].dtype == last[name].dtype for name in set(added) - draft_only)
    experts = [name for name in last if name.startswith("mlp.experts.")]
    assert all(torch.equal(added[name], last[name]) for name in experts)
    assert read_layout(tmp_path / "joined").expert_ids("layers.4.mlp.experts") == set(range(8))


def test_a_layer_of_another_model_is_refused(local_model, layer, tmp_path):
    draft_files.join(tmp_path / "joined", local_model, layer)
    with pytest.raises(CheckpointError, match="has a draft layer already"):
        draft_files.join(tmp_path / "again", tmp_path / "joined", layer)
    other = tmp_path / "other"
    other.mkdir()
    config = json.loads((local_model / "config.json").read_text())
    config["text_config"]["num_hidden_layers"] = 5
    (other / "config.json").write_text(json.dumps(config))
    (other / draft_files.INDEX).write_text((local_model / draft_files.INDEX).read_text())
    with pytest.raises(CheckpointError, match=r"holds model\.layers\.4\..*expected only model\.layers\.5"):
        draft_files.join(tmp_path / "again", other, layer)
