"""What one request may ask for, and what a client may do to the server by sending nothing, slowly, or too much."""

import json
import time
from dataclasses import fields
from types import SimpleNamespace

import pytest
from door_app import KEY, door, make_app, serving
from vllm_exl3.door import asked, connections, middleware, rules
from vllm_exl3.door.errors import Refusal
from vllm_exl3.door.rules import Rules, RulesError

from launcher import door_settings
from launcher.table import ROWS

CHAT = "/v1/chat/completions"
SMALL = Rules(max_body_mib=1, receive_timeout_s=1, max_connections=40)


@pytest.fixture(scope="module")
def small():
    with door(SMALL) as served:
        yield served


def refused(body: dict, limits: Rules | None = None) -> Refusal | None:
    try:
        asked.refuse_too_much(asked.read(json.dumps(body).encode()), limits or Rules())
    except Refusal as refusal:
        return refusal
    return None


TOO_MUCH = {
    "n": [17, 16384, "16384", 17.0, 1e300], "best_of": [17],
    "prompt": [["a"] * 65, [[1, 2]] * 65], "messages": [[[{"role": "user"}]] * 65],
    "logprobs": [21, -1, "21"], "top_logprobs": [21], "prompt_logprobs": [-1],
    "stop": [["x"] * 65, "x" * 1025, ["y" * 1025]], "stop_sequences": [["x"] * 65], "stop_token_ids": [[1] * 65],
    "bad_words": [["x"] * 65],
}  # fmt: skip
ENOUGH = {
    "n": [1, 16, "16", True, None], "best_of": [None], "prompt": ["a" * 10_000, ["a"] * 64, list(range(5000)), []],
    "messages": [[{"role": "user"}] * 1000, []], "logprobs": [True, False, 0, 20], "top_logprobs": [20],
    "prompt_logprobs": [None], "stop": [None, "x", ["x"] * 64, 5], "stop_sequences": [[]], "stop_token_ids": [[7]],
    "bad_words": [["x"]],
}  # fmt: skip


def test_every_limited_field_is_tried():
    assert set(TOO_MUCH) | {"prompts"} == set(ENOUGH) | {"prompts"} == set(asked.LIMITS)


@pytest.mark.parametrize("holder", ["", "sampling_params"])
@pytest.mark.parametrize("field", TOO_MUCH)
def test_too_much_is_refused_with_field_limit_and_setting(field, holder):
    for value in TOO_MUCH[field]:
        refusal = refused({holder: {field: value}} if holder else {field: value})
        assert refusal and refusal.status == 400 and refusal.param == field, value
        assert "MAX_" in refusal.message or "1024" in refusal.message
    for value in ENOUGH[field]:
        assert refused({holder: {field: value}} if holder else {field: value}) is None, value


def test_not_a_number_is_not_within_a_limit():
    with pytest.raises(Refusal):
        asked.refuse_too_much(asked.read(b'{"n": NaN}'), Rules())


def test_the_last_of_two_equal_names_counts_as_it_does_in_vllm():
    with pytest.raises(Refusal):
        asked.refuse_too_much(asked.read(b'{"n": 1, "n": 16384}'), Rules())


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b"\xff", b"7", b"a=b&c=d"])
def test_what_is_no_object_is_left_to_vllms_own_refusal(body):
    assert asked.read(body) is None


def test_a_body_that_is_too_deep_is_refused():
    with pytest.raises(Refusal, match="nested too deeply"):
        asked.read(b'{"m":' + b"[" * 200_000 + b"]" * 200_000 + b"}")


def test_the_size_of_grammars_is_limited_together():
    schema = {"type": "object", "properties": {f"name{i}": {"type": "string"} for i in range(20)}}
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": schema}} for i in range(100)]
    assert refused({"tools": tools}) is None
    refusal = refused({"tools": tools}, Rules(max_grammar_kib=10))
    assert refusal.status == 400 and "MAX_GRAMMAR_KIB" in refusal.message


SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "pattern": "x+"}}}
OUTLINE = {"type": "object", "properties": {"a": {"type": "string"}}}


@pytest.mark.parametrize("body, parts", [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}, [("json", SCHEMA)]),
    ({"response_format": {"type": "json_object"}}, []), ({"response_format": {"type": "text"}}, []),
    ({"response_format": {"type": "structural_tag", "format": {}}},
     [("structural_tag", {"type": "structural_tag", "format": {}})]),
    ({"response_format": {"type": "structural_tag", "structures": [{"begin": "a", "schema": SCHEMA, "end": "b"}],
                          "triggers": ["a"]}}, [("json", SCHEMA)]),
    ({"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}}, [("json", SCHEMA)]),
    ({"output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}}}, [("json", SCHEMA)]),
    ({"structured_outputs": {"regex": "a+"}}, [("regex", "a+")]),
    ({"structured_outputs": {"choice": ["a", "b"]}}, [("choice", ["a", "b"])]),
    ({"structured_outputs": {"grammar": "root ::= x"}}, [("grammar", "root ::= x")]),
    ({"structured_outputs": {"json": SCHEMA}}, [("json", SCHEMA)]),
    ({"sampling_params": {"structured_outputs": {"regex": "a+"}}}, [("regex", "a+")]),
    ({"guided_regex": "a+"}, [("regex", "a+")]),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]}, [("json", OUTLINE)]),
    ({"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": SCHEMA}}]},
     [("json", SCHEMA)]),
    ({"tools": [{"type": "function", "name": "f", "strict": True, "parameters": SCHEMA}]}, [("json", SCHEMA)]),
    ({"tools": [{"name": "f", "input_schema": SCHEMA}]}, [("json", OUTLINE)]),
    ({"tools": "x", "response_format": 7, "structured_outputs": [], "text": "hello"}, []),
])  # fmt: skip
def test_every_form_of_a_grammar_is_found(body, parts):
    expected = [(kind, value if isinstance(value, str) else json.dumps(value)) for kind, value in parts]
    assert asked.grammars_of(body) == expected


# Bodies over the network


def test_a_body_over_the_limit_is_refused_before_it_is_read(small):
    body = b" " * (20 << 20)
    began = time.monotonic()
    status, said = small.ask("POST", CHAT, KEY, body)
    assert (status, json.loads(said)["error"]["code"]) == (413, "request_too_large")
    assert "MAX_BODY_MIB" in json.loads(said)["error"]["message"] and time.monotonic() - began < 10
    status, said = small.ask("POST", "/v1/messages", KEY, body)
    assert (status, json.loads(said)["error"]["type"]) == (413, "request_too_large")
    assert small.ask("POST", CHAT, "wrong", body)[0] == 401


def test_a_body_of_unknown_length_is_counted(small):
    head = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    assert small.raw(head.encode() + chunk * 20 + b"0\r\n\r\n").startswith(b"HTTP/1.1 413")


def test_a_client_that_asks_first_is_told_before_it_sends(small):
    head = (f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\nExpect: 100-continue\r\n"
            f"Content-Length: {20 << 20}\r\n\r\n")  # fmt: skip
    assert small.raw(head.encode()).startswith(b"HTTP/1.1 413")


