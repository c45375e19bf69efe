"""Trains the local model's indexer to select what its sparse attention reads; all else stays as it is.

    PYTHONPATH=overlay python -m tools.local_model.train_indexer --model models/local

The model is trained on contexts that the indexer reads whole, so that training leaves the indexer random. Beyond
`index_topk` tokens a random one leaves out what an answer needs, and rounding decides what. As DeepSeek-V3.2 does, the
indexer learns the attention's own distribution over pools (cross-entropy), here from long streams of conversations.
Five minutes on two quiet CPU cores; the same seed gives the same indexer on the same machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import nn

from tools.local_model.checkpoint import INDEX
from tools.local_model.corpus import encode, held_out_samples, training_sample
from tools.local_model.reference import load_reference

FOREIGN_SHARE = 0.15  # of conversations, replaced by random tokens: nobody's text is only what the model knows
MASS = 0.05  # a query that loses more of its attention than this is one that the selection harms


class Found(Exception):
    """The hidden states are there: nothing behind them need be computed."""


@dataclass
class Context:
    """A long stream as the attention layer sees it."""

    hidden: torch.Tensor  # [tokens, hidden size], the layer's normalised input
    residual: torch.Tensor  # [tokens, q_lora_rank], the normalised query residual
    queries: torch.Tensor  # [tokens, heads, 256]
    keys: torch.Tensor  # [heads, tokens, 256]

    @property
    def tokens(self) -> int:
        return len(self.hidden)


def stream(tokenizer: Tokenizer, samples, choose: random.Random, length: int) -> list[int]:
    """`length` tokens of conversations one after the other, some of them random tokens."""
    ids, vocabulary = [], tokenizer.get_vocab_size()
    while len(ids) < length:
        piece = encode(next(samples), tokenizer)[0]
        ids += [choose.randrange(vocabulary) for _ in piece] if choose.random() < FOREIGN_SHARE else piece
    return ids[:length]


@torch.no_grad()
def read_context(model: nn.Module, attention: nn.Module, ids: list[int]) -> Context:
    """What the layer before the selection sees of these tokens; layers behind it are not computed."""

    def stop(_module, args, kwargs):
        raise Found(kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])

    handle = attention.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        model(input_ids=torch.tensor([ids]), use_cache=False)
    except Found as found:
        hidden = found.args[0]
    finally:
        handle.remove()
    tokens = len(ids)
    residual = attention.q_a_layernorm(attention.q_a_proj(hidden))
    queries = attention.q_b_proj(residual).view(tokens, -1, attention.qk_head_dim)
    latent, rope = attention.kv_a_proj_with_mqa(hidden).split([attention.kv_lora_rank, attention.qk_rope_head_dim], -1)
    latent = attention.kv_a_layernorm(latent).view(1, 1, tokens, -1)
    keys, _ = attention.expand_kv(latent, rope.view(1, 1, tokens, -1))
    return Context(hidden[0], residual[0], queries, keys[0])


def attention_on_pools(attention: nn.Module, context: Context, at: torch.Tensor, pool: int) -> torch.Tensor:
    """Attention of queries at positions `at` [n] on each whole pool they may see, mean of the heads: [n, pools]."""
    logits = torch.einsum("nhd,hsd->nhs", context.queries[at], context.keys) * attention.scaling
    seen = torch.arange(context.tokens) <= at[:, None]
    weights = logits.masked_fill(~seen[:, None], float("-inf")).softmax(-1)
    pools = context.tokens // pool
    on_pools = weights[..., : pools * pool].unflatten(-1, (pools, pool)).sum(-1).mean(1)
    return on_pools.masked_fill(~visible(at, pools, pool), 0)


def visible(at: torch.Tensor, pools: int, pool: int) -> torch.Tensor:
    """[n, pools]: whether a query at a position sees all of a pool."""
    return torch.arange(1, pools + 1) * pool <= at[:, None] + 1


def index_scores(indexer: nn.Module, context: Context, at: torch.Tensor) -> torch.Tensor:
    """transformers' scores, with gradients: [n, pools], -inf where a query does not see all of a pool."""
    pool, pools = indexer.index_kpool, context.tokens // indexer.index_kpool
    hidden = context.hidden[: pools * pool]
    keys = indexer.k_norm(indexer.wk(hidden)).unflatten(0, (pools, pool))
    gates = F.linear(hidden, indexer.index_kpool_compress_gate).unflatten(0, (pools, pool))
    pooled = ((gates + indexer.index_kpool_compress_ape).softmax(1) * keys).sum(1)
    queries = indexer.wq_b(context.residual[at]).unflatten(-1, (indexer.n_heads, indexer.head_dim))
    scores = F.relu(torch.einsum("nhd,pd->nhp", queries, pooled) * indexer.softmax_scale)
    weights = indexer.weights_proj(context.hidden[at]) * indexer.n_heads**-0.5
    mixed = torch.einsum("nh,nhp->np", weights, scores)
    return mixed.masked_fill(~visible(at, pools, pool), float("-inf"))


