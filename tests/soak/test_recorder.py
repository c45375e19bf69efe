"""States are taken from the right block at the right time: vLLM's real schedulers, made-up requests and worker."""

import random
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import torch
from schedulers import Case, Run, engine_config, start
from states import CONV, LATENT, RECURRENT, Recorder, Unreadable
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

CASES = [
    Case(budget=budget, block=block, drafts=drafts, seats=4, align=align, ahead=ahead, blocks=blocks)
    for align, block, blocks in ((True, 64, 30), (True, 256, 400), (False, 64, 30))
    for drafts, budget in ((0, 93), (1, 300), (7, 300))
    for ahead in (False, True)
]
MORE = 3  # tokens after a prompt, where no drafts are


class Glm5NextLinearAttention:
    """By name what the recorder looks for."""

    conv_size = 4

    def __init__(self, blocks: int, drafts: int) -> None:
        self.kv_cache = (torch.zeros(blocks, 3 + drafts, 24), torch.zeros(blocks, 1, 1, 1))


class MLAAttention:
    kv_lora_rank = 1

    def __init__(self, blocks: int, block: int) -> None:
        self.kv_cache = torch.zeros(blocks, block, 1)


@dataclass
class Worker:
    """Keeps block tables as vLLM's worker does, and in its caches the number of the text up to each token."""

    run: Run
    tables: dict[str, list[list[int]]] = field(default_factory=dict)
    texts: dict[str, list[int]] = field(default_factory=dict)
    padded: int = 0  # prompts whose last token came with drafts behind it

    def __post_init__(self) -> None:
        case, config = self.run.case, self.run.scheduler.kv_cache_config
        self.attention = MLAAttention(case.blocks, config.kv_cache_groups[0].kv_cache_spec.block_size)
        self.kda = Glm5NextLinearAttention(case.blocks, case.drafts)
        layers = {"attention": self.attention, "state": self.kda}
        self.model_runner = SimpleNamespace(kv_cache_config=config)
        self.vllm_config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))

    def engine(self):
        core = SimpleNamespace(scheduler=self.run.scheduler)
        engine = SimpleNamespace(engine_core=SimpleNamespace(engine_core=core))
        return SimpleNamespace(llm_engine=engine, collective_rpc=lambda call: [call(self)])

    def number(self, name: str, length: int) -> int:
        """Of the text of a request up to a length: equal for equal beginnings."""
        text = self.texts[name]
        while len(text) < length:
            tokens = self.run.scheduler.requests[name].prompt_token_ids
            token = tokens[len(text)] if len(text) < len(tokens) else int(name[1:-2]) << 16 | len(text)
            text.append(hash((text[-1] if text else 0, token)) % (1 << 24))
        return text[length - 1]

    def execute(self, output) -> None:
        for new in output.scheduled_new_reqs:
            self.tables[new.req_id], self.texts[new.req_id] = [list(ids) for ids in new.block_ids], []
        old = output.scheduled_cached_reqs
        for name, ids in zip(old.req_ids, old.new_block_ids, strict=True):
            if name in old.resumed_req_ids:
                self.tables[name] = [list(group) for group in ids]
            elif ids:
                for table, more in zip(self.tables[name], ids, strict=True):
                    table.extend(more)
        for name, count in output.num_scheduled_tokens.items():
            drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
            self.write(name, self.run.scheduler.requests[name].num_computed_tokens - count, count, drafts)

    def write(self, name: str, start: int, count: int, drafts: int) -> None:
        """As the kernels do: every token's latent; the state after the last one, or after each where drafts are."""
        attention, states = self.tables[name]
        block = self.attention.kv_cache.shape[1]
        for position in range(start, start + count):
            self.attention.kv_cache[attention[position // block], position % block] = self.number(name, position + 1)
        first = (start + count - 1) // block if self.run.case.align else 0
        for place, length in enumerate(range(start + 1, start + count + 1) if drafts else [start + count]):
            for cache in self.kda.kv_cache:
                cache[states[first + place]] = self.number(name, length)
        prompt = len(self.run.scheduler.requests[name].prompt_token_ids)
        self.padded += drafts > 0 and start < prompt


def soak(config, case: Case, seed: int):
    """(worker, what the recorder found, lengths of prompts) of requests that share beginnings and hit."""
    run = start(AsyncScheduler if case.ahead else Scheduler, config, case, seed)
    worker, chance = Worker(run), random.Random(seed)
    step = run.step
    run.step = lambda: [worker.execute(output := step()), output][1]
    shared = [chance.randrange(256) for _ in range(1700)]
    blocks = [chance.randint(1, 6) * case.block for _ in range(15)]
    # One token behind a block is what a hit leaves, and what drafts are padded to.
    ends = [chance.choice([length - 1, length, length + 1, length + 1, 700]) for length in blocks]
    lengths = {f"r{i}": length for i, length in enumerate(ends)}
    waiting = list(lengths)

    def between(number: int) -> None:
        if waiting and (number % 3 == 0 or not run.scheduler.has_unfinished_requests()):
            name = waiting.pop(0)
            tokens = [*shared[: lengths[name] - 1], chance.randrange(256)]
            run.add(f"{name}-x", tokens, chance.choice([MORE + 1, 40]))

    wanted = set(lengths.items()) | {(name, length + MORE) for name, length in lengths.items() if not case.drafts}
    with Recorder(worker.engine(), wanted) as recorder:
        while waiting:
            run.finish(between)
    return worker, recorder.found, wanted


@pytest.fixture(scope="module")
def config():
    return engine_config()


def wrong(worker: Worker, found: dict) -> list:
    """What was not that of the text at its length."""
    result = []
    for (name, length), state in found.items():
        right = [float(worker.number(f"{name}-x", n + 1)) for n in range(length)]
        kda, latents = state["state"], state["attention"][LATENT]
        if latents[:, 0].tolist() != right:
            result.append((name, length, LATENT))
        result += [(name, length, kind) for kind in (RECURRENT, CONV) if not (kda[kind] == right[-1]).all()]
    return result


def test_states_are_those_of_the_text_in_every_mode(config):
    hits = preempted = padded = 0
    for seed, case in enumerate(CASES):
        worker, found, wanted = soak(config, case, seed)
        assert set(found) == wanted and wrong(worker, found) == [], case
        hits, preempted, padded = hits + worker.run.hits, preempted + worker.run.preempted, padded + worker.padded
    assert hits > 20 and preempted and padded > 3, (hits, preempted, padded)


def test_a_copy_that_is_made_one_step_late_would_be_seen(config, monkeypatch):
    """Planted, where the scheduler runs ahead."""
    read = Recorder.read

    def late(self):
        self.due, due = getattr(self, "kept", []), self.due
        read(self)
        self.kept = due

    monkeypatch.setattr(Recorder, "read", late)
    worker, found, _ = soak(config, next(case for case in CASES if case.ahead and case.align and not case.drafts), 1)
    assert wrong(worker, found)


def test_an_engine_that_is_built_otherwise_is_refused(config):
    worker = Worker(start(Scheduler, config, CASES[0]))
    with pytest.raises(Unreadable, match="built otherwise now"):
        Recorder(SimpleNamespace(llm_engine=SimpleNamespace(engine_core=None)), set())
    del worker.vllm_config.compilation_config.static_forward_context["state"]
    with pytest.raises(Unreadable, match="no layer of class Glm5NextLinearAttention"):
        Recorder(worker.engine(), set())
