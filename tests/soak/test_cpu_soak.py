"""The soak on vLLM's CPU engine: requests in company, taken back and set back for lack of cache, 200 turns of them.

What this engine has not (arms.CPU_LACKS: prefix cache, drafts, chunks, graphs, an indexer) only a GPU can show.
"""

import importlib
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

import arms
import bugs
import engine
import judge
import probes
import state_judge
from drive import Soak
from engines import in_process_vllm
from sessions import Plan, Sizes, make_plan, shrink
from words import Words

LOCAL = Path(__file__).parents[2] / "models" / "local"
CPU = arms.Platform("cpu")
LONGEST, TURNS = 300, 200
# Room for two or three contexts, so that one has to go when another grows into its second block.
BLOCKS = 14
# The engines compute in fp32; what differs is the bf16 cache of the attention that decoded tokens read.
BAR = 0.05
# Of states, for the same reason.
LENGTHS = (30, 61, 257)
STATE_BAR = 2**-10
SHORT = Sizes(asked=(7, 24), answer=(1, 6), start=200)


class Both:
    """An engine that answers and one that judges it."""

    def __init__(self) -> None:
        whole = {"max_model_len": LONGEST, "max_num_batched_tokens": 512, "max_num_seqs": 8}
        self.llm = engine.start(LOCAL, CPU, num_gpu_blocks_override=BLOCKS, disable_log_stats=False, **whole)
        self.read = judge.Reader(engine.start_judge(LOCAL, CPU, "auto", LONGEST))
        self.words, self.edges = Words(LOCAL), engine.edges_of(self.llm, LONGEST)

    def plan(self, seed: int, sessions: int) -> Plan:
        return make_plan(seed, sessions, self.edges, SHORT, turns=(3, 3))

    def soak(self, plan: Plan) -> Soak:
        soak = Soak(self.llm, self.words, plan)
        soak.run()
        return soak

    def findings(self, plan: Plan) -> list[judge.Finding]:
        return judge.findings(judge.score(self.read, self.soak(plan).answers), BAR)

    def states(self) -> list[state_judge.Measured]:
        """Of some texts in company, one of them beyond a state block, and of three tokens more that are decoded."""
        asked = [(f"s{i}", self.words.prefix(i, length)) for i, length in enumerate(LENGTHS)]
        found = probes.ask(self.llm, asked, decoded=3)
        return state_judge.measure(self.read.state, found)


@pytest.fixture(scope="module")
def both():
    with in_process_vllm():
        both = Both()
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # hardly slower for rows this few, and many times faster beside other programs
        yield both
        torch.set_num_threads(threads)
        both.llm.llm_engine.engine_core.shutdown()
        both.read.llm.llm_engine.engine_core.shutdown()


@contextmanager
def planted(plant, llm):
    """For as long as it lasts; what a bug replaces comes back."""
    with pytest.MonkeyPatch.context() as patch:
        pool = importlib.import_module("vllm.v1.core.block_pool").BlockPool
        for holder, name in ((importlib.import_module(bugs.KDA), "fused_recurrent_kda"), (pool, "get_new_blocks")):
            patch.setattr(holder, name, getattr(holder, name))
        plant(llm)
        yield


@pytest.fixture(scope="module")
def long_soak(both):
    sessions = TURNS // 3 + 4  # of three turns, where they fit
    plan = both.plan(0, sessions)
    assert plan.turns >= TURNS
    return both.soak(plan)


def test_two_hundred_turns_say_what_they_would_say_alone(both, long_soak):
    scored = judge.score(both.read, long_soak.answers)
    assert judge.findings(scored, BAR) == []
    assert judge.floor(scored, least=0.0) <= BAR
    assert len(scored) >= TURNS and sum(len(one.margins) for one in scored) > 2 * TURNS


def test_the_long_soak_took_requests_back_and_set_some_back(both, long_soak):
    """Without, its silence would say nothing."""
    assert long_soak.counts.aborts > 10 and long_soak.counts.most_at_once > 4
    assert engine.metrics(both.llm)["preemptions"] > 0
    asked = {len(answer.prompt) for answer in long_soak.answers}
    assert {both.edges.block - 1, both.edges.block, both.edges.block + 1} <= asked


