"""Prefill chunks start on whole pools of the indexer: vLLM's real schedulers, made-up requests and answers."""

import random
from dataclasses import replace

import pytest

pytest.importorskip("vllm")

import torch
from schedulers import Case, Chunk, Run, engine_config, start
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm_exl3 import switches
from vllm_exl3.guards import chunk_ends

POOL = 4


@pytest.fixture(scope="module")
def config():
    return engine_config()


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """Budgets from the smallest that is allowed to more than a block, few blocks or many, all modes."""
    chance = random.Random(7)
    cases = []
    for _ in range(30):
        drafts, seats = chance.choice([0, 1, 3, 7]), chance.choice([2, 4, 8])
        block, least = chance.choice([64, 256, 512]), chunk_ends.needed_budget(seats, POOL, 1 + drafts)
        blocks = 2048 // block + 2 * (3 + drafts)  # room for the longest request and little more
        cases.append(Case(
            budget=chance.choice([least, least + 1, chance.randint(least, 300), chance.randint(300, 900)]),
            block=block, drafts=drafts, seats=seats, align=chance.random() < 0.7, ahead=chance.random() < 0.5,
            blocks=chance.choice([blocks, blocks + 8, 400]),
        ))  # fmt: skip
    return cases


def own(case: Case):
    return AsyncScheduler if case.ahead else Scheduler


def talk(run: Run, seed: int, images: bool = False) -> list[Chunk]:
    """Sessions that share beginnings, of all lengths, some ended early; all but the first come while others decode."""
    chance = random.Random(seed)
    shared = [chance.randrange(256) for _ in range(1500)]
    names = [f"request-{number}" for number in range(10)]

    def between(step: int) -> None:
        if names and step % 3 == 0:
            own = [chance.randrange(256) for _ in range(chance.randint(1, 300))]
            tokens = shared[: chance.choice([0, 700, 1100, 1500])] + own
            seen = pictures(chance, len(tokens)) if images else ()
            run.add(names.pop(), tokens, chance.choice([1, 5, 40, 200]), seen)
        if step % 41 == 40 and run.scheduler.running:
            run.abort(chance.choice(run.scheduler.running).request_id)

    return run.finish(between)


def pictures(chance: random.Random, tokens: int) -> list[tuple[int, int]]:
    """Images as large as the encoder's cache or half of it, one after the other with at most two tokens between."""
    at, found = chance.randint(0, 9), []
    while at + 48 < tokens:
        found.append((at, chance.choice([31, 47, 48])))
        at += found[-1][1] + chance.randint(0, 2)
    return found


def off_pool(chunks: list[Chunk], longer_than: int = 0) -> list[Chunk]:
    return [chunk for chunk in chunks if chunk.prefill and chunk.start % POOL and chunk.count > longer_than]


def test_every_chunk_starts_on_a_pool(config, cases):
    hits = preempted = 0
    for seed, case in enumerate(cases):
        run = start(chunk_ends.scheduler, config, case, seed)
        chunks = talk(run, seed)
        assert off_pool(chunks) == [], case
        hits += run.hits
        preempted += run.preempted
    assert hits > 10 and preempted > 5, "the cases exercise neither prefix cache nor preemption"


def test_without_the_guard_chunks_start_inside_pools(config, cases):
    wrong = {}
    for seed, case in enumerate(cases):
        wrong[case] = len(off_pool(talk(start(own(case), config, case, seed), seed)))
    for choice in ({"align": True}, {"align": False}, {"ahead": True}, {"ahead": False}):
        assert any(count for case, count in wrong.items() if choice.items() <= vars(case).items()), choice


def test_images_that_wait_for_the_encoder_do_not_stop_a_prompt(config, cases):
    """The encoder's cache holds one image. What it cuts off may start inside a pool, but only as short chunks."""
    for seed, case in enumerate(cases[:16]):
        case = replace(case, image_cache=48)
        run = start(chunk_ends.scheduler, config, case, seed)
        chunks = talk(run, seed, images=True)
        assert off_pool(chunks, longer_than=1 + case.drafts) == [], case


def test_a_rule_that_always_waits_would_wait_for_ever(config, monkeypatch):
    rule = chunk_ends.chunk_tokens
    run = start(chunk_ends.scheduler, config, Case(image_cache=48))
    run.add("two-images", [1] * 300, 1, [(10, 36), (47, 48)])
    monkeypatch.setattr(chunk_ends, "chunk_tokens", lambda *args: rule(*args[:5]))
    with pytest.raises(AssertionError, match=r"not over after .*two-images"):
        run.finish()