def test_a_slow_body_is_refused(small):
    head = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 100\r\n\r\n{{"
    assert small.raw(head.encode()).startswith(b"HTTP/1.1 408")


def test_a_body_reaches_the_app_whole():
    app, body = make_app(), {"text": "x" * 300_000}
    app.router.routes.clear()
    seen = []

    async def echo(request):
        seen.append(await request.json())

    app.add_route("/v1/completions", echo, methods=["POST"])
    middleware.install(app, Rules(), [KEY], "", None)
    with serving(app) as served:
        served.ask("POST", "/v1/completions", KEY, json.dumps(body).encode())
    assert seen == [body]


# Connections


def test_two_hundred_silent_connections_starve_nobody():
    with door(Rules(receive_timeout_s=2)) as served:
        silent = [served.connect() for _ in range(200)]
        for one in silent[:100]:
            one.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n")
        times = []
        for _ in range(20):
            began = time.monotonic()
            assert served.ask("GET", "/v1/models")[0] == 401
            times.append(time.monotonic() - began)
        assert sorted(times)[10] < 0.5
        assert [ended_within(one, 10) for one in silent] == [True] * 200
    for one in silent:
        one.close()


def test_new_connections_take_the_place_of_silent_ones(small):
    silent = [small.connect() for _ in range(SMALL.max_connections + 10)]
    assert small.ask("GET", "/v1/models")[0] == 401
    for one in silent:
        one.close()


def test_an_endless_head_is_refused(small):
    head = b"GET /v1/models HTTP/1.1\r\nHost: a\r\n" + b"".join(b"X-%d: %s\r\n" % (i, b"y" * 1000) for i in range(300))
    answer = small.raw(head)  # which may be lost, since the connection ends while the head is still coming
    assert answer.startswith(b"HTTP/1.1 431") or not answer


def test_a_head_that_trickles_is_ended(small):
    with small.connect() as one:
        began = time.monotonic()
        one.sendall(b"GET /v1/models HTTP/1.1\r\n")
        assert ended_within(one, 5) and time.monotonic() - began >= SMALL.receive_timeout_s * 0.9


def test_a_connection_that_is_kept_is_served_again(small):
    request = b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n"
    with small.connect() as one:
        one.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        time.sleep(SMALL.receive_timeout_s * 1.5)  # an idle connection ends by uvicorn's own limit, not by this one
        one.sendall(request)
        assert b"401" in one.recv(65536) + one.recv(65536)


def ended_within(one, seconds: float) -> bool:
    one.settimeout(seconds)
    try:
        return one.recv(4096) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


def test_the_guard_goes_around_either_protocol_of_uvicorn_once():
    from uvicorn.protocols.http.h11_impl import H11Protocol
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    for protocol in (H11Protocol, HttpToolsProtocol):
        config = SimpleNamespace(http_protocol_class=protocol)
        connections.guard(config, Rules())
        guarded = config.http_protocol_class
        connections.guard(config, Rules())
        assert config.http_protocol_class is guarded and issubclass(guarded, protocol)


# Rules


def test_the_launchers_settings_are_the_rules():
    told = json.loads(door_settings.door_rules(lambda name: ROWS[name].default))
    assert rules.parse({door_settings.NAME: json.dumps(told)}) == Rules() and door_settings.NAME == rules.NAME
    assert set(told) == {field.name for field in fields(Rules)}


def test_rules_are_read_from_the_environment():
    assert rules.parse({}) == rules.parse({rules.NAME: " "}) == Rules()
    given = {"metrics": "open", "max_n": 2, "cors_origins": ["http://a"], "api_docs": True}
    assert rules.parse({rules.NAME: json.dumps(given)}) == Rules(
        metrics="open", max_n=2, cors_origins=("http://a",), api_docs=True
    )


@pytest.mark.parametrize("text, said", [
    ("{", "is not JSON"), ("[]", "is list"), ('{"max_m": 1}', "has 'max_m'"), ('{"metrics": "all"}', "key or open"),
    ('{"max_n": 0}', "max_n is 0"), ('{"max_n": "1"}', "max_n is '1'"), ('{"max_n": true}', "max_n is True"),
    ('{"cors_origins": "x"}', "a list of texts"), ('{"api_docs": 1}', "api_docs is 1"),
])  # fmt: skip
def test_rules_that_cannot_be_are_refused(text, said):
    with pytest.raises(RulesError, match=said):
        rules.parse({rules.NAME: text})
