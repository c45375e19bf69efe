"""Accuracy on held-out conversations, and how far two sets of weights are apart."""

from __future__ import annotations

from collections import defaultdict

import torch

from tools.local_model import model
from tools.local_model.batches import Batch


@torch.no_grad()
def accuracy(parameters: model.Parameters, text: dict, tests: list[tuple[list[str], Batch]]) -> dict:
    """Share of conversations, by kind, whose every produced token is the most likely one.

    That equals the share for which greedy decoding gives exactly the expected answer.
    """
    right: dict[str, int] = defaultdict(int)
    count: dict[str, int] = defaultdict(int)
    device = parameters["embed_tokens.weight"].device
    for kinds, batch in tests:
        batch = batch.to(device)
        best = model.logits(parameters, batch.ids, text)[:, :-1].argmax(-1)
        wrong = (best != batch.ids[:, 1:]) & batch.produced[:, :-1]
        for kind, failed in zip(kinds, wrong.any(-1).tolist(), strict=True):
            count[kind] += 1
            right[kind] += not failed
    return {"accuracy": {kind: round(right[kind] / count[kind], 4) for kind in sorted(count)}}


@torch.no_grad()
def divergence(
    reference: model.Parameters, other: model.Parameters, text: dict, tests: list[tuple[list[str], Batch]]
) -> dict:
    """Mean KL(reference || other) per position and top-1 agreement: over all positions of the held-out
    conversations, and over the produced ones alone."""
    sums = torch.zeros(6, dtype=torch.float64)
    device = reference["embed_tokens.weight"].device
    for _, batch in tests:
        batch = batch.to(device)
        p = model.logits(reference, batch.ids, text)[:, :-1].log_softmax(-1)
        q = model.logits(other, batch.ids, text)[:, :-1].log_softmax(-1)
        kl, same = (p.exp() * (p - q)).sum(-1), p.argmax(-1) == q.argmax(-1)
        real = batch.ids[:, 1:] != text["pad_token_id"]
        produced = batch.produced[:, :-1]
        parts = [kl[real].sum(), same[real].sum(), real.sum()]
        parts += [kl[produced].sum(), same[produced].sum(), produced.sum()]
        sums += torch.stack([part.double() for part in parts]).cpu()
    kl_all, same_all, count_all, kl_made, same_made, count_made = sums.tolist()
    return {
        "kl": kl_all / count_all,
        "top1_agreement": same_all / count_all,
        "kl_produced": kl_made / count_made,
        "top1_agreement_produced": same_made / count_made,
    }
