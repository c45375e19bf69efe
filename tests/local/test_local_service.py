"""The running server as its owner meets it: status, log, a second start, counters, loops, cache, canary."""

import json

import pytest
from launching import MODEL, Launch, last_line

from launcher import canary, counters, service
from launcher.errors import Exit
from launcher.settings import HOST, MODEL_ID
from launcher.state import StateFile

# vLLM's developer mode has these; the plugin's route must not have brought them along.
DEVELOPER_ROUTES = ("/reset_prefix_cache", "/reset_mm_cache", "/collective_rpc", "/sleep", "/wake_up", "/server_info")
WORD = " environment"
# So many that the answer still runs when its first hundred have been read, however busy the machine is.
LOOP_TOKENS, LOOPS_AT = 600, 100


def test_second_start_says_where_the_first_runs(server):
    before = server.processes()
    second = server.run("start", "--detach")
    assert second.returncode == Exit.BUSY
    assert f"Already running on http://127.0.0.1:{server.port}" in last_line(second.stderr)
    assert server.processes() == before


def test_port_of_a_running_server_is_refused_elsewhere(server, tmp_path):
    other = Launch(server.port, tmp_path / "run")
    refused = other.run("start", "--detach")
    assert refused.returncode == Exit.REFUSED
    assert f"port: 127.0.0.1:{server.port} is taken by" in last_line(refused.stderr)
    assert other.leaves_nothing()


def test_status_tells_what_runs(server):
    status = server.run("status")
    assert status.returncode == 0
    rows = dict(line.split(":", 1) for line in status.stdout.splitlines())
    rows = {name: value.strip() for name, value in rows.items()}
    assert (rows["status"], rows["phase"], rows["answers"], rows["model id"]) == ("ready", "ready", "yes", MODEL_ID)
    assert rows["address"] == f"http://127.0.0.1:{server.port}/v1"
    assert rows["model"] == str(MODEL)


def test_status_tells_programs_the_same(server):
    found = json.loads(server.run("status", "--json").stdout)
    assert (found["schema"], found["status"], found["error"], found["answers"]) == ("status", "ready", None, True)
    assert found["url"] == f"http://127.0.0.1:{server.port}/v1" and found["model"] == str(MODEL)
    assert found["counters"]["tokens_written"] > 0 and found["counters"]["prefix_cache"] is None
    assert found["counters"]["loops"]["answers_ended"] > 0


def test_logs_prints_the_servers_log(server):
    logs = server.run("logs")
    assert logs.returncode == 0
    assert "Application startup complete" in logs.stdout
    assert "quantization=exl3" in logs.stdout


def post(server: Launch, path: str, body: dict | None = None, token: str = "") -> tuple[int, bytes]:
    return canary.request(server.port, "POST", path, json.dumps(body or {}), canary.headers_with(token), 60)


def counted(server: Launch) -> counters.Counters:
    return counters.fetch(HOST, server.port, token_of(server))


def token_of(server: Launch) -> str:
    return StateFile(server.run_dir).read_token()


def rows_of(text: str) -> dict[str, str]:
    return {name: value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}


def looping_answer(client, server: Launch):
    """A stream that says one word for ever."""
    _, said = post(server, "/tokenize", {"model": MODEL_ID, "prompt": WORD, "add_special_tokens": False})
    (token,) = json.loads(said)["tokens"]
    return client.chat.completions.create(
        model=MODEL_ID, messages=[{"role": "user", "content": "What is EXL3?"}], temperature=0,
        max_tokens=LOOP_TOKENS, stream=True, logit_bias={str(token): 100},
    )  # fmt: skip


def test_a_looping_answer_is_seen_while_it_runs_and_holds_the_cache(client, server):
    before, during = counted(server), []
    stream = looping_answer(client, server)
    for number, _ in enumerate(stream):
        if number == 5:
            during.append(counted(server))
            assert not service.is_emptied(HOST, server.port, token_of(server))
        if number == LOOPS_AT:
            during.append(counted(server))
    after = counted(server)
    assert [one[counters.ANSWERING] for one in during] == [1, 1]
    assert (before[counters.REPEATING], during[1][counters.REPEATING]) == (0, 1)
    assert (after[counters.ANSWERING], after[counters.REPEATING]) == (0, 0)
    for name in (counters.ANSWERED, counters.REPEATED):
        assert after[name] == before[name] + 1
    assert after[counters.UNREAD] == 0
    assert "environment environment" not in (server.run_dir / "local.log").read_text()


def test_every_form_of_the_api_is_read(client, server):
    question = {"model": MODEL_ID, "max_tokens": 12, "temperature": 0}
    asked = [{"role": "user", "content": "What is EXL3?"}]
    before = counted(server)
    for path, body in {
        "/v1/completions": {**question, "prompt": "What is EXL3?"},
        "/v1/chat/completions": {**question, "messages": asked},
        "/v1/responses": {"model": MODEL_ID, "max_output_tokens": 12, "input": "What is EXL3?"},
        "/v1/messages": {**question, "messages": asked},
    }.items():
        for is_stream in (False, True):
            ended = counted(server)[counters.ANSWERED]
            status, said = post(server, path, {**body, "stream": is_stream})
            assert status == 200, (path, said)
            assert counted(server)[counters.ANSWERED] == ended + 1, (path, is_stream)
    assert counted(server)[counters.UNREAD] == before[counters.UNREAD] == 0


def test_status_tells_the_counters(server):
    rows = rows_of(server.run("status").stdout)
    assert rows["progress"].startswith("0 running, 0 waiting, ") and rows["progress"].endswith("for lack of cache")
    assert not rows["progress"].startswith("0 running, 0 waiting, 0 tokens")
    assert (rows["cache"], rows["drafts"]) == ("off", "none")  # vLLM's CPU build has neither for this model
    assert rows["loops"].startswith("0 of 0 running answers repeat a short cycle, ")


def test_cache_reset_reaches_the_engine_and_opens_nothing_else(server):
    log = server.run_dir / "local.log"
    before = log.read_text().count("Successfully reset prefix cache")
    reset = server.run("cache", "reset")
    assert (reset.returncode, reset.stdout) == (Exit.OK, "The prefix cache is empty.\n"), reset.stderr
    assert log.read_text().count("Successfully reset prefix cache") == before + 1
    assert token_of(server) and token_of(server) not in reset.stdout + reset.stderr + log.read_text()
    assert [post(server, path)[0] for path in DEVELOPER_ROUTES] == [404] * len(DEVELOPER_ROUTES)


@pytest.mark.parametrize("token", ["", "none", "EXL3_ADMIN_TOKEN"])
def test_the_route_is_closed_without_the_token(server, token):
    assert post(server, service.RESET_PATH, token=token)[0] == 401
    assert canary.request(server.port, "GET", "/openapi.json")[1].count(b"exl3/") == 0


def test_canary_asks_what_runs(server):
    asked = server.run("canary")
    assert asked.returncode == Exit.OK, asked.stderr
    assert "It was asked, and answered correctly:\n  Which port does the API use?\n" in asked.stdout


def test_nothing_is_asked_where_nothing_runs(launch):
    one = launch()
    assert [one.run(*words).returncode for words in (("canary",), ("cache", "reset"))] == [Exit.NOT_RUNNING] * 2
