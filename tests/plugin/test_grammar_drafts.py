"""JSON after thinking, with drafts: vLLM's scheduler, grammar and parser, and a model that wants to say a given text.

The token that ends thinking stands at every offset among the drafts; drafts behind it fit the grammar or do not.
"""

import json
from collections import deque
from dataclasses import dataclass, field

import pytest

pytest.importorskip("vllm")

from schedulers import MODEL, Case, Run, start, with_case
from test_streamed_parts import PARIS, TOOLS
from vllm import SamplingParams
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser import ParserManager
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm_exl3.guards import chunk_ends

DRAFTS = 7
SCHEMA = {
    "type": "object", "required": ["known", "weather"], "additionalProperties": False,
    "properties": {"known": {"type": "boolean"}, "weather": {"enum": ["sun", "rain"]}},
}  # fmt: skip
ANSWER = '{"known": true, "weather": "sun"}'
THINK_END, TOOL_CALL = "</think>", "<tool_call>"


@pytest.fixture(scope="module")
def config():
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(model=MODEL, max_model_len=2048, reasoning_parser="glm47").create_engine_config()


@pytest.fixture(scope="module")
def tokenizer(config):
    return StructuredOutputManager(config).tokenizer


@pytest.fixture(scope="module")
def manager(config):
    """One for all, so that the grammar is compiled once."""
    made = StructuredOutputManager(with_case(config, Case(drafts=DRAFTS)))
    yield made
    made.clear_backend()


@dataclass
class Wish:
    """What the model would say, and what is drafted instead of it from some position on."""

    tokens: list[int]
    drafted: list[int]

    def next(self, at: int) -> int:
        return self.tokens[at] if at < len(self.tokens) else self.tokens[-1]

    def draft(self, said: list[int]) -> list[int]:
        text = self.drafted if said == self.tokens[: len(said)] else said + self.drafted
        return (text[len(said) :] + [text[-1]] * DRAFTS)[:DRAFTS]


