"""What is done with a cluster that runs: counters in `status`, `cache reset`, `canary`; the plugin's side is in
tests/plugin, the real server in tests/local."""

import json
import math
import re
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stub_cluster import LOCAL_MODEL

from launcher import cached_prefix, canary, cluster, cluster_life, cluster_service, counters, service
from launcher.cached_prefix import MARGIN, Token, difference
from launcher.cluster_state import from_json
from launcher.counters import Counters
from launcher.errors import Exit, LauncherError

# As vLLM 0.33.0 and the plugin write them; what is not asked for is there, too.
METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="GLM"} 2.0
vllm:num_requests_waiting{engine="0",model_name="GLM"} 1.0
vllm:generation_tokens_total{engine="0",model_name="GLM"} 12345.0
vllm:generation_tokens_created{engine="0",model_name="GLM"} 1.796e+09
vllm:num_preemptions_total{engine="0",model_name="GLM"} 3.0
vllm:prefix_cache_queries_total{engine="0",model_name="a \\"quoted\\" }name"} 2.0e+05
vllm:prefix_cache_hits_total{engine="0",model_name="GLM"} 146000.0
vllm:cache_config_info{block_size="64",enable_prefix_caching="True",engine="0",mamba_block_size="4352"} 1.0
vllm:spec_decode_num_drafts_total{engine="0",model_name="GLM"} 1000.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="GLM"} 2000.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="GLM"} 1300.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="GLM",position="1"} 500.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="GLM",position="0"} 800.0
exl3:answers_running 2.0
exl3:answers_repeating 1.0
exl3:answers_ended_total 40.0
exl3:answers_ended_repeating_total 2.0
exl3:responses_unread_total 0.0
"""


def without(*names: str) -> Counters:
    return Counters("\n".join(line for line in METRICS.splitlines() if not any(name in line for name in names)))


def test_counters_are_told_in_words():
    found = Counters(METRICS)
    assert counters.progress_row(found) == (
        "2 running, 1 waiting, 12345 tokens written, 3 times set back for lack of cache"
    )
    assert dict(counters.rows(found)) == {
        "cache": "73 % of 200,000 prompt tokens found; a hit is whole blocks of 4,352 tokens",
        "drafts": "65 % of 2,000 tokens accepted; by position 80 50 %",
        "loops": "1 of 2 running answers repeat a short cycle, 2 of 40 ended so",
    }


def test_what_is_not_there_is_told_as_such():
    assert counters.cache_row(Counters(METRICS.replace('caching="True"', 'caching="False"'))) == "off"
    assert counters.cache_row(without("cache_config_info")) == "not told"
    assert counters.cache_row(without("prefix_cache")).startswith("not asked yet; a hit is whole blocks of 4,352")
    assert counters.drafts_row(without("spec_decode")) == "none"
    assert counters.drafts_row(without("draft_tokens", "num_accepted")) == "none"
    assert counters.loops_row(without("exl3:")).startswith("not told")
    unread = Counters(METRICS.replace("unread_total 0", "unread_total 7"))
    assert counters.loops_row(unread).endswith("; 7 could not be read")


# Emptying the cache


@pytest.fixture
def serving(cluster_stub):
    """A cluster that is ready, of which only the API is there."""
    cluster_stub.pretend_ready(cluster_stub.config())
    return cluster_stub


def test_the_cache_is_emptied_with_the_token_of_the_start(serving, capsys, monkeypatch, tmp_path):
    serving.api.cached.add(("salt", "prompt"))
    monkeypatch.setattr(cluster, "REPOSITORY", tmp_path)  # its settings are gone; the state says where
    arguments = ["start.sh", "tp2", "cache", "reset"]
    assert cluster.main(arguments, {"RUN_DIR": str(serving.run_dir)}) == Exit.OK
    assert serving.api.cached == set() and serving.api.resets == ["f00d" * 16]
    said = capsys.readouterr()
    assert "The prefix cache is empty" in said.out and "f00d" not in said.out + said.err


def test_a_reset_waits_for_a_pause(serving, monkeypatch):
    monkeypatch.setattr(service, "POLL_S", 0.01)
    serving.api.busy = 3
    assert cluster_service.reset_cache(serving.config()) == Exit.OK
    assert len(serving.api.resets) == 4


def other_token(stub):
    stub.api.env_file = stub.run_dir / "other"
    stub.api.env_file.write_text(f"{service.TOKEN_NAME}=another\n")


REFUSALS = {
    "requests": (lambda stub: setattr(stub.api, "busy", 10**6), Exit.BUSY, "requests were running for 0 s .2 now."),
    "another token": (other_token, Exit.SERVER, "refused the token"),
    "older plugin": (lambda stub: setattr(stub.api, "has_route", False), Exit.SERVER, "no route for it"),
    "no token": (lambda stub: stub.api.env_file.write_text(""), Exit.SERVER, "holds no EXL3_ADMIN_TOKEN"),
    "no file": (lambda stub: stub.api.env_file.unlink(), Exit.SERVER, "holds no EXL3_ADMIN_TOKEN"),
    "no server": (lambda stub: stub.close(), Exit.SERVER, "no answer .ConnectionRefusedError"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_a_reset_that_cannot_be_is_told_with_its_reason(serving, monkeypatch, name):
    change, code, message = REFUSALS[name]
    monkeypatch.setattr(service, "WAIT_S", 0)
    serving.api.counters = "vllm:num_requests_running 2.0\n"
    change(serving)
    with pytest.raises(LauncherError, match=message) as caught:
        cluster_service.reset_cache(serving.config())
    assert caught.value.code == code


def test_nothing_is_asked_where_nothing_runs(cluster_stub, capsys):
    config = cluster_stub.config()
    assert cluster_service.reset_cache(config) == cluster_service.ask(config) == Exit.NOT_RUNNING
    assert "not running" in capsys.readouterr().out


def test_a_start_under_way_is_not_asked(serving):
    files = cluster_life.files_of(serving.config())
    files.write_state(files.read_state().entered("load"))
    for ask in (cluster_service.ask, cluster_service.reset_cache):
        with pytest.raises(LauncherError, match="The start is in phase load") as caught:
            ask(serving.config())
        assert caught.value.code == Exit.STARTING


def test_a_state_of_an_older_launcher_is_read(serving):
    raw = json.loads((serving.run_dir / "tp2.json").read_text())
    del raw["env_file"]
    assert from_json(raw).env_file == ""


# The canary


CACHE_ON = 'vllm:cache_config_info{block_size="256",enable_prefix_caching="True",mamba_block_size="None"} 1.0\n'
RED_BOX = {"kind": "cached", "needle": "The number of the red box is 6041.", "question": "What is the number?",
           "must_contain": ["6041"]}  # fmt: skip


@pytest.fixture
def with_cached_question(cluster_stub, tmp_path):
    """A model folder whose list has one, and an API with a prefix cache that knows its answer."""
    folder = tmp_path / "cached"
    folder.mkdir()
    questions = json.loads((LOCAL_MODEL / "canary.json").read_text())
    long = {"kind": "long", "tokens": 600, "limit_s": 20, "needle": "x", "question": "Long?", "must_contain": ["x"]}
    (folder / "canary.json").write_text(json.dumps([*questions, long, RED_BOX]))
    cluster_stub.api.answers |= {"What is the number?": "6041", "Long?": "x"}
    cluster_stub.api.longest, cluster_stub.api.counters = 262_144, CACHE_ON
    return cluster_stub.config(MODEL_DIR=str(folder))


TOLD = "6041  (512 of 576 tokens from the prefix cache; as cold, within 0.00 nats)"


def test_a_cluster_from_its_start_on(cluster_stub, with_cached_question, capsys):
    """The start compares a cached prefix; then `status`, `canary` and `cache reset` of what it has started."""
    config, api = with_cached_question, cluster_stub.api
    assert cluster_life.start(config) == Exit.OK
    assert f"(576 tokens of text) What is the number?\n    {TOLD}" in capsys.readouterr().out
    assert len(api.asked[-1].split()) + 8 == 2 * 256 + 64

    api.counters = METRICS.replace("requests_running{", "requests_running_then{")
    assert cluster_life.status(config) == Exit.OK
    said = capsys.readouterr().out
    for name, row in counters.rows(Counters(METRICS)):
        assert re.search(rf"^{name}: +{re.escape(row)}$", said, re.MULTILINE)
    assert "3 times set back" in said

    assert cluster_service.reset_cache(config) == Exit.OK
    said, (token,) = capsys.readouterr(), api.resets
    assert api.cached == set() and len(token) >= 32
    public = "".join((cluster_stub.run_dir / name).read_text() for name in ("tp2.json", "tp2-run.json"))
    assert token not in public + (cluster_stub.books / "calls").read_text() + said.out + said.err


def test_a_damaged_cache_ends_the_start(cluster_stub, with_cached_question):
    cluster_stub.api.warm_text = "1111"
    with pytest.raises(LauncherError, match="what is cached is damaged, so the server was stopped") as caught:
        cluster_life.start(with_cached_question)
    assert caught.value.code == Exit.WRONG_ANSWER
    assert cluster_stub.running == set()


def test_the_canary_says_what_it_asks_and_asks_little(serving, with_cached_question, capsys):
    before = len(serving.api.asked)
    assert cluster_service.ask(with_cached_question) == Exit.OK
    said = capsys.readouterr()
    assert TOLD in said.out and "Which port does the API use?" in said.out
    assert "each answer is cut at 2,048 tokens" in said.err
    assert "Long?" not in said.out and not [text for text in serving.api.asked[before:] if "Long?" in text]


def test_every_canary_has_a_prefix_of_its_own(serving, with_cached_question):
    for _ in range(2):
        cluster_service.ask(with_cached_question)
    salts = {salt for salt, prompt in serving.api.cached if "What is the number?" in prompt}
    assert len(salts) == 2 and all(len(salt) == 32 for salt in salts)


DAMAGES = {
    "another answer": ({"warm_text": "1111"}, "answered '6041' cold and '1111' with 512 tokens from the prefix cache"),
    "the same answer, less sure": ({"warm_shift": 1.5}, r"log-probabilities are 1\.50 apart"),
    "no number": ({"warm_shift": math.nan}, "log-probabilities are inf apart"),
    "wrong when cold, too": ({"damaged": True}, r"the model answered '!!!!'.*it still runs"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_wrong_answer_in_service_is_told_and_stops_nothing(serving, with_cached_question, name):
    changes, message = DAMAGES[name]
    for attribute, value in changes.items():
        setattr(serving.api, attribute, value)
    with pytest.raises(LauncherError, match=message) as caught:
        cluster_service.ask(with_cached_question)
    assert caught.value.code == Exit.WRONG_ANSWER and "it still runs" in str(caught.value)
    assert cluster_life.files_of(with_cached_question).read_state().ready


def test_rounding_is_no_damage(serving, with_cached_question):
    serving.api.warm_shift = 0.3
    assert cluster_service.ask(with_cached_question) == Exit.OK


def test_without_a_cache_or_a_hit_nothing_is_claimed(serving, with_cached_question, capsys, monkeypatch):
    monkeypatch.setattr(cached_prefix, "ask", lambda *_: replace(SAID, cached_tokens=0))
    assert cluster_service.ask(with_cached_question) == Exit.OK
    said = capsys.readouterr()
    assert "nothing of the 576 tokens came from the prefix cache" in said.err and "6041" not in said.out
    answers = iter([SAID, replace(SAID, answer=canary.Answer("1111", finished=True), cached_tokens=0)])
    monkeypatch.setattr(cached_prefix, "ask", lambda *_: next(answers))
    with pytest.raises(LauncherError, match=r"the model answered '1111', expected '6041' in it; the weights"):
        cluster_service.ask(with_cached_question)
    serving.api.counters = CACHE_ON.replace("True", "False")
    assert cluster_service.ask(with_cached_question) == Exit.OK
    assert "the prefix cache is off, so that no cached prefix was compared" in capsys.readouterr().err


def test_a_server_that_refuses_the_question_is_told(serving, with_cached_question, monkeypatch):
    monkeypatch.setattr(serving.api, "answer", lambda self, *_: self.reply("no such field", 400))
    with pytest.raises(LauncherError, match=r"no answer to .*status 400: no such field"):
        cached_prefix.check(canary.read_question(RED_BOX), door_of(serving))


def test_the_pair_has_a_time_limit(serving, with_cached_question):
    serving.api.delay_s = 20
    began = time.monotonic()
    with pytest.raises(LauncherError, match="TimeoutError"):
        cached_prefix.check(canary.read_question(RED_BOX), replace(door_of(serving), timeout_s=0.5))
    assert time.monotonic() - began < 15


def door_of(cluster_stub) -> cached_prefix.Door:
    return cached_prefix.Door("127.0.0.1", cluster_stub.port, "", 64, 20, canary.AT_START)


# Comparing

SAID = cached_prefix.Said(canary.Answer("6041", finished=True), (), 576, 512)


def tokens(text: str, logprob: float = -0.1) -> tuple[Token, ...]:
    likely = {"a": -0.4, "b": -0.4, "x": -0.4, "y": -7.0}
    return tuple(Token(sign, logprob, likely | {sign: logprob}) for sign in text)


@given(st.text("abx", min_size=1, max_size=9), st.floats(-3, 0), st.floats(-3, 0))
def test_the_same_text_differs_by_its_log_probabilities(text, cold, warm):
    assert difference(tokens(text, cold), tokens(text, warm)) == pytest.approx(abs(cold - warm))


def test_tokens_that_are_nearly_as_likely_may_swap_and_others_not():
    assert difference(tokens("ab"), tokens("ax")) <= MARGIN
    assert difference(tokens("ab"), tokens("ay")) > MARGIN
    assert difference(tokens("ab"), tokens("aq")) > MARGIN  # not among the likeliest of the other


def test_behind_the_parting_nothing_counts():
    cold, warm = (*tokens("ab"), *tokens("a", -9)), tokens("axa")
    assert difference(cold, warm) <= MARGIN


def test_what_is_no_number_is_infinitely_far():
    assert difference(tokens("ab"), (*tokens("a"), *tokens("b", math.nan))) == math.inf
    assert difference((), ()) == 0