@pytest.mark.parametrize("short", [1, 2, 4, 8])
@pytest.mark.parametrize("last", [1, 15, 16, 17, 40])
def test_from_any_start_the_rule_comes_to_the_end(short, last):
    for begin in range(last):
        for budget in (POOL, 5, 7, 8, 30, 64):
            at, steps = begin, 0
            while at < last:
                count = chunk_ends.chunk_tokens(at, min(budget, last - at), last, POOL, short)
                assert 0 < count <= budget
                assert at % POOL == 0 or count <= short
                at, steps = at + count, steps + 1
            assert steps <= POOL + -(-last // (budget // POOL * POOL))


def test_decoding_is_left_alone(config):
    case = Case(drafts=7, budget=1200)
    lengths = []
    for make in (Scheduler, chunk_ends.scheduler):
        run = start(make, config, case)
        run.add("one", list(range(255)), 64)
        lengths.append([(chunk.start, chunk.count) for chunk in run.finish()])
    assert lengths[0] == lengths[1]


@pytest.mark.parametrize("ahead", [False, True])
def test_the_switch_brings_vllm_s_own_back(config, ahead, monkeypatch):
    case, added = Case(ahead=ahead), [chunk_ends.WholePools, chunk_ends.ComputedStates]
    for off in ("", "topk-ids, chunk-ends", "state-blocks", "chunk-ends,state-blocks"):
        monkeypatch.setattr(chunk_ends, "switches", lambda off=off: switches.parse({"EXL3_GUARDS_OFF": off}))
        made = type(start(chunk_ends.scheduler, config, case).scheduler)
        wanted = [each for each, name in zip(added, ("chunk-ends", "state-blocks"), strict=True) if name not in off]
        assert [each for each in added if issubclass(made, each)] == wanted and issubclass(made, own(case))
    assert made is own(case)


def test_a_budget_that_starves_prompts_is_refused(config):
    case = Case(seats=8, drafts=3, budget=8 * 4 + 3)
    with pytest.raises(ValueError, match=r"max_num_batched_tokens is 35: beside 8 .* set it to 36 or more"):
        start(chunk_ends.scheduler, config, case)
    start(chunk_ends.scheduler, config, replace(case, budget=36))


@pytest.mark.parametrize(
    ("part", "setting", "wrong", "right"),
    [("cache_config", "prefix_match_unit", 2, 4), ("scheduler_config", "long_prefill_token_threshold", 3, 4)],
)
def test_settings_that_cut_pools_are_refused(config, monkeypatch, part, setting, wrong, right):
    monkeypatch.setattr(getattr(config, part), setting, wrong)
    with pytest.raises(ValueError, match=f"{setting} .* {wrong}"):
        start(chunk_ends.scheduler, config, Case())
    monkeypatch.setattr(getattr(config, part), setting, right)
    start(chunk_ends.scheduler, config, Case())


def test_another_vllm_is_refused(config, monkeypatch):
    monkeypatch.setattr(Scheduler, "_reserve_prefill_lookahead", lambda self, *args: args[-1])
    with pytest.raises(RuntimeError, match=r"Scheduler\._reserve_prefill_lookahead of vLLM .* fingerprint"):
        start(chunk_ends.scheduler, config, Case())


def test_a_model_without_pools_is_left_alone(config, monkeypatch):
    monkeypatch.setattr(config.model_config.hf_text_config, "index_kpool", 1)
    case = Case(budget=301, align=False)
    chunks = talk(start(chunk_ends.scheduler, config, case), 3)
    assert chunks == talk(start(Scheduler, config, case), 3)


def test_vllm_builds_a_pool_that_crosses_a_start_from_the_tokens_in_front(monkeypatch):
    """What the guard is for: two chunks in one batch, the second from position 2 on. The kernel itself needs a GPU."""
    from vllm.models.glm5next.nvidia import sparse_indexer

    pools = {}

    def kernel(_cache, keys, _gates, _ape, slots, write_mask, **_options):
        for slot, pool in zip(slots[write_mask], keys[write_mask], strict=True):
            pools[int(slot)] = pool.flatten().tolist()

    monkeypatch.setattr(sparse_indexer.kpool_ops, "kpool_compress_and_write_cache", kernel)
    first, second = torch.arange(0, 8), torch.arange(102, 108)
    keys = torch.cat([first, second]).float().unsqueeze(1)  # a key is its position, 100 more in the second request
    slots = torch.tensor([-1, -1, -1, 0, -1, -1, -1, 1, -1, 70, -1, -1, -1, 71])  # pools, at their last token
    sparse_indexer._kpool_compress_insert(keys, keys, None, None, slots, POOL, 1, round_scale=False)
    right = {0: [0, 1, 2, 3], 1: [4, 5, 6, 7], 71: [104, 105, 106, 107]}
    assert pools == right | {70: [6, 7, 102, 103]}, "vLLM keeps requests apart now: the guard may go"
