"""Streamed answers equal whole ones, however many tokens a step has: vLLM's parser as the product asks for it.

Drafts make steps of several tokens; a step may end inside a character, a word or a tag.
"""

import json
import random

import pytest

pytest.importorskip("vllm")

from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser import ParserManager

from launcher import plan, vllm_flags

MODEL = "models/local"
TOOLS = [{
    "type": "function",
    "function": {
        "name": "get_weather", "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}]  # fmt: skip
PARIS = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>"
TURIN = (
    "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Zürich \"Süd\" 東京 <b> 🙂</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
)  # fmt: skip
TEXTS = {
    "plain": "I think.</think>The sky is blue. The sky is blue.",
    "no thinking": "</think>Yes.",
    "thinking only": "I think and think",
    "non-ASCII": "Grüß Gott, 東京 🙂 e\u0301</think>Zürich – 東京 🙂🙂 ñandú",
    "lines": "a\n\nb\n</think>\n\n- one\n- two\n\n```c\nif (a < b && c > d) {}\n```\n",
    "markup": "is <b> here </b>?</think>a < b, <tool, </thin, <think, 1 << 3 <",
    "tool": f"Let me look.</think>{PARIS}",
    "text and tools": f"Let me look.</think>Both:\n{PARIS}{TURIN}",
    "tool in thinking": f"I look {PARIS}",
    "no arguments": "now</think><tool_call>get_weather</tool_call>",
}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def parser_class(tokenizer):
    names = {flag.name: flag.value({}, {}) for flag in vllm_flags.FLAGS if flag.name.endswith("-parser")}
    assert all(plan.SERVER_FLAGS[plan.SERVER_FLAGS.index(name) + 1] == value for name, value in names.items())
    return ParserManager.get_parser(
        tool_parser_name=names["--tool-call-parser"], reasoning_parser_name=names["--reasoning-parser"],
        enable_auto_tools=True, model_name=MODEL, tokenizer=tokenizer,
    )  # fmt: skip


def asked(tools: bool) -> ChatCompletionRequest:
    more = {"tools": TOOLS, "tool_choice": "auto"} if tools else {}
    return ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "Well?"}], stream=True, **more)


def steps(tokens: list[int], sizes) -> list[list[int]]:
    cut, at = [], 0
    while at < len(tokens):
        cut.append(tokens[at : at + next(sizes)])
        at += len(cut[-1])
    return cut


def texts(tokenizer, cut: list[list[int]]) -> list[str]:
    """What a detokenizer adds with each step; bytes of an unfinished character wait."""
    known, tokens, added = "", [], []
    for step in cut:
        tokens = tokens + step
        text = tokenizer.decode(tokens, skip_special_tokens=False)
        whole = text.rstrip("\ufffd") if len(added) + 1 < len(cut) else text
        added.append(whole[len(known) :])
        known = whole
    return added


def new_parser(parser_class, tokenizer, tools: bool):
    request = asked(tools)
    return parser_class(tokenizer, request.tools, chat_template_kwargs={}), request


def streamed(parser_class, tokenizer, cut: list[list[int]], tools: bool, prompt: list[int]) -> dict:
    parser, request = new_parser(parser_class, tokenizer, tools)
    parts, calls = {"reasoning": "", "content": ""}, {}
    added = texts(tokenizer, cut)
    for number, (step, text) in enumerate(zip(cut, added, strict=True), 1):
        delta = parser.parse_delta(text, step, request, prompt_token_ids=prompt, finished=number == len(cut))
        for name in parts:
            parts[name] += (getattr(delta, name, None) or "") if delta else ""
        for call in (delta.tool_calls if delta else None) or []:
            name, arguments = calls.get(call.index, ("", ""))
            more = call.function
            calls[call.index] = (name + (more.name or ""), arguments + (more.arguments or ""))
    return parts | {"tools": [(name, json.loads(said or "{}")) for name, said in calls.values()]}


def whole(parser_class, tokenizer, tokens: list[int], tools: bool) -> dict:
    parser, request = new_parser(parser_class, tokenizer, tools)
    text = tokenizer.decode(tokens, skip_special_tokens=False)
    reasoning, content, calls = parser.parse(text, request, enable_auto_tools=True, model_output_token_ids=tokens)
    said = [(call.name, json.loads(call.arguments or "{}")) for call in calls or []]
    return {"reasoning": reasoning or "", "content": content or "", "tools": said}


def cuts(tokens: list[int], name: str):
    for size in range(1, 9):
        yield steps(tokens, iter(lambda size=size: size, None))
    chance = random.Random(name)
    for _ in range(40):
        yield steps(tokens, iter(lambda: chance.randint(1, 8), None))


def comparable(parts: dict, text: str) -> dict:
    """A whole answer loses the white space in front of a tool call, a streamed one has sent it by then."""
    return parts | {"content": parts["content"].rstrip()} if "<tool_call>" in text else parts


PROMPT = "[gMASK]<sop><|user|>Well?<|assistant|><think>"


@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize("name", TEXTS)
def test_streamed_equals_whole(parser_class, tokenizer, name, tools):
    tokens, prompt = (tokenizer.encode(text, add_special_tokens=False) for text in (TEXTS[name], PROMPT))
    expected = comparable(whole(parser_class, tokenizer, tokens, tools), TEXTS[name])
    assert "Paris" not in TEXTS[name] or not tools or expected["tools"], "the text's call was not read"
    for cut in cuts(tokens, name):
        assert comparable(streamed(parser_class, tokenizer, cut, tools, prompt), TEXTS[name]) == expected, cut


@pytest.mark.parametrize("name", ["plain", "tool"])
def test_repeated_text_is_seen(parser_class, tokenizer, name, monkeypatch):
    added = texts
    monkeypatch.setitem(globals(), "texts", lambda *args: [2 * text if number == 4 else text
                                                           for number, text in enumerate(added(*args))])  # fmt: skip
    tokens, prompt = (tokenizer.encode(text, add_special_tokens=False) for text in (TEXTS[name], PROMPT))
    said = streamed(parser_class, tokenizer, steps(tokens, iter(lambda: 2, None)), True, prompt)
    assert said != whole(parser_class, tokenizer, tokens, True)
