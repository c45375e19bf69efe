"""The judgement of shapes on made-up answers; tests/local asks a real server."""

import pytest

pytest.importorskip("openai")

from shapes import json_fault, tool_fault

CALL = {"name": "get_weather", "arguments": '{"city": "Paris"}', "reason": "tool_calls"}
JSON = {"content": '{"known": false, "weather": "unknown"}', "reasoning": "Nobody knows.", "reason": "stop"}


def test_good_ones_pass():
    assert tool_fault(CALL) is None and json_fault(JSON) is None


@pytest.mark.parametrize(("changes", "words"), [
    ({"arguments": '{"city": "Par'}, "no JSON"), ({"name": "get_weatherget_weather"}, "not offered"),
    ({"arguments": '{"town": "Paris"}'}, "not offered"), ({"reason": "stop"}, "ended with 'stop'"),
])  # fmt: skip
def test_a_bad_tool_call_is_told(changes, words):
    assert words in tool_fault(CALL | changes)


@pytest.mark.parametrize(("changes", "words"), [
    ({"content": '{"known": false, "wea'}, "no JSON"), ({"content": '{"known": false}'}, "not of the schema"),
    ({"content": '{"known": 2, "weather": "sun"}'}, "not of the schema"), ({"reasoning": " "}, "without the thinking"),
])  # fmt: skip
def test_bad_json_is_told(changes, words):
    assert words in json_fault(JSON | changes)
