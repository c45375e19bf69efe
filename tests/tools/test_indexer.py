"""The local model's indexer: scores as of transformers, stored alone, trained on the attention, leaves out little."""

import copy
import random
import shutil
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tools.local_model import train_indexer
from tools.local_model.corpus import held_out_samples

pytest.importorskip("transformers")
POOL = 4
CLEAR = 1e-4  # scores of two pools that differ by more are in the same order however a machine sums


@pytest.fixture(scope="module")
def contexts(reference):
    """By length: shorter than what the indexer reads whole, no multiple of a pool, and one it must select from."""
    model, _, tokenizer = reference
    _, attention = train_indexer.sparse_layer(model)
    choose, samples = random.Random(0), held_out_samples()
    ids = train_indexer.stream(tokenizer, iter(lambda: choose.choice(samples), None), choose, 2600)
    return {length: train_indexer.read_context(model, attention, ids[:length]) for length in (603, 2600)}


@pytest.fixture
def attention(reference):
    """The shipped sparse attention, for this test alone."""
    return copy.deepcopy(train_indexer.sparse_layer(reference[0])[1]).requires_grad_(False)


def randomise(indexer) -> None:
    generator = torch.Generator().manual_seed(0)
    for parameter in indexer.parameters():
        parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))


# Scores and weights


@torch.no_grad()
def wrongly_selected(indexer, selecting, context) -> tuple[int, int]:
    """(clear queries, those of them for which transformers with `selecting` takes other tokens than our scores say)."""
    every = torch.arange(context.tokens)
    best = indexer.index_topk // POOL
    scores, pools = train_indexer.index_scores(indexer, context, every).sort(-1, descending=True)
    is_clear = ~((scores[:, best - 1] - scores[:, best]) <= CLEAR)  # also where fewer pools are seen: inf less inf
    mask = torch.ones(1, context.tokens, dtype=torch.bool)
    taken = selecting(context.hidden[None], context.residual[None], mask, None)[0]
    wrong = 0
    for at in every[is_clear].tolist():
        whole = [pool for pool, score in zip(pools[at, :best].tolist(), scores[at], strict=False) if score.isfinite()]
        tail = range((at + 1) // POOL * POOL, at + 1)
        wanted = {POOL * pool + i for pool in whole for i in range(POOL)} | set(tail)
        wrong += set(taken[at].tolist()) - {-1} != wanted
    return int(is_clear.sum()), wrong


def test_scores_select_what_transformers_selects(attention, contexts):
    context, indexer = contexts[603], attention.indexer
    indexer.index_topk = 64
    clear, wrong = wrongly_selected(indexer, indexer, context)
    assert clear > 0.9 * context.tokens
    assert wrong == 0


@pytest.mark.parametrize("damaged", ["index_kpool_compress_ape", "index_kpool_compress_gate", "k_norm.bias"])
def test_the_comparison_of_selections_notices_a_lost_term(attention, contexts, damaged):
    indexer = attention.indexer
    indexer.index_topk = 64
    other = copy.deepcopy(indexer)
    other.get_parameter(damaged).zero_()
    clear, wrong = wrongly_selected(indexer, other, contexts[603])
    assert wrong > 0.2 * clear


@pytest.mark.parametrize("scale", [1, 1.02])
def test_attention_on_pools_is_transformers_own_and_one_with_the_tail(attention, contexts, scale):
    context = contexts[603]
    mask = torch.ones(1, context.tokens, dtype=torch.bool)
    weights = attention(context.hidden[None], mask)[1][0].mean(0)  # of all tokens: the context is read whole
    at = torch.tensor([0, 2, 3, 4, 130, 255, 256, 600, 602])
    attention.scaling *= scale  # one that is not 1 must be noticed
    found = train_indexer.attention_on_pools(attention, context, at, POOL)
    wanted, tails = torch.zeros_like(found), torch.zeros(len(at))
    for row, position in enumerate(at.tolist()):
        whole = (position + 1) // POOL
        wanted[row, :whole] = weights[position, : whole * POOL].view(-1, POOL).sum(-1)
        tails[row] = weights[position, whole * POOL : position + 1].sum()
    assert torch.allclose(found, wanted, atol=1e-6) == (scale == 1)
    assert torch.allclose(found.sum(-1) + tails, torch.ones(len(at)), atol=1e-5) == (scale == 1)


# Training


def test_training_lowers_the_loss_of_the_indexer_and_changes_nothing_else(attention, contexts):
    context, at = contexts[603], torch.arange(256, 603, 5)
    randomise(attention.indexer)
    still, before = copy.deepcopy(attention), copy.deepcopy(attention.state_dict())
    order = {"seed": 0, "steps": 100, "queries": 32}
    said = []
    train_indexer.train(attention, [context], Namespace(**order, peak=3e-3), lambda **fields: said.append(fields))
    train_indexer.train(still, [context], Namespace(**order, peak=0.0), lambda **fields: None)
    trained, untrained = (float(train_indexer.divergence(one, context, at)) for one in (attention, still))
    assert trained < 0.8 * untrained
    assert [fields["step"] for fields in said] == [100]
    changed = {name for name, tensor in attention.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {f"indexer.{name}" for name, _ in attention.indexer.named_parameters()}
    assert not any(parameter.requires_grad for parameter in attention.parameters())


# Files


def changed_tensors(old_model: Path, new_model: Path) -> dict[str, torch.Tensor]:
    """The new ones, of files that differ: these must be safetensors with the same names and types."""
    changed = {}
    for file in old_model.iterdir():
        if (new_model / file.name).read_bytes() != file.read_bytes():
            old, new = load_file(file), load_file(new_model / file.name)
            assert {name: tensor.dtype for name, tensor in old.items()} == {name: new[name].dtype for name in new}
            changed |= {name: new[name] for name in old if not torch.equal(old[name], new[name])}
    return changed


def test_store_changes_the_tensors_of_the_indexer_only(attention, local_model, tmp_path):
    path = tmp_path / "model"
    shutil.copytree(local_model, path)
    randomise(attention.indexer)
    train_indexer.store(path, 3, attention.indexer)
    changed = changed_tensors(local_model, path)
    prefix = "model.layers.3.self_attn.indexer."
    wanted = {prefix + name: parameter for name, parameter in attention.indexer.named_parameters()}
    assert changed.keys() == wanted.keys()
    assert all(torch.equal(changed[name], wanted[name].to(changed[name].dtype)) for name in wanted)
    assert {file.name for file in path.iterdir()} == {file.name for file in local_model.iterdir()}


def test_the_comparison_of_files_notices_one_value(local_model, tmp_path):
    path, file = tmp_path / "model", "model-00002-of-00002.safetensors"
    shutil.copytree(local_model, path)
    tensors = load_file(path / file)
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, path / file, metadata={"format": "pt"})
    assert changed_tensors(local_model, path).keys() == {"model.norm.weight"}


# The shipped model


def test_the_shipped_indexer_leaves_out_little_and_a_random_one_much(attention, contexts):
    left_out, harmed, queries = train_indexer.lost_mass(attention, [contexts[2600]])
    assert queries == len(range(2048, 2600, 7))
    assert left_out < 0.01
    assert harmed < 0.02
    randomise(attention.indexer)
    left_out, harmed, _ = train_indexer.lost_mass(attention, [contexts[2600]])
    assert left_out > 0.05
    assert harmed > 0.2