@dataclass
class Said:
    """Runs one request through a scheduler, as vLLM's engine does: the grammar's mask after the step is given out."""

    run: Run
    wish: Wish
    said: list[int] = field(default_factory=list)
    drafts: list[int] | None = None
    taken: int = 0  # drafts that were accepted

    def sample(self, output, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        names = list(output.num_scheduled_tokens)
        request = self.run.scheduler.requests.get(names[0])
        if request is None or request.is_prefill_chunk:  # over, or nothing to say yet
            return ModelRunnerOutput(names, {names[0]: 0}, [[]])
        real = output.scheduled_spec_decode_tokens.get(names[0], [])
        drafts = (self.drafts or [])[: len(real)]
        fit = len(drafts) if grammar is None else grammar.num_acceptable_drafts[0]
        new: list[int] = []
        for row in range(len(drafts) + 1):
            wanted = self.wish.next(len(self.said) + len(new))
            new.append(allowed(wanted, None if grammar is None else grammar.grammar_bitmask[row]))
            if row == len(drafts) or row >= fit or drafts[row] != new[-1]:
                break
            self.taken += 1
        self.said += new
        self.drafts = self.wish.draft(self.said)
        return ModelRunnerOutput(names, {names[0]: 0}, [new])

    def go(self) -> str:
        """Until the request is over; why it ended."""
        scheduler, flying, reason = self.run.scheduler, deque(), ""
        for _ in range(600):
            output = scheduler.schedule()
            if output.num_scheduled_tokens and not output.pending_structured_output_tokens:
                flying.append((output, self.sample(output, scheduler.get_grammar_bitmask(output))))
                output = None
            if flying and (len(flying) > int(self.run.case.ahead) or output is not None):
                reason = self.update(*flying.popleft()) or reason
            if output is not None and output.num_scheduled_tokens:
                scheduler.update_draft_token_ids_in_output(self.drafted(), output)
                flying.append((output, self.sample(output, scheduler.get_grammar_bitmask(output))))
            if not flying and not scheduler.has_unfinished_requests():
                return reason
        raise AssertionError(f"not over: {self.said}")

    def drafted(self) -> DraftTokenIds:
        return DraftTokenIds(["one"], [list(self.drafts or [])])

    def update(self, output, answer: ModelRunnerOutput) -> str:
        ended = self.run.scheduler.update_from_output(output, answer)
        if not self.run.case.ahead and self.drafts:
            self.run.scheduler.update_draft_token_ids(self.drafted())
            if request := self.run.scheduler.requests.get("one"):
                self.drafts = list(request.spec_token_ids)
        reasons = [one.finish_reason for some in ended.values() for one in some.outputs]
        return str(reasons[-1]) if reasons and reasons[-1] is not None else ""


def allowed(wanted: int, row) -> int:
    """The wanted token, or the first that the mask allows."""
    if row is None or int(row[wanted // 32]) >> (wanted % 32) & 1:
        return wanted
    return next(32 * at + bit for at, word in enumerate(row) for bit in range(32) if int(word) >> bit & 1)


def say(config, manager, tokenizer, ahead: bool, wish: Wish, grammar: StructuredOutputsParams | None = None) -> Said:
    """`grammar` is the schema above if nothing else is given."""
    params = SamplingParams(max_tokens=120, structured_outputs=grammar or StructuredOutputsParams(json=SCHEMA))
    params.structured_outputs._backend = "xgrammar"
    params.update_from_generation_config({}, eos_token_id=tokenizer.eos_token_id)
    run = start(chunk_ends.scheduler, config, Case(budget=300, drafts=DRAFTS, ahead=ahead))
    run.scheduler.structured_output_manager = manager
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the weather?"}], add_generation_prompt=True, tokenize=False
    )
    run.scheduler.add_request(Request(
        request_id="one", prompt_token_ids=tokenizer.encode(prompt), sampling_params=params, pooling_params=None,
        block_hasher=run.hasher,
    ))  # fmt: skip
    for request in run.scheduler.requests.values():
        manager.grammar_init(request)
        request.structured_output_request._grammar.result()
    return Said(run, wish)


def ids(tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def wishes(tokenizer, thinking: int) -> dict[str, Wish]:
    """The same text, drafted in the ways that can go wrong."""
    end, tool = tokenizer.convert_tokens_to_ids([THINK_END, TOOL_CALL])
    thought, answer = (ids(tokenizer, " the sun shines") * 9)[:thinking], ids(tokenizer, ANSWER)
    text = [*thought, end, *answer, tokenizer.eos_token_id]
    return {
        "right": Wish(text, text),
        "unfit behind the end": Wish(text, [*thought, end, *ids(tokenizer, "\n\nIt is sunny today and all week.")]),
        "an end too early": Wish(text, [*thought[: thinking // 2], end, *answer]),
        "a second end": Wish(text, [*thought, end, end, *answer]),
        "no end": Wish(text, thought * 3 + thought[:1] * 9 if thought else answer),
        "a tool call": Wish(text, [*thought, tool, *answer]),
    }


KINDS = ("right", "unfit behind the end", "an end too early", "a second end", "no end", "a tool call")


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_end_of_thinking_may_stand_anywhere_among_drafts(config, manager, tokenizer, ahead, kind):
    taken = 0
    for thinking in range(1, 2 + 2 * DRAFTS):
        one = say(config, manager, tokenizer, ahead, wishes(tokenizer, thinking)[kind])
        assert one.go() == "stop", (thinking, tokenizer.decode(one.said))
        assert one.said[: thinking + 1] == one.wish.tokens[: thinking + 1]
        answer = json.loads(tokenizer.decode(one.said[thinking + 1 :], skip_special_tokens=True))
        assert answer == json.loads(ANSWER)
        taken += one.taken
    assert taken, "no draft was accepted"


def tool_grammar(tokenizer, choice: str) -> StructuredOutputsParams:
    """What the product's parser asks for where a request offers tools."""
    request = ChatCompletionRequest(model="m", messages=[], tools=TOOLS, tool_choice=choice)
    parser = ParserManager.get_parser(
        tool_parser_name="glm47", reasoning_parser_name="glm47", enable_auto_tools=True, model_name=MODEL,
        tokenizer=tokenizer,
    )  # fmt: skip
    return parser(tokenizer, request.tools, chat_template_kwargs={}).adjust_request(request).structured_outputs


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("end", [THINK_END, ""])  # a tool call ends thinking, too
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_tool_call_may_begin_anywhere_among_drafts(config, manager, tokenizer, ahead, end, choice):
    taken = 0
    for thinking in range(1, 2 + DRAFTS):
        thought = (ids(tokenizer, " the sun shines") * 9)[:thinking]
        text = [*thought, *ids(tokenizer, end + PARIS), tokenizer.eos_token_id]
        for drafted in (text, [*thought, *ids(tokenizer, end + TOOL_CALL + "get_nothing")], thought + thought[:1] * 30):
            grammar = tool_grammar(tokenizer, choice)
            one = say(config, manager, tokenizer, ahead, Wish(text, drafted), grammar)
            assert one.go() == "stop" and one.said[: len(text)] == text, (thinking, tokenizer.decode(one.said))
            taken += one.taken
    assert taken, "no draft was accepted"


@pytest.mark.parametrize("ahead", [False, True])
def test_a_tool_call_that_the_model_wants_while_it_thinks(config, manager, tokenizer, ahead):
    """It would end thinking and be the answer's first token. 0.33.0 keeps it back, 0.32.0 ends with an error."""
    tool = tokenizer.convert_tokens_to_ids(TOOL_CALL)
    ends = set()
    for thinking in range(1, 2 + DRAFTS):
        text = [*ids(tokenizer, " the sun shines" * 9)[:thinking], tool, *ids(tokenizer, ANSWER)]
        one = say(config, manager, tokenizer, ahead, Wish(text, text))
        ends.add(one.go())
        assert hasattr(manager, "_masked_reasoning_ends") is (tool not in one.said)
    assert ("error" in ends) is not hasattr(manager, "_masked_reasoning_ends"), ends


def test_a_grammar_that_starts_a_token_late_is_seen(config, manager, tokenizer, monkeypatch):
    """What a wrong offset among the drafts would do: a first token behind thinking that no mask has seen."""
    bounds = manager._get_constraint_bounds

    def late(*args, **kwargs):
        seen = bounds(*args, **kwargs)
        return seen._replace(constraint_start=seen.constraint_start + 1) if seen.constraint_start else seen

    monkeypatch.setattr(manager, "_get_constraint_bounds", late)
    end, *thought = tokenizer.convert_tokens_to_ids([THINK_END]) + ids(tokenizer, " the sun shines")
    text = [*thought, end, *ids(tokenizer, "It is sunny.")]
    assert say(config, manager, tokenizer, False, Wish(text, text)).go() == "error"