def test_a_plan_run_twice_says_the_same(both):
    plan = both.plan(1, 8)
    first, second = (both.soak(plan) for _ in range(2))
    assert first.answers == second.answers
    # The counter of requests goes on, what happens does not depend on it.
    assert first.counts == second.counts


def test_one_made_up_token_is_found(both, long_soak):
    answer = max(long_soak.answers, key=lambda one: len(one.tokens))
    wrong = replace(answer, tokens=[*answer.tokens[:-1], (answer.tokens[-1] + 1) % both.words.vocabulary])
    found = judge.findings(judge.score(both.read, [wrong]), BAR)
    assert [(one.session, one.turn, one.position) for one in found] == [
        (answer.session, answer.turn, len(answer.tokens) - 1)
    ]


def test_noise_moves_every_reading_a_little_and_excuses_no_made_up_token(both, long_soak):
    answer = max(long_soak.answers, key=lambda one: len(one.tokens))
    first, second = both.read.again(answer.whole, 2), both.read.again(answer.whole, 2)
    assert first == second != both.read.again(answer.whole, 3) and both.read(answer.whole) == both.read(answer.whole)
    taken = [[row[token] for row, token in zip(rows[1:], answer.whole[1:], strict=True)]
             for rows in (both.read(answer.whole), first)]  # fmt: skip
    moved = sorted(abs(one - other) for one, other in zip(*taken, strict=True))
    assert 0 < moved[len(moved) // 2] < 0.2
    wrong = replace(answer, tokens=[*answer.tokens[:-1], (answer.tokens[-1] + 1) % both.words.vocabulary])
    assert judge.findings(judge.score(both.read, [wrong], both.read.again), BAR)


def test_states_of_neighbours_are_found_and_shrunk_to_few_sessions(both):
    """Planted anew in each run, so that a run depends on its plan alone."""

    def fails(plan: Plan) -> bool:
        with planted(bugs.state_of_a_neighbour, both.llm):
            return bool(both.findings(plan))

    plan = both.plan(2, 10)
    assert fails(plan)
    small, used = shrink(plan, fails, reruns=6)
    assert len(small.sessions) < len(plan.sessions) and used <= 6 and fails(small)
    assert both.findings(small) == [], "the smaller plan must fail by the bug alone"


def test_nan_in_states_that_run_is_found(both):
    """A step begins with NaN in every state, those of running requests included."""
    plan = both.plan(3, 8)
    with planted(nan_everywhere, both.llm):
        soak = both.soak(plan)
    assert judge.findings(judge.score(both.read, soak.answers), BAR)
    assert any(answer.nan for answer in soak.answers), "no request that asks for log-probabilities saw it"


def test_states_in_company_are_those_of_a_cold_run(both):
    """After the prompt and, where tokens were decoded in company, after some of the answer; latents are there too."""
    measured = both.states()
    assert len({(one.session, one.when) for one in measured}) == 2 * len(LENGTHS)
    assert {one.kind for one in measured} == {"KDA recurrent", "KDA conv", "latent", "latent, worst row"}
    assert len({one.layer for one in measured}) == 4
    assert max(one.error for one in measured) < STATE_BAR, state_judge.largest(measured)


def test_a_neighbours_state_is_found_in_the_states(both):
    with planted(bugs.state_of_a_neighbour, both.llm):
        measured = both.states()
    found = state_judge.verdict(measured, state_judge.bars({}, "auto"))["findings"]
    assert {one["when"] for one in found} == {"answer"}, "it is planted where tokens are decoded"
    assert {"KDA recurrent", "latent, worst row"} <= {one["kind"] for one in found}


def nan_everywhere(llm) -> None:
    def around(original):
        def fused_recurrent_kda(*args, **kwargs):
            bugs.fill_with_nan(llm, list(range(BLOCKS)))
            return original(*args, **kwargs)

        return fused_recurrent_kda

    bugs.wrapped(importlib.import_module(bugs.KDA), "fused_recurrent_kda", around)


def test_new_blocks_full_of_nan_change_nothing(both):
    """The probe for vllm#56524: nothing reads a recycled state before it is written, here without a prefix cache."""
    assert {tuple(state.shape[1:]) for state in bugs.recurrent_states(both.llm)} == {(2, 128, 128)}
    with planted(bugs.nan_in_new_blocks, both.llm):
        assert both.findings(both.plan(4, 8)) == []
