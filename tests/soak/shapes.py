"""Answers that must have a shape, streamed beside the sessions of a soak: a tool call, and JSON after thinking.

What they say is not scored: a grammar may forbid the model's best token.
"""

from __future__ import annotations

import json

from openai import APIStatusError

QUESTION = "What is the weather in Paris?"
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
KEYS = {"known": [True, False], "weather": ["sun", "rain", "unknown"]}
SCHEMA = {
    "type": "object",
    "properties": {name: {"enum": values} for name, values in KEYS.items()},
    "required": list(KEYS),
    "additionalProperties": False,
}


async def streamed(client, model: str, **more) -> dict[str, str]:
    """All parts of a streamed answer put together, and why it ended."""
    parts = dict.fromkeys(("content", "reasoning", "name", "arguments", "reason"), "")
    messages = [{"role": "user", "content": QUESTION}]
    stream = await client.chat.completions.create(
        model=model, messages=messages, temperature=0, max_tokens=400, stream=True, **more
    )
    async with stream:
        async for event in stream:
            for choice in event.choices:
                delta = choice.delta
                parts["content"] += delta.content or ""
                parts["reasoning"] += getattr(delta, "reasoning", None) or ""
                parts["reason"] = choice.finish_reason or parts["reason"]
                for call in delta.tool_calls or []:
                    parts["name"] += call.function.name or ""
                    parts["arguments"] += call.function.arguments or ""
    return parts


def tool_fault(parts: dict[str, str]) -> str | None:
    try:
        arguments = json.loads(parts["arguments"])
    except ValueError:
        return f"a tool call with arguments that are no JSON: {parts['arguments']!r}"
    if parts["name"] != "get_weather" or set(arguments) != {"city"} or not isinstance(arguments["city"], str):
        return f"a tool call that was not offered: {parts['name']}({arguments})"
    return None if parts["reason"] == "tool_calls" else f"a tool call that ended with {parts['reason']!r}"


def json_fault(parts: dict[str, str]) -> str | None:
    try:
        said = json.loads(parts["content"])
    except ValueError:
        return f"an answer that is no JSON: {parts['content']!r}, ended with {parts['reason']!r}"
    fits = isinstance(said, dict) and set(said) == set(KEYS) and all(said[name] in KEYS[name] for name in KEYS)
    if not fits:
        return f"an answer that is not of the schema: {said}"
    return None if parts["reasoning"].strip() else "JSON without the thinking that was asked for"


ASKED = {
    "tool call": ({"tools": [TOOL]}, tool_fault),
    "JSON after thinking": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}},
         "reasoning_effort": "high"},
        json_fault,
    ),
}  # fmt: skip


async def faults(client, model: str, times: int) -> list[str]:
    """What is wrong with `times` answers of each kind, one after the other; a refusal of the server is a fault too."""
    found = []
    for number in range(times):
        for kind, (more, fault) in ASKED.items():
            try:
                wrong = fault(await streamed(client, model, **more))
            except APIStatusError as error:
                wrong = f"HTTP {error.status_code}: {error.message}"
            if wrong:
                found.append(f"{kind}, number {number}: {wrong}")
    return found
