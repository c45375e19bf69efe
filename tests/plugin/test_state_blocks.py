"""Recurrent states in cache blocks: vLLM's schedulers and the kernels that place states, a worker that compares.

Each step runs when it is scheduled, in that order, as on a GPU's stream. What a request reads must be the state of its
own tokens, whoever wrote it.
"""

import random

import pytest

pytest.importorskip("vllm")

import state_worker
from schedulers import VOCAB, Case, engine_config, start
from state_worker import Worked
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm_exl3 import switches
from vllm_exl3.guards import chunk_ends

BLOCK = 32
LONGEST = 1000  # tokens of a prompt and its answer


@pytest.fixture(scope="module")
def config():
    with pytest.MonkeyPatch.context() as patch:
        made = engine_config()
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")  # what serves on a GPU; a configuration refuses it on a CPU
        yield made


@pytest.fixture
def unguarded(monkeypatch):
    monkeypatch.setattr(chunk_ends, "switches", lambda: switches.parse({"EXL3_GUARDS_OFF": "state-blocks"}))


def some_case(seed: int, **more) -> Case:
    chance = random.Random(seed)
    drafts, block, seats = chance.choice([0, 1, 3, 7]), chance.choice([16, 32, 64]), chance.choice([2, 4, 6])
    least = -(-LONGEST // block) + 2 * (3 + drafts) + 1
    budget = chance.choice([chunk_ends.needed_budget(seats, 4, 1 + drafts), 100, 200])
    blocks, ahead = chance.choice([least, least + 2, 400]), chance.random() < 0.5
    return Case(budget=budget, block=block, drafts=drafts, ahead=ahead, seats=seats, blocks=blocks, **more)


def talk(run: Worked, seed: int) -> Worked:
    """Sessions that go on with what was said or start anew, end on edges of blocks, are taken back and asked again."""
    chance = random.Random(seed)
    shared, names = [chance.randrange(VOCAB) for _ in range(600)], iter(range(60))

    def add(tokens: list[int]) -> None:
        if (number := next(names, None)) is not None:
            run.add(f"request-{number}", tokens, chance.choice([1, 3, 20, 90]), priority=chance.choice([0, 0, 1, 2]))

    def ask() -> None:
        said = list(run.worker.said.values())
        begin = chance.choice(said) if said and chance.random() < 0.6 else shared
        if chance.random() < 0.3:
            begin = [chance.randrange(VOCAB) for _ in range(600)]
        edge = run.case.block * chance.randint(1, 5) + chance.choice([-1, 0, 1])
        add(((begin + shared)[: chance.choice([edge, chance.randint(1, 600)])])[:900])

    def take_back() -> None:
        if run.scheduler.running and chance.random() < 0.08:
            request = chance.choice(run.scheduler.running)
            run.abort(request.request_id)
            add(list(request.prompt_token_ids))

    def between(step: int) -> None:
        if step < 60 and chance.random() < 0.5:
            ask()
        take_back()

    run.meanwhile = take_back
    run.finish(between)
    return run


@pytest.mark.parametrize("priorities", [False, True])
def test_each_request_reads_the_state_of_its_own_tokens(config, priorities):
    hits = copies = preempted = 0
    for seed in range(40):
        case = some_case(seed, priorities=priorities)
        run = talk(start(chunk_ends.scheduler, config, case, seed, Worked), seed)
        worker = run.worker
        assert worker.faults == [] and run.unfilled() == [], (seed, case)
        hits, copies, preempted = hits + worker.hits, copies + worker.copies, preempted + worker.preempted
    assert hits > 300 and copies > 1500 and preempted > 3, "too little of what this is about happened"


def late(copy, *arguments):
    """A copy that does not know how many drafts were accepted."""
    *front, bias = arguments[:7]
    return copy(*front, bias * 0)


def missing(copy, *arguments):
    return None


@pytest.mark.parametrize("damage", [late, missing])
def test_damaged_copies_are_seen(config, monkeypatch, damage):
    copy = state_worker.Worker.copy
    monkeypatch.setattr(state_worker.Worker, "copy", lambda *arguments: damage(copy, *arguments))
    case = Case(budget=200, block=BLOCK, drafts=3)
    assert talk(start(chunk_ends.scheduler, config, case, 1, Worked), 1).worker.faults


# A chunk that ends exactly on the edge of a block, and drafts over it


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("drafts", [0, 1, 3, 7])
@pytest.mark.parametrize("beyond", [-1, 0, 1])
def test_a_chunk_may_end_on_the_edge_of_a_block(config, ahead, drafts, beyond):
    case = Case(budget=200, block=BLOCK, drafts=drafts, ahead=ahead)
    for seed in range(2):
        run = start(chunk_ends.scheduler, config, case, seed, Worked)
        run.add("first", list(range(2 * BLOCK + beyond)), 4 * BLOCK)
        chunks = run.finish()
        assert beyond or any(chunk.start + chunk.count == 2 * BLOCK for chunk in chunks if chunk.prefill)
        for blocks in range(1, 6):  # from the state of each block that was filled, by a chunk or by drafts
            run.add(f"next-{blocks}", run.worker.said["first"][: blocks * BLOCK + 1], 2 * BLOCK)
        run.finish()
        assert run.worker.faults == [] and run.unfilled() == [] and run.worker.hits >= 4


# Entered into the prefix cache before it was filled


def taken_back_and_asked_again(run: Worked) -> None:
    """An abort while the first step runs; the retry is scheduled before the step's answer is seen."""
    prompt = list(range(4 * BLOCK))
    run.add("first", prompt, 8)
    output = run.step()
    run.abort("first")
    run.add("again", prompt, 8)
    again = run.step()
    assert [new.num_computed_tokens for new in again.scheduled_new_reqs] == [3 * BLOCK]
    run.answer(output, set())
    run.answer(again, set())


@pytest.mark.parametrize("ahead", [False, True])
def test_a_retry_hits_what_the_step_before_it_fills(config, ahead):
    """The block is known one step before it is filled. That is right as long as steps run in their order."""
    run = start(chunk_ends.scheduler, config, Case(budget=3 * BLOCK, block=BLOCK, ahead=ahead), 0, Worked)
    taken_back_and_asked_again(run)
    assert run.worker.faults == []


def test_a_retry_reads_nothing_if_the_step_before_it_never_ran(config, monkeypatch):
    execute = state_worker.Worker.execute
    run = start(chunk_ends.scheduler, config, Case(budget=3 * BLOCK, block=BLOCK, ahead=True), 0, Worked)
    skipped = lambda *step: {"first": []} if "first" in step[1].num_scheduled_tokens else execute(*step)
    monkeypatch.setattr(state_worker.Worker, "execute", skipped)
    taken_back_and_asked_again(run)
    assert run.worker.faults == [f"again at {3 * BLOCK}: state of nothing", f"again at {3 * BLOCK}: window of nothing"]


def left_by_a_step_that_is_taken_back(config, ahead: bool) -> list[int]:
    """Priorities: what fills a block is scheduled, then a more urgent request takes its place in the same step."""
    case = Case(budget=72, block=BLOCK, ahead=ahead, priorities=True, blocks=12)
    run, left = start(chunk_ends.scheduler, config, case, 0, Worked), []
    run.add("later", list(range(6 * BLOCK)), 4, priority=1)

    def between(step: int) -> None:
        left.extend(run.unfilled())
        if step == 1:
            run.add("urgent", list(range(52, 0, -1)), 2 * BLOCK)

    run.finish(between)
    assert run.worker.preempted
    return left


@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_that_is_taken_back_leaves_no_block_behind(config, ahead):
    assert left_by_a_step_that_is_taken_back(config, ahead) == []


@pytest.mark.parametrize("ahead", [False, True])
def test_without_the_guard_it_leaves_one_that_nobody_filled(config, ahead, unguarded):
    assert left_by_a_step_that_is_taken_back(config, ahead)


# A prompt of one token


def faults_of_one_token(config, ahead: bool, drafts: int) -> list[str]:
    run = start(chunk_ends.scheduler, config, Case(block=BLOCK, drafts=drafts, ahead=ahead), 0, Worked)
    run.add("decoding", list(range(9)), 40)
    run.finish(lambda step: run.add(f"one-{step}", [step], 20) if step in (5, 6, 9) else None)
    return run.worker.faults


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("drafts", [1, 3, 7])
def test_a_prompt_of_one_token_reads_no_drafts(config, ahead, drafts):
    assert faults_of_one_token(config, ahead, drafts) == []


@pytest.mark.parametrize("ahead", [False, True])
def test_without_the_guard_it_reads_drafts_for_good(config, ahead, unguarded):
    assert any(fault.startswith("one-") for fault in faults_of_one_token(config, ahead, 3))


def first_steps(config, align: bool, ahead: bool, scheduler=chunk_ends.scheduler) -> list[int]:
    """Tokens of the first step of each prompt of one token, beside a request that decodes."""
    run = start(scheduler, config, Case(block=BLOCK, drafts=3, ahead=ahead, align=align))
    run.add("decoding", list(range(9)), 40)
    run.finish(lambda step: run.add(f"one-{step}", [step], 20) if step in (5, 6, 9) else None)
    first = {chunk.request: chunk.count for chunk in reversed(run.chunks) if chunk.request != "decoding"}
    return list(first.values())


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("align", [False, True])
def test_a_prompt_of_one_token_is_one_token_with_the_prefix_cache_and_without(config, align, ahead):
    assert first_steps(config, align, ahead) == [1, 1, 1]
    assert first_steps(config, align, ahead, AsyncScheduler if ahead else Scheduler) == [4, 4, 4]


def test_nothing_is_split_at_blocks_without_the_prefix_cache(config):
    """As vLLM has it, which does not ask there; prompts are read in chunks as large as a step."""

    def chunks(scheduler):
        run = start(scheduler, config, Case(block=BLOCK, budget=200, drafts=3, align=False))
        run.add("long", list(range(250)) * 3, 5), run.add("short", list(range(33)), 5)
        return run.finish()

    assert chunks(chunk_ends.scheduler) == chunks(Scheduler)


@pytest.mark.parametrize("own", [Scheduler, AsyncScheduler])
def test_another_vllm_is_refused(config, own, monkeypatch):
    monkeypatch.setattr(Scheduler, "_preempt_request", lambda self, *args, **kwargs: None)
    with pytest.raises(RuntimeError, match=r"Scheduler\._preempt_request of vLLM .* fingerprint"):
        start(chunk_ends.scheduler, config, Case(ahead=own is AsyncScheduler))
