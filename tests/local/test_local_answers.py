"""What the served model says, through the OpenAI client."""

import json
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from launcher.canary import Answer, Question, fault
from launcher.settings import MODEL_ID

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather for a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def ask(client, question: str, **options) -> Answer:
    messages = [{"role": "user", "content": question}]
    reply = client.chat.completions.create(
        model=MODEL_ID, messages=messages, temperature=0, max_tokens=512, **options
    ).choices[0]
    return Answer(reply.message.content or "", reply.finish_reason == "stop")


def ask_streaming(client, question: str) -> Answer:
    messages = [{"role": "user", "content": question}]
    text, reason = "", None
    for chunk in client.chat.completions.create(
        model=MODEL_ID, messages=messages, temperature=0, max_tokens=512, stream=True
    ):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
    return Answer(text, reason == "stop")


def faults(client, questions, asker) -> list[str]:
    """Four at a time: they share steps with each other, as those of several users do."""
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda question: asker(client, question.question), questions))
    return [
        f"{question.question} -> {answer.text!r}: {wrong}"
        for question, answer in zip(questions, answers, strict=True)
        if (wrong := fault(question, answer))
    ]


def test_models_lists_the_id(client):
    assert [model.id for model in client.models.list()] == [MODEL_ID]


def test_there_are_enough_questions(questions):
    assert len({question.question for question in questions if question.kind == "fact"}) >= 40
    assert len([question for question in questions if question.kind == "count"]) >= 4


def test_every_question_is_answered(client, questions):
    assert faults(client, questions, ask) == []


def test_every_question_is_answered_streaming(client, questions):
    assert faults(client, questions, ask_streaming) == []


def test_streaming_says_the_same(client, questions):
    for question in questions[:3]:
        assert ask_streaming(client, question.question) == ask(client, question.question)


def test_counts_from_anywhere_to_anywhere(client):
    rng = random.Random(5)
    pairs = [sorted(rng.sample(range(100), 2)) for _ in range(12)] + [[0, 99], [98, 99]]
    counts = [Question(f"Count from {a} to {b}", (" ".join(map(str, range(a, b + 1))),), "count") for a, b in pairs]
    assert faults(client, counts, ask) == []


@pytest.mark.parametrize("city", ["Paris", "Berlin"])
def test_tool_call_is_parsed(client, city):
    messages = [{"role": "user", "content": f"What is the weather in {city}?"}]
    reply = client.chat.completions.create(
        model=MODEL_ID, messages=messages, tools=[WEATHER], temperature=0, max_tokens=512
    ).choices[0]
    assert reply.finish_reason == "tool_calls"
    (call,) = reply.message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": city}
    assert not reply.message.content


def test_tool_call_is_parsed_streaming(client):
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    name, arguments, text, reason = "", "", "", None
    for chunk in client.chat.completions.create(
        model=MODEL_ID, messages=messages, tools=[WEATHER], temperature=0, max_tokens=512, stream=True
    ):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
            for call in choice.delta.tool_calls or []:
                name += call.function.name or ""
                arguments += call.function.arguments or ""
    assert (name, json.loads(arguments), text.strip(), reason) == ("get_weather", {"city": "Paris"}, "", "tool_calls")


def test_reasoning_is_parsed(client, questions):
    fact = next(question for question in questions if question.kind == "fact")
    reply = client.chat.completions.create(
        model=MODEL_ID,
        messages=[{"role": "user", "content": fact.question}],
        reasoning_effort="high",
        temperature=0,
        max_tokens=512,
    ).choices[0]
    assert reply.message.reasoning.strip()
    assert fault(fact, Answer(reply.message.content or "", reply.finish_reason == "stop")) is None
    assert "think>" not in reply.message.content + reply.message.reasoning


def test_reasoning_is_parsed_streaming(client, questions):
    fact = next(question for question in questions if question.kind == "fact")
    reasoning, text = "", ""
    for chunk in client.chat.completions.create(
        model=MODEL_ID,
        messages=[{"role": "user", "content": fact.question}],
        reasoning_effort="high",
        temperature=0,
        max_tokens=512,
        stream=True,
    ):
        for choice in chunk.choices:
            reasoning += getattr(choice.delta, "reasoning", None) or ""
            text += choice.delta.content or ""
    assert reasoning.strip()
    assert fault(fact, Answer(text, finished=True)) is None


def test_context_beyond_the_limit_is_refused_clearly(client):
    from openai import BadRequestError

    with pytest.raises(BadRequestError, match="2048"):
        ask(client, "1 " * 4000)
