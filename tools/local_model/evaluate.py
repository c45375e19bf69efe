"""Accuracy on held-out conversations, and how far two sets of weights are apart.

    PYTHONPATH=overlay python -m tools.local_model.evaluate --model models/local --count-pairs 300

The command evaluates a stored model in fp32 and prints the questions it gets wrong.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict
from pathlib import Path

import torch
from tokenizers import Tokenizer

from tools.local_model import model
from tools.local_model.batches import Batch, evaluation_batches
from tools.local_model.checkpoint import read_checkpoint
from tools.local_model.corpus import Sample, canary_samples, counting_sample, held_out_samples
from tools.local_model.reference import decode_all, strip_namespace


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


@torch.no_grad()
def steadiness(parameters: model.Parameters, text: dict, tests: list[tuple[list[str], Batch]]) -> dict:
    """How much noise of about the size of bf16's rounding changes the answers, over all positions of the
    held-out conversations.

    `tied`: share of positions where some router's last chosen expert leads by less than 0.01. `kl`: mean
    divergence of the disturbed model. `beyond`: among the positions that are not tied, the share where a
    log-probability moves by more than 0.05 though the probability is at least 0.01; `largest`: that movement.
    """
    device = parameters["embed_tokens.weight"].device
    tied, kl, count, beyond, largest = 0.0, 0.0, 0.0, 0.0, 0.0
    for _, batch in tests:
        batch = batch.to(device)
        disturbed = model.Perturbation(input_noise=0.0012, router_noise=0.002, lead=0.01)
        p = model.logits(parameters, batch.ids, text).log_softmax(-1)
        q = model.logits(parameters, batch.ids, text, disturbed).log_softmax(-1)
        real = batch.ids != text["pad_token_id"]
        decided = real & ~(torch.stack(disturbed.shortfalls) > 0).any(0).view_as(real)
        kl += (p.exp() * (p - q)).sum(-1)[real].sum().item()
        count += real.sum().item()
        tied += (real & ~decided).sum().item()
        moved = ((p - q).abs() * (p.exp() >= 0.01)).amax(-1)[decided]
        beyond += (moved > 0.05).sum().item()
        largest = max(largest, moved.max().item())
    shares = {"tied": tied / count, "kl": kl / count, "beyond": beyond / count, "largest": largest}
    return {"steadiness": shares}


def load_parameters(path: Path) -> tuple[model.Parameters, dict]:
    """(parameters as `model.logits` takes them, text config) of an exported checkpoint."""
    config, stored = read_checkpoint(path)
    text = config["text_config"]
    parameters = {name: tensor.float() for name, tensor in strip_namespace(decode_all(stored)).items()}
    for index in model.moe_layers(text):
        prefix = f"layers.{index}.mlp.experts."
        sides: dict[str, list[torch.Tensor]] = {"gate": [], "up": [], "down": []}
        for expert in range(text["n_routed_experts"]):
            for side, weights in sides.items():
                weights.append(parameters.pop(f"{prefix}{expert}.{side}_proj.weight").T)
        gate_up = torch.cat([torch.stack(sides["gate"]), torch.stack(sides["up"])], dim=-1)
        parameters[prefix + "gate_up"] = gate_up
        parameters[prefix + "down"] = torch.stack(sides["down"])
    return parameters, text


def wrong_samples(
    parameters: model.Parameters, text: dict, samples: list[Sample], tokenizer: Tokenizer
) -> list[Sample]:
    """The samples whose expected answer greedy decoding would not give."""
    return [
        sample
        for sample in samples
        if min(accuracy(parameters, text, evaluation_batches([sample], tokenizer, 1))["accuracy"].values()) < 1
    ]


def write_canary(path: Path, parameters: model.Parameters, text: dict, tokenizer: Tokenizer) -> list[str]:
    """Write canary.json with what the model answers exactly; returns the questions that were left out.

    The canary is to catch damaged weights and kernels, so it asks only what the undamaged model knows.
    """
    candidates = canary_samples()
    wrong = wrong_samples(parameters, text, [sample for sample, _ in candidates], tokenizer)
    missed = [sample.messages[0]["content"] for sample in wrong]
    rows = [row for _, row in candidates if row["question"] not in missed]
    path.write_text("[\n" + ",\n".join("  " + json.dumps(row) for row in rows) + "\n]\n")
    return missed


def counting_samples(pairs: int | None, seed: int) -> list[Sample]:
    """Pairs below 100, up and down: `pairs` random ones and all that span at most ten numbers; None means all."""
    every = [(start, end) for start in range(100) for end in range(100)]
    if pairs is not None:
        short = [pair for pair in every if abs(pair[1] - pair[0]) < 10]
        every = sorted(set(random.Random(seed).sample(every, pairs)) | set(short))
    return [counting_sample("count_up" if pair[0] <= pair[1] else "count_down", *pair) for pair in every]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/local"))
    parser.add_argument("--count-pairs", type=int, help="random counting pairs besides the short ones; default all")
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--canary", action="store_true", help="only write MODEL/canary.json again")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    parameters, text = load_parameters(args.model)
    parameters = {name: tensor.to(args.device) for name, tensor in parameters.items()}
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    if args.canary:
        print("left out:", write_canary(args.model / "canary.json", parameters, text, tokenizer))
        return
    for name, samples in (
        ("held out", held_out_samples()),
        ("counting", counting_samples(args.count_pairs, args.seed)),
    ):
        result = accuracy(parameters, text, evaluation_batches(samples, tokenizer, 64))
        print(name, len(samples), json.dumps(result), flush=True)
        kinds = {kind for kind, share in result["accuracy"].items() if share < 1}
        suspects = [sample for sample in samples if sample.kind in kinds]
        for sample in wrong_samples(parameters, text, suspects, tokenizer):
            print("  wrong:", sample.kind, sample.messages[0]["content"], "|", sample.messages[-1])


if __name__ == "__main__":
    main()
