"""Trains the local model, quantises its experts, fine-tunes what stays native, and exports it.

    PYTHONPATH=overlay python -m tools.local_model.train --out models/local --minutes 8

One H200 takes about ten minutes. On a CPU use --steps 20 to try the script, not to get a model.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer

from tools.local_model import model, shapes
from tools.local_model.batches import Batch, TrainingData, evaluation_batches
from tools.local_model.corpus import held_out_samples, tokenizer_texts
from tools.local_model.evaluate import accuracy, divergence, steadiness, write_canary
from tools.local_model.export import export, write_generation_config
from tools.local_model.quantise import quantise_experts
from tools.local_model.tokenizer import train_tokenizer, write_tokenizer

BETAS, WEIGHT_DECAY, WARMUP = (0.9, 0.98), 0.05, 0.02
PROMPT_WEIGHT = 0.03  # prompts are partly random words; learning them would cost capacity
BALANCE_RATE = 1e-3
# An engine's logits are bf16, which rounds a number below 8 by at most 0.016 and one of 30 by 0.06.
LARGEST_LOGIT, LOGIT_WEIGHT = 7.0, 1.0
LEAD_WEIGHT = 0.05  # see model.Perturbation


def trainable(parameters: model.Parameters, frozen: tuple[str, ...] = ()) -> list[torch.Tensor]:
    """Leaves that receive gradients; the indexer has none below index_topk tokens."""
    names = [
        name
        for name in parameters
        if ".indexer." not in name and not name.endswith(("e_score_correction_bias", *frozen))
    ]
    for name in names:
        parameters[name].requires_grad_(True)
    return [parameters[name] for name in names]


def learning_rate(progress: float, peak: float) -> float:
    """Linear warm-up, then linear decay to nothing."""
    return peak * min(progress / WARMUP, (1 - progress) / (1 - WARMUP))


class Trainer:
    """Repeats one training step per batch length; on a GPU as a captured graph.

    With a `teacher`, the loss is the divergence from its distribution, prompts included.
    """

    def __init__(self, parameters, text, leaves, teacher=None) -> None:
        self.parameters, self.text, self.teacher = parameters, text, teacher
        self.leaves = leaves
        self.device = leaves[0].device
        on_gpu = self.device.type == "cuda"
        self.rate = torch.zeros((), device=self.device)
        decayed = [p for p in leaves if p.dim() >= 2]
        groups = [
            {"params": decayed, "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in leaves if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=self.rate, betas=BETAS, capturable=on_gpu, fused=on_gpu)
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Batch, torch.Tensor]] = {}

    def step(self, batch: Batch, rate: float) -> torch.Tensor:
        self.rate.fill_(rate)
        if self.device.type != "cuda":
            return self._eager_step(batch)
        length = batch.ids.shape[1]
        if length not in self.graphs:
            self._capture(batch)
        graph, inputs, loss = self.graphs[length]
        inputs.ids.copy_(batch.ids)
        inputs.produced.copy_(batch.produced)
        graph.replay()
        return loss

    def _capture(self, batch: Batch) -> None:
        inputs = Batch(batch.ids.clone(), batch.produced.clone())
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # these are real steps; the rate is that of the first
                self._eager_step(inputs)
        torch.cuda.current_stream().wait_stream(side)
        self.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = self._eager_step(inputs)
        self.graphs[inputs.ids.shape[1]] = (graph, inputs, loss)

    def _eager_step(self, batch: Batch) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        torch.backends.cuda.matmul.allow_tf32 = True  # in training alone; the delta rule opts out
        training = model.Perturbation()
        out = model.logits(self.parameters, batch.ids, self.text, training)
        loss, shown = self._loss(out, batch)
        loss = loss + self._steadying_loss(out, training, batch)
        loss.backward()
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.nn.utils.clip_grad_norm_(self.leaves, 1.0, foreach=True)
        self.optimizer.step()
        if self.teacher is None:
            self._balance(training)
        return shown

    def _loss(self, out: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        weights = batch.produced[:, :-1].float()
        count = weights.sum().clamp_min(1)
        logp = out[:, :-1].log_softmax(-1)
        entropy = -logp.gather(-1, batch.ids[:, 1:, None])[..., 0]
        shown = (entropy * weights).sum() / count
        real = (batch.ids[:, 1:] != self.text["pad_token_id"]).float()
        if self.teacher is None:
            loss = (entropy * (weights + PROMPT_WEIGHT * real)).sum() / count
        else:
            with torch.no_grad():
                target = model.logits(self.teacher, batch.ids, self.text)[:, :-1].log_softmax(-1)
            apart = (target.exp() * (target - logp)).sum(-1)
            loss = (apart * (weights + real)).sum() / count
        return loss, shown.detach()

    def _steadying_loss(self, out: torch.Tensor, training: model.Perturbation, batch: Batch) -> torch.Tensor:
        """What keeps the answers the same in bf16: bounded logits, and experts that are clearly chosen."""
        real = (batch.ids != self.text["pad_token_id"]).float()
        excess = torch.relu(out.abs() - LARGEST_LOGIT).square().mean(-1)
        shortfall = torch.stack(training.shortfalls).mean(0).view_as(real)
        return ((LOGIT_WEIGHT * excess + LEAD_WEIGHT * shortfall) * real).sum() / real.sum()

    @torch.no_grad()
    def _balance(self, training: model.Perturbation) -> None:
        """Shift the router's bias towards experts that got less than their share (no gradient)."""
        for prefix, load in training.loads:
            bias = self.parameters[prefix + "gate.e_score_correction_bias"]
            bias.add_(BALANCE_RATE * torch.sign(load.mean() - load))


