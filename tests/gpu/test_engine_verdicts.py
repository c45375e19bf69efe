"""The verdicts of the engine proof on drafts, from answers that are made up here; no GPU."""

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "engine"), str(HERE.parents[1])]

import arm
import prove

ANSWER = {"tokens": [5, 6, 7], "logprobs": [{"5": -0.1, "9": -0.15}, {"6": -0.1, "9": -3.0}, {"7": -0.1}]}
COUNTS = {"drafts": 100, "drafted": 700, "accepted": 420, "by_position": [90, 80, 70, 60, 50, 40, 30]}


@pytest.fixture
def proof(tmp_path):
    def write(name: str, **said) -> None:
        kernels = {"1": [ANSWER]}
        answers = {"kernels": kernels, "oracle": kernels, "repeats": [], "own_text": [ANSWER]} | said
        (tmp_path / f"{name}.json").write_text(json.dumps(answers))

    proof = prove.Proof(tmp_path, tmp_path / "drafts", time.monotonic() + 60)
    proof.write = write
    write(prove.PLAIN)
    return proof


def test_a_draft_that_is_sometimes_right_passes(proof, capsys):
    proof.write(prove.FLASH.name, acceptance=COUNTS)
    proof.judge(prove.FLASH)
    assert proof.failed == []
    assert "420 accepted, 60.0%; by position 90.0%, 80.0%" in capsys.readouterr().out


@pytest.mark.parametrize(
    "said",
    [
        {"own_text": [ANSWER | {"tokens": [5, 9, 7]}]},  # a token that the plain engine holds improbable
        {"own_text": [ANSWER | {"tokens": [5, 8]}]},  # one that it does not even list, in a shorter answer
        {"acceptance": COUNTS | {"accepted": 7}},
        {"acceptance": COUNTS | {"accepted": 690}},
        {"repeats": ["4"]},
    ],
    ids=["wrong-token", "unlisted-token", "never-right", "always-right", "other-repeat"],
)
def test_a_wrong_draft_arm_fails(proof, said):
    proof.write(prove.FLASH.name, **{"acceptance": COUNTS} | said)
    proof.judge(prove.FLASH)
    assert len(proof.failed) == 1


@pytest.mark.parametrize(("accepted", "is_good"), [(420, True), (426, True), (414, True), (430, False), (400, False)])
def test_the_kinds_of_attention_must_agree_within_a_percentage_point(proof, accepted, is_good):
    proof.write(prove.FLASH.name, acceptance=COUNTS)
    proof.write(prove.TRITON.name, acceptance=COUNTS | {"accepted": accepted})
    proof.judge_attention(prove.FLASH, prove.TRITON)
    assert (proof.failed == []) is is_good


def test_an_arm_that_left_nothing_fails(proof):
    proof.judge_attention(prove.FLASH, prove.TRITON)
    proof.judge(prove.TRITON)
    assert len(proof.failed) == 2


def test_the_two_attention_arms_differ_in_nothing_else():
    flash, triton = (a.options["speculative_config"] for a in (prove.FLASH, prove.TRITON))
    assert flash | {"attention_backend": "TRITON_ATTN"} == triton
    assert flash["kv_cache_dtype"] == "auto"


def test_acceptance_counts_what_was_drafted_meanwhile():
    counters = {"num_drafts": 3, "num_draft_tokens": 21, "num_accepted_tokens": 9}
    positions = [3, 3, 1, 1, 1, 0, 0]

    def metrics():
        named = [SimpleNamespace(name=f"vllm:spec_decode_{name}", value=value) for name, value in counters.items()]
        per_position = SimpleNamespace(name="vllm:spec_decode_num_accepted_tokens_per_pos", values=list(positions))
        return [*named, per_position, SimpleNamespace(name="vllm:num_requests_running", value=0)]

    def talk(_llm):
        counters["num_drafts"], counters["num_draft_tokens"], counters["num_accepted_tokens"] = 5, 35, 12
        positions[0] = 4
        return "said"

    said, counts = arm.counted(SimpleNamespace(get_metrics=metrics), talk)
    assert said == "said"
    assert counts == {"drafts": 2, "drafted": 14, "accepted": 3, "by_position": [1, 0, 0, 0, 0, 0, 0]}