def divergence(attention: nn.Module, context: Context, at: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the indexer's distribution over pools against the attention's: what training lowers."""
    indexer = attention.indexer
    wanted = attention_on_pools(attention, context, at, indexer.index_kpool)
    wanted = wanted / wanted.sum(-1, keepdim=True).clamp_min(1e-6)
    scores = index_scores(indexer, context, at).log_softmax(-1)
    return -(wanted * scores.masked_fill(wanted == 0, 0)).sum(-1).mean()


@torch.no_grad()
def lost_mass(attention: nn.Module, contexts: list[Context], stride: int = 7) -> tuple[float, float, int]:
    """(mean attention that the selection leaves out, share of queries that lose more than MASS, queries)."""
    indexer, lost = attention.indexer, []
    selected = indexer.index_topk // indexer.index_kpool
    for context in contexts:
        for at in torch.arange(indexer.index_topk, context.tokens, stride).split(128):
            mass = attention_on_pools(attention, context, at, indexer.index_kpool)
            order = index_scores(indexer, context, at).argsort(-1, descending=True)
            lost.append(mass.gather(-1, order)[:, selected:].sum(-1))
    lost = torch.cat(lost)
    return float(lost.mean()), float((lost > MASS).float().mean()), len(lost)


def train(attention: nn.Module, contexts: list[Context], args, log) -> None:
    leaves = [parameter.requires_grad_(True) for parameter in attention.indexer.parameters()]
    optimizer = torch.optim.AdamW(leaves, lr=args.peak, betas=(0.9, 0.98), weight_decay=0.01)
    generator = torch.Generator().manual_seed(args.seed)
    begin = time.monotonic()
    for step in range(1, args.steps + 1):
        context = contexts[int(torch.randint(len(contexts), (1,), generator=generator))]
        at = torch.randint(256, context.tokens, (args.queries,), generator=generator)
        loss = divergence(attention, context, at)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(leaves, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = args.peak * min(1, step / 50, 2 * (1 - step / (args.steps + 1)))
        optimizer.step()
        if step % 100 == 0:
            log(step=step, seconds=round(time.monotonic() - begin, 1), loss=round(float(loss.detach()), 4))
    for leaf in leaves:
        leaf.requires_grad_(False)


def store(path: Path, layer: int, indexer: nn.Module) -> None:
    """Write the indexer's parameters, in the checkpoint's types, in place of its own; no other file changes."""
    prefix = f"model.layers.{layer}.self_attn.indexer."
    trained = {prefix + name: parameter.detach() for name, parameter in indexer.named_parameters()}
    weight_map = json.loads((path / INDEX).read_text())["weight_map"]
    for file in sorted({path / weight_map[name] for name in trained}):
        tensors = load_file(file)
        for name in trained.keys() & tensors.keys():
            tensors[name] = trained[name].to(tensors[name].dtype).contiguous()
        new = file.with_suffix(".new")  # so that an interruption leaves the old file whole
        save_file(tensors, new, metadata={"format": "pt"})
        os.replace(new, file)


def sparse_layer(model: nn.Module) -> tuple[int, nn.Module]:
    found = [(i, layer.self_attn) for i, layer in enumerate(model.layers) if hasattr(layer.self_attn, "indexer")]
    if len(found) != 1:
        raise SystemExit(f"the model has {len(found)} layers with an indexer; this trains the one of the local model")
    return found[0]


def say(when: str, found: tuple[float, float, int]) -> None:
    print(f"{when}: {found[0]:.2%} of the attention left out, {found[1]:.2%} of {found[2]} queries harmed", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/local"), help="checkpoint, changed in place")
    parser.add_argument("--measure", action="store_true", help="change nothing, only measure")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--contexts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=4000, help="of a context to learn from")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--queries", type=int, default=128, help="of a step")
    parser.add_argument("--peak", type=float, default=3e-3)
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    model, _ = load_reference(args.model)
    model.requires_grad_(False)
    layer, attention = sparse_layer(model)
    choose = random.Random(args.seed)
    learnt = iter(lambda: training_sample(choose), None)
    samples = held_out_samples()
    unseen = iter(lambda: choose.choice(samples), None)
    tests = [read_context(model, attention, stream(tokenizer, unseen, choose, n)) for n in (3000, 4500, 9000)]
    say("before", lost_mass(attention, tests))
    if args.measure:
        return
    contexts = []
    for number in range(args.contexts):
        contexts.append(read_context(model, attention, stream(tokenizer, learnt, choose, args.tokens)))
        print(f"read {number + 1} of {args.contexts} contexts", flush=True)
    train(attention, contexts, args, lambda **fields: print(json.dumps(fields), flush=True))
    store(args.model, layer, attention.indexer)
    model, _ = load_reference(args.model)
    _, attention = sparse_layer(model.requires_grad_(False))
    say("after", lost_mass(attention, tests))


if __name__ == "__main__":
    main()