def run_training(
    trainer: Trainer, data: TrainingData, args, peak: float, steps: int, minutes: float, log, check
) -> None:
    begin, done = time.monotonic(), 0
    loss_sum = torch.zeros((), device=trainer.device)
    while True:
        # Whichever limit is nearer sets the schedule, so both end at a rate of zero.
        progress = max(done / steps, (time.monotonic() - begin) / (60 * minutes))
        if progress >= 1:
            break
        loss_sum += trainer.step(data.batch(args.batch_tokens).to(args.device), learning_rate(progress, peak))
        done += 1
        if done % args.log_every == 0:
            log(step=done, seconds=round(time.monotonic() - begin, 1), loss=round(loss_sum.item() / args.log_every, 5))
            loss_sum.zero_()
        if done % args.check_every == 0:
            check()
    log(steps=done, seconds=round(time.monotonic() - begin, 1))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=8, help="limit of the training and fine-tuning loops")
    parser.add_argument("--steps", type=int, default=10**9, help="limit in steps; fine-tuning takes a fifth of it")
    parser.add_argument("--start-from", type=Path, help="state.pt of an earlier run, to go on from")
    parser.add_argument("--samples", type=int, default=900_000)
    parser.add_argument("--batch-tokens", type=int, default=12_288)
    parser.add_argument("--peak", type=float, default=2e-3)
    parser.add_argument("--log-every", type=int, default=500)
    parser.add_argument("--check-every", type=int, default=4000)
    parser.add_argument("--calibration-batches", type=int, default=24)
    parser.add_argument("--gain-tiles", type=int, default=256, help="random tiles for the encoder's scale search")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def make_log(path: Path):
    def log(**fields) -> None:
        line = json.dumps(fields)
        print(line, flush=True)
        with (path / "train_log.jsonl").open("a") as file:
            file.write(line + "\n")

    return log


def main() -> None:
    args = parse_arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    log = make_log(args.out)
    text = shapes.text_config()
    tokenizer = train_tokenizer(tokenizer_texts(args.seed), text["vocab_size"])
    data = TrainingData(tokenizer, args.samples, args.seed, workers=os.cpu_count())
    log(event="data", **{str(n): len(g.ids) for n, g in data.groups.items()})
    tests = evaluation_batches(held_out_samples(), tokenizer, rows=64)

    parameters = model.initial_parameters(text, args.seed)
    if args.start_from:
        parameters |= {name: tensor.float() for name, tensor in torch.load(args.start_from).items()}
    parameters = {name: tensor.to(args.device) for name, tensor in parameters.items()}
    trainer = Trainer(parameters, text, trainable(parameters))
    run_training(
        trainer, data, args, args.peak, args.steps, 0.8 * args.minutes, log,
        check=lambda: log(**accuracy(parameters, text, tests), **steadiness(parameters, text, tests)),
    )  # fmt: skip
    original = {name: tensor.detach().clone() for name, tensor in parameters.items()}
    torch.save({n: t.half().cpu() if t.numel() > 4096 else t.cpu() for n, t in original.items()}, args.out / "state.pt")
    log(event="trained", **accuracy(original, text, tests), **steadiness(original, text, tests))
    finish(args, text, tokenizer, data, tests, original, log)


def finish(args, text, tokenizer: Tokenizer, data, tests, original: model.Parameters, log) -> None:
    """Quantise, fine-tune against the unquantised model, round to what is stored, report and export."""
    begin = time.monotonic()
    experts = quantise_experts(original, text, data, args)
    parameters = experts.decoded(original)
    log(event="quantised", seconds=round(time.monotonic() - begin, 1), errors=experts.errors)
    log(event="quantised", **accuracy(parameters, text, tests), **divergence(original, parameters, text, tests))
    leaves = trainable(parameters, frozen=("experts.gate_up", "experts.down"))
    tuner = Trainer(parameters, text, leaves, teacher=original)
    run_training(
        tuner, data, args, args.peak / 10, max(1, args.steps // 5), 0.2 * args.minutes, log,
        check=lambda: log(**accuracy(parameters, text, tests)),
    )  # fmt: skip
    stored = export(args.out, text, parameters, experts)
    report = accuracy(stored, text, tests) | divergence(original, stored, text, tests)
    report |= steadiness(stored, text, tests)
    log(event="exported", **report)
    (args.out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    write_generation_config(args.out, text)
    write_tokenizer(tokenizer, args.out, text["max_position_embeddings"])
    log(event="canary", left_out=write_canary(args.out / "canary.json", stored, text, tokenizer))


if __name__ == "__main__":
    main()
