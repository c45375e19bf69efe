"""Trains the drafts of the local model on what the frozen model says itself: a DFlash2 draft and an MTP layer.

    PYTHONPATH=overlay python -m tools.local_model.train_drafts --out models/local-drafts

Two CPU cores take about a quarter of an hour. The same seed gives the same drafts on the same machine.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from tools.local_model import dflash2, draft_files, model, mtp
from tools.local_model.corpus import training_sample
from tools.local_model.evaluate import load_parameters
from tools.local_model.own_text import Acceptance, OwnText, acceptance, final_state, measured_samples, own_text

BLOCK_DRAFTS, LAYER_DRAFTS = 7, 3  # tokens drafted at once by DFlash2, and one after the other by the MTP layer
SELECTOR_WEIGHT, WARMUP_STEPS = 1.0, 50
ACCEPTED = (0.3, 0.9)  # what drafts that are sometimes right may reach
MOST_AT_FIRST = 0.85  # stop here too: drafted alone, the first token must not be right too often
TESTED_AT_ONCE, CHECKS_EVERY = 8, 4  # held-out conversations; of these parts one in so many while it learns


@dataclass
class Target:
    """The frozen model as the drafts see it."""

    text: dict
    parameters: model.Parameters

    @property
    def embedding(self) -> torch.Tensor:
        return self.parameters["embed_tokens.weight"]

    @property
    def head(self) -> torch.Tensor:
        return self.parameters["lm_head.weight"]

    def final(self, part: OwnText) -> torch.Tensor:
        return final_state(self.parameters, part.taps[:, :, -1], self.text)


class BlockDraft:
    """DFlash2."""

    name, k = "dflash2", BLOCK_DRAFTS

    def __init__(self, target: Target, seed: int) -> None:
        self.target, self.config = target, dflash2.draft_config(target.text)
        parameters = dflash2.initial_parameters(self.config, seed)
        self.parameters = {name: tensor.to(target.head.device) for name, tensor in parameters.items()}
        self.trained = list(self.parameters)

    def read(self, path: Path) -> None:
        self.config, parameters = draft_files.read_dflash2(path)
        self.parameters = {name: tensor.to(self.target.head.device) for name, tensor in parameters.items()}

    def states(self, part: OwnText, anchors: torch.Tensor) -> torch.Tensor:
        return dflash2.block_states(
            self.parameters, self.config, self.target.embedding, part.ids, part.taps, anchors, self.k
        )

    def loss(self, part: OwnText, anchors: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        states = self.states(part, anchors)
        logits = F.linear(states, self.target.head)
        previous = torch.cat([part.ids.gather(1, anchors).unsqueeze(-1), labels[..., :-1]], -1)
        selected = logits + dflash2.edges(self.parameters, states, previous)
        return cross_entropy(logits, labels, weights) + SELECTOR_WEIGHT * cross_entropy(selected, labels, weights)

    def write(self, path: Path, model_path: Path) -> None:
        draft_files.write_dflash2(path, self.config, self.parameters)

    @torch.no_grad()
    def draft(self, part: OwnText, anchors: torch.Tensor) -> torch.Tensor:
        first = part.ids.gather(1, anchors)
        return dflash2.chosen_tokens(self.parameters, self.config, self.target.head, self.states(part, anchors), first)


class LayerDraft:
    """MTP."""

    name, k = "mtp", LAYER_DRAFTS

    def __init__(self, target: Target, seed: int) -> None:
        self.target = target
        self.parameters = mtp.initial_parameters(target.parameters, target.text, seed)
        self.trained = [name for name in self.parameters if mtp.is_trained(name)]

    def read(self, path: Path) -> None:
        parameters = draft_files.read_layer(path, self.target.text, self.target.parameters)
        self.parameters = {name: tensor.to(self.target.head.device) for name, tensor in parameters.items()}

    def states(self, part: OwnText, anchors: torch.Tensor, next_token):
        final = self.target.final(part)
        return mtp.drafted_states(
            self.parameters, self.target.text, self.target.embedding, part.ids, final, anchors, self.k, next_token
        )

    def loss(self, part: OwnText, anchors: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        states = torch.stack(list(self.states(part, anchors, lambda step, _: labels[..., step])), 2)
        return cross_entropy(F.linear(states, self.target.head), labels, weights)

    def write(self, path: Path, model_path: Path) -> None:
        draft_files.write_layer(path, model_path, self.parameters)

    @torch.no_grad()
    def draft(self, part: OwnText, anchors: torch.Tensor) -> torch.Tensor:
        best = lambda state: F.linear(state, self.target.head).argmax(-1)
        return torch.stack([best(state) for state in self.states(part, anchors, lambda _, state: best(state))], -1)


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    losses = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum().clamp_min(1)


def training_rows(part: OwnText, k: int, rows: int, anchors: int, generator: torch.Generator):
    """(some conversations, anchors [rows, n] among the model's own tokens, labels [rows, n, k], weights likewise)."""
    part = part.chosen(torch.randperm(len(part.ids), generator=generator)[:rows])
    chosen = torch.multinomial(part.said.float() + 1e-9, anchors, replacement=True, generator=generator)
    at = chosen.clamp_min(1).unsqueeze(-1) + torch.arange(k + 1)
    inside = at < part.ids.shape[1]
    at = at.clamp_max(part.ids.shape[1] - 1)
    row = torch.arange(len(at)).view(-1, 1, 1)
    # A draft behind a wrong one is thrown away: nothing is learned behind the end of what the model says.
    counts = (part.said[row, at] & inside).long().cumprod(-1)
    return part, at[..., 0], part.ids[row, at][..., 1:], counts[..., 1:].float()


def train(draft, data: list[OwnText], tests: list[OwnText], args, log) -> None:
    """Until held-out text accepts the share that is aimed at, or a limit is reached; the rate falls to nothing."""
    leaves = [draft.parameters[name].requires_grad_(True) for name in draft.trained]
    optimizer = torch.optim.AdamW(
        leaves, lr=args.peak, betas=(0.9, 0.98), weight_decay=0.01, fused=args.device != "cpu"
    )
    generator = torch.Generator().manual_seed(args.seed)
    begin, step, losses = time.monotonic(), 0, []
    while (progress := max(step / args.steps, (time.monotonic() - begin) / (60 * args.minutes))) < 1:
        part = data[int(torch.randint(len(data), (1,), generator=generator))]
        rows = training_rows(part, draft.k, args.rows, args.anchors, generator)
        loss = draft.loss(*(x.to(args.device) for x in rows))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(leaves, 1.0)
        step += 1
        for group in optimizer.param_groups:
            group["lr"] = args.peak * min(1.0, step / WARMUP_STEPS) * (1 - progress)
        optimizer.step()
        losses.append(loss.detach())
        if step % args.check_every == 0:
            found = acceptance(tests[::CHECKS_EVERY], draft.draft, draft.k, args.device)
            mean, losses = float(torch.stack(losses).mean()), []
            log(draft=draft.name, step=step, seconds=round(time.monotonic() - begin, 1), loss=round(mean, 4),
                accepted=round(found.share, 4))  # fmt: skip
            if found.share >= args.aim or found.by_position[0] >= MOST_AT_FIRST:
                break
    for leaf in leaves:
        leaf.requires_grad_(False)


def measured(draft, tests: list[OwnText], device: str) -> dict[str, Acceptance]:
    """Acceptance of the draft's k tokens; of the MTP layer also if it drafts one alone."""
    counts = (draft.k, 1) if isinstance(draft, LayerDraft) else (draft.k,)
    return {
        f"{draft.name}, {k} tokens": acceptance(tests, lambda *of, k=k: draft.draft(*of)[..., :k], k, device)
        for k in counts
    }


def said_by(target: Target, samples, tokenizer: Tokenizer, rows: int, what: str) -> list[OwnText]:
    """The model's states for these conversations, with progress."""
    begin, parts = time.monotonic(), []
    for part in own_text(target.parameters, target.text, samples, tokenizer, rows):
        parts.append(part)
        done = sum(len(part.ids) for part in parts)
        print(f"{what}: {done} of {len(samples)} conversations, {time.monotonic() - begin:.0f} s", flush=True)
    return [part for part in parts if part.said.any()]


def load_target(path: Path, device: str) -> Target:
    parameters, text = load_parameters(path)
    return Target(text, {name: tensor.to(device) for name, tensor in parameters.items()})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/local"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--drafts", default="dflash2,mtp", help="which to train")
    parser.add_argument("--measure", action="store_true", help="only measure what is in OUT, and write its report.json")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samples", type=int, default=2000, help="conversations to learn from")
    parser.add_argument("--states", type=Path, help="keep the model's states in this file, or take them from it")
    parser.add_argument("--steps", type=int, default=10**9, help="limit for each draft")
    parser.add_argument("--minutes", type=float, default=1.2, help="limit for each draft")
    parser.add_argument("--aim", type=float, default=0.7, help="stop at this share of accepted tokens")
    parser.add_argument("--rows", type=int, default=32, help="conversations in a step")
    parser.add_argument("--anchors", type=int, default=12, help="of each of them")
    parser.add_argument("--peak", type=float, default=2e-3)
    parser.add_argument("--check-every", type=int, default=100, help="steps from one measurement to the next")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def prepared_states(args, target: Target) -> tuple[list[OwnText], list[OwnText]]:
    """(to learn from, held out)."""
    if args.states and args.states.is_file():
        return tuple([OwnText(*parts) for parts in kept] for kept in torch.load(args.states))
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    rng = random.Random(args.seed)
    samples = [] if args.measure else [training_sample(rng) for _ in range(args.samples)]
    data = said_by(target, samples, tokenizer, 32, "to learn from")
    tests = said_by(target, measured_samples(), tokenizer, TESTED_AT_ONCE, "held out")
    if args.states:
        torch.save([[(part.ids, part.taps, part.said) for part in parts] for parts in (data, tests)], args.states)
    return data, tests


def main() -> None:
    args = parse_arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    target = load_target(args.model, args.device)
    data, tests = prepared_states(args, target)
    report: dict[str, Acceptance] = {}
    for kind in (BlockDraft, LayerDraft):
        if kind.name in args.drafts.split(","):
            draft = kind(target, args.seed)
            if not args.measure:
                train(draft, data, tests, args, lambda **fields: print(json.dumps(fields), flush=True))
                draft.parameters = draft_files.rounded(draft.parameters)
                draft.write(args.out / draft.name, args.model)
            draft.read(args.out / draft.name)
            report |= measured(draft, tests, args.device)
    (args.out / "report.json").write_text(json.dumps({n: a.as_dict() for n, a in report.items()}, indent=2) + "\n")
    for name, found in report.items():
        print(f"{name}: {found}", flush=True)
    outside = [name for name, found in report.items() if not ACCEPTED[0] <= found.share <= ACCEPTED[1]]
    if outside:
        raise SystemExit(
            f"{args.out}: held-out text accepts too few or too many tokens of {outside}, expected a share from "
            f"{ACCEPTED[0]} to {ACCEPTED[1]}. Train with more --minutes, or with another --aim."
        )


if __name__ == "__main__":
    main()
