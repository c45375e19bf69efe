"""Turns samples into padded arrays in a few fixed lengths, in parallel, and deals out batches."""

from __future__ import annotations

import multiprocessing
import random
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from tokenizers import Tokenizer

from tools.local_model.corpus import Sample, encode, training_sample

LENGTHS = (96, 192, 320, 640)
SAMPLES_PER_SEED = 2000


@dataclass(frozen=True)
class Batch:
    """ids [rows, tokens] and, for each position, whether its *next* token is the model's to produce."""

    ids: torch.Tensor
    produced: torch.Tensor

    def to(self, device: str) -> Batch:
        return Batch(self.ids.to(device).long(), self.produced.to(device))


def pad_samples(encoded: list[tuple[list[int], list[bool]]], length: int, pad: int) -> Batch:
    ids = np.full((len(encoded), length), pad, dtype=np.int16)
    produced = np.zeros((len(encoded), length), dtype=bool)
    for row, (tokens, mask) in enumerate(encoded):
        ids[row, : len(tokens)] = tokens
        produced[row, : len(mask) - 1] = mask[1:]
    return Batch(torch.from_numpy(ids), torch.from_numpy(produced))


def bucket_of(length: int) -> int | None:
    return next((limit for limit in LENGTHS if length <= limit), None)


def _encode_block(seed: int, tokenizer_json: str) -> list[tuple[list[int], list[bool]]]:
    tokenizer, rng = Tokenizer.from_str(tokenizer_json), random.Random(seed)
    return [encode(training_sample(rng), tokenizer) for _ in range(SAMPLES_PER_SEED)]


class TrainingData:
    """`count` samples from seeds derived from `seed`; the same for any number of workers."""

    def __init__(self, tokenizer: Tokenizer, count: int, seed: int, workers: int) -> None:
        pad = tokenizer.token_to_id("<|endoftext|>")
        seeds = [seed * 1_000_003 + i for i in range(-(-count // SAMPLES_PER_SEED))]
        job = partial(_encode_block, tokenizer_json=tokenizer.to_str())
        with multiprocessing.get_context("spawn").Pool(workers) as pool:
            encoded = [sample for block in pool.imap(job, seeds) for sample in block]
        groups: dict[int, list] = {limit: [] for limit in LENGTHS}
        for sample in encoded:
            if (limit := bucket_of(len(sample[0]))) is not None:
                groups[limit].append(sample)
        self.groups = {limit: pad_samples(rows, limit, pad) for limit, rows in groups.items() if rows}
        self.rng = np.random.default_rng(seed)

    def batch(self, tokens: int) -> Batch:
        """About `tokens` tokens of one length; lengths come up in proportion to their samples."""
        lengths = list(self.groups)
        weights = np.array([len(self.groups[n].ids) * n for n in lengths], dtype=float)
        length = int(self.rng.choice(lengths, p=weights / weights.sum()))
        group = self.groups[length]
        rows = torch.from_numpy(self.rng.integers(len(group.ids), size=max(1, tokens // length)))
        return Batch(group.ids[rows], group.produced[rows])


def evaluation_batches(samples: list[Sample], tokenizer: Tokenizer, rows: int) -> list[tuple[list[str], Batch]]:
    """(kinds, batch) in groups of similar length."""
    pad = tokenizer.token_to_id("<|endoftext|>")
    encoded = sorted(((*encode(s, tokenizer), s.kind) for s in samples), key=lambda item: len(item[0]))
    batches = []
    for start in range(0, len(encoded), rows):
        part = encoded[start : start + rows]
        longest = max(len(ids) for ids, _, _ in part)
        batch = pad_samples([(ids, mask) for ids, mask, _ in part], longest, pad)
        batches.append(([kind for _, _, kind in part], batch))
    return batches
