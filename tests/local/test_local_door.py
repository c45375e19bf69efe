"""The door of a running server with a key: real clients get in with it, nobody else, and nobody stalls the others."""

import json
import threading
import time

import openai
import pytest
from launching import new_launch
from openai import OpenAI

from launcher import canary
from launcher.settings import MODEL_ID

KEY = "sk-local-door-key"
ASKED = {"model": MODEL_ID, "messages": [{"role": "user", "content": "Which port does the API use?"}], "max_tokens": 40,
         "temperature": 0}  # fmt: skip
# Patterns of many long repetitions take half a minute of processor time, however small the vocabulary.
PATTERN = "|".join(f"([a-z ]{{0,{900 + number}}}x){{0,{900 + number}}}" for number in range(400))
BOMBS = [
    {"structured_outputs": {"regex": PATTERN}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {
        "type": "object", "properties": {
            f"p{i}": {"type": "string", "pattern": f"^(.{{0,900}}x){{0,900}}.{{0,{900 + i}}}$"} for i in range(40)
        }}}}},
]  # fmt: skip


@pytest.fixture(scope="module")
def keyed(tmp_path_factory, caches):
    one = new_launch(tmp_path_factory.mktemp("door") / "run", caches, "--max-body-mib", "2", "--grammar-timeout-s", "1")
    started = one.run("start", "--detach", VLLM_API_KEY=KEY)
    try:
        assert started.returncode == 0, started.stderr
        yield one
    finally:
        one.run("stop")
    assert one.leaves_nothing()


@pytest.fixture(scope="module")
def client(keyed):
    return OpenAI(base_url=f"http://127.0.0.1:{keyed.port}/v1", api_key=KEY, max_retries=0, timeout=120)


def post(keyed, path: str, body: dict, **headers: str) -> tuple[int, bytes]:
    named = {"Content-Type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    return canary.request(keyed.port, "POST", path, json.dumps(body), named, 120)


def test_a_completion_by_any_route_asks_for_the_key(keyed):
    for path in ("/v1/chat/completions", "/invocations", "/v1/messages", "/v1/completions", "/tokenize"):
        assert post(keyed, path, ASKED)[0] == 401, path
        assert post(keyed, path, ASKED, Authorization="Bearer wrong")[0] == 401, path
    for path in ("/metrics", "/version", "/load", "/docs", "/openapi.json"):
        assert canary.request(keyed.port, "GET", path)[0] == 401, path
    assert canary.request(keyed.port, "GET", "/health")[0] == 200


def test_openais_client_answers_with_the_key_and_reads_the_refusals(keyed, client):
    assert "8888" in client.chat.completions.create(**ASKED).choices[0].message.content
    stranger = OpenAI(base_url=client.base_url, api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError) as refused:
        stranger.chat.completions.create(**ASKED)
    assert refused.value.code == "invalid_api_key"
    with pytest.raises(openai.BadRequestError, match="MAX_N") as refused:
        client.chat.completions.create(**ASKED, n=17)
    assert refused.value.param == "n"
    with pytest.raises(openai.APIStatusError) as refused:
        client.chat.completions.create(model=MODEL_ID, messages=[{"role": "user", "content": "x" * (3 << 20)}])
    assert (refused.value.status_code, refused.value.code) == (413, "request_too_large")


def test_anthropics_header_opens_and_its_form_is_answered(keyed):
    status, said = post(keyed, "/v1/messages", ASKED, x_api_key=KEY)
    assert status == 200 and json.loads(said)["type"] == "message"
    status, said = post(keyed, "/v1/messages", ASKED | {"stop_sequences": ["x"] * 65}, x_api_key=KEY)
    assert (status, json.loads(said)["error"]["type"]) == (400, "invalid_request_error")


def test_the_launcher_looks_in_without_the_key(keyed):
    status = keyed.run("status")
    assert status.returncode == 0, status.stdout
    assert "0 running, 0 waiting" in status.stdout
    assert KEY not in status.stdout + (keyed.run_dir / "local.log").read_text()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("bomb", BOMBS)
def test_a_grammar_that_takes_for_ever_is_refused(keyed, client, bomb, stream):
    with pytest.raises(openai.BadRequestError, match="GRAMMAR_TIMEOUT_S"):
        client.chat.completions.create(**ASKED, stream=stream, extra_body=bomb)


def test_others_are_answered_meanwhile(keyed, client):
    refusals = []

    def throw(number: int) -> None:
        try:
            bomb = {"structured_outputs": {"regex": PATTERN + "q" * number}}
            client.chat.completions.create(**ASKED, extra_body=bomb)
        except openai.BadRequestError as error:
            refusals.append(error.code)

    bombs = [threading.Thread(target=throw, args=(number,)) for number in range(6)]
    for bomb in bombs:
        bomb.start()
    longest = 0.0
    while any(bomb.is_alive() for bomb in bombs):
        began = time.monotonic()
        assert client.models.list().data[0].id == MODEL_ID
        longest = max(longest, time.monotonic() - began)
        time.sleep(0.05)
    assert refusals == ["grammar_too_complex"] * 6 and longest < 2


def test_grammars_that_are_fine_are_kept_to(client):
    schema = {"type": "object", "properties": {"port": {"type": "integer"}}, "required": ["port"],
              "additionalProperties": False}  # fmt: skip
    said = client.chat.completions.create(
        **ASKED | {"max_tokens": 60},
        response_format={"type": "json_schema", "json_schema": {"name": "port", "schema": schema}},
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )  # fmt: skip
    assert said.choices[0].finish_reason in ("stop", "length")
    wrong = {"structured_outputs": {"regex": "((("}}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**ASKED, extra_body=wrong)
    assert "GRAMMAR_TIMEOUT_S" not in str(refused.value)
