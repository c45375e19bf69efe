"""What the frozen local model says, with the states that its drafts read, and how many drafted tokens it accepts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Tokenizer

from tools.local_model import model
from tools.local_model.batches import bucket_of, pad_samples
from tools.local_model.corpus import Sample, encode, held_out_samples

# Drafts read the residual stream that leaves these layers, as the published draft reads five of 45.
TAPS = (1, 2, 3)
# What is measured, here and in an engine: the answers to so many held-out questions, up to so many tokens.
QUESTIONS_EVERY, ANSWER_TOKENS = 17, 96


@dataclass(frozen=True)
class OwnText:
    """Conversations of one padded length.

    ids [rows, tokens]; taps [rows, tokens, len(TAPS), hidden] fp16, the mean of the streams that leave each tapped
    layer; said [rows, tokens]: this token is what the model would say itself after those before it.
    """

    ids: torch.Tensor
    taps: torch.Tensor
    said: torch.Tensor

    def chosen(self, rows: torch.Tensor) -> OwnText:
        return OwnText(self.ids[rows], self.taps[rows], self.said[rows])

    def to(self, device: str) -> OwnText:
        return OwnText(self.ids.to(device), self.taps.to(device), self.said.to(device))


def own_text(
    parameters: model.Parameters, text: dict, samples: list[Sample], tokenizer: Tokenizer, rows: int = 32
) -> Iterator[OwnText]:
    """One part after the other, each of up to `rows` conversations of similar length."""
    encoded = [encode(sample, tokenizer) for sample in samples]
    encoded = sorted((one for one in encoded if bucket_of(len(one[0])) is not None), key=lambda one: len(one[0]))
    device = parameters["embed_tokens.weight"].device
    for start in range(0, len(encoded), rows):
        part = encoded[start : start + rows]
        batch = pad_samples(part, max(len(ids) for ids, _ in part), text["pad_token_id"]).to(device)
        yield _with_states(parameters, text, batch.ids, batch.produced)


@torch.no_grad()
def _with_states(parameters, text: dict, ids: torch.Tensor, produced: torch.Tensor) -> OwnText:
    means = [streams.mean(2) for streams in model.residual_streams(parameters, ids, text)]
    best = (final_state(parameters, means[-1], text) @ parameters["lm_head.weight"].T).argmax(-1)
    said = torch.zeros_like(produced)
    said[:, 1:] = produced[:, :-1] & (best[:, :-1] == ids[:, 1:])
    return OwnText(ids.cpu(), torch.stack([means[i] for i in TAPS], 2).half().cpu(), said.cpu())


def final_state(parameters: model.Parameters, last: torch.Tensor, text: dict) -> torch.Tensor:
    """What the language model's head reads, from the mean of the streams that leave the last layer."""
    return model.rms_norm(last.float(), parameters["norm.weight"], text["rms_norm_eps"])


# Acceptance


def measured_samples() -> list[Sample]:
    return held_out_samples()[::QUESTIONS_EVERY]


@dataclass
class Acceptance:
    """Counts as vLLM counts them: a step drafts k tokens, and those before the first wrong one are accepted."""

    drafted: int
    accepted_at: np.ndarray  # [k]: steps that accepted at least so many tokens
    steps: int

    @property
    def share(self) -> float:
        return float(self.accepted_at.sum() / max(1, self.drafted))

    def as_dict(self) -> dict:
        return {"accepted": round(self.share, 4), "drafted_tokens": self.drafted, "by_position": self.by_position}

    @property
    def by_position(self) -> list[float]:
        return [round(float(n) / max(1, self.steps), 4) for n in self.accepted_at]

    def __str__(self) -> str:
        at = ", ".join(f"{share:.1%}" for share in self.by_position)
        accepted = self.accepted_at.sum()
        return f"{accepted} of {self.drafted} drafted tokens accepted, {self.share:.1%}; by position {at}"


def acceptance(
    parts: list[OwnText], draft: Callable[[OwnText, torch.Tensor], torch.Tensor], k: int, device: str = "cpu"
) -> Acceptance:
    """Walk through each conversation's last answer as an engine does.

    draft(part, anchors [rows, n]) -> tokens [rows, n, k] that should follow each anchor, of which everything up to
    and including the anchor's token is known (its state is not).
    """
    total = Acceptance(0, np.zeros(k, dtype=int), 0)
    for part in parts:
        anchors, counts = _answer_positions(part.said)
        drafted = draft(part.to(device), anchors.to(device)).cpu().numpy()
        ids = part.ids.numpy()
        for row, count in enumerate(counts):
            _walk(ids[row], int(anchors[row, 0]), min(count, ANSWER_TOKENS), drafted[row], total)
    return total


def _answer_positions(said: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """Positions of the last run of the model's own tokens: [rows, longest], and how many each row has."""
    runs = []
    for row in said.tolist():
        end = len(row) - row[::-1].index(True) if True in row else 1
        start = end - 1
        while start > 0 and row[start - 1]:
            start -= 1
        runs.append((start, end - start))
    longest = max(count for _, count in runs)
    last = said.shape[1] - 1
    positions = torch.tensor([[min(start + i, last) for i in range(longest)] for start, _ in runs])
    return positions, [count for _, count in runs]


def _walk(ids: np.ndarray, start: int, count: int, drafted: np.ndarray, total: Acceptance) -> None:
    k, at = drafted.shape[1], 0
    while at < count - 1:  # the token that ends the answer drafts nothing
        rest = ids[start + at + 1 : start + count]
        right = drafted[at][: len(rest)] == rest[:k]
        accepted = len(right) if right.all() else int(right.argmin())
        total.drafted += k
        total.accepted_at[:accepted] += 1
        total.steps += 1
        at += accepted + 1
