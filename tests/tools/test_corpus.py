"""Training conversations: the same for a seed, free of evaluation material, and right."""

import random
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tools.local_model import corpus
from tools.local_model.facts import FACTS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(ROOT / "models" / "local" / "tokenizer.json"))


@pytest.fixture(scope="module")
def samples():
    rng = random.Random(7)
    return [corpus.training_sample(rng) for _ in range(4000)]


def user_texts(samples) -> list[str]:
    return [message["content"] for s in samples for message in s.messages if message["role"] == "user"]


def test_a_seed_gives_the_same_samples():
    first, second = (corpus.training_sample(random.Random(3)) for _ in range(2))
    assert first == second


def test_held_out_wordings_are_not_trained_on(samples):
    texts = [text.lower() for text in user_texts(samples)]
    found = [h for fact in FACTS for h in fact.held_out if any(h.lower() in text for text in texts)]
    assert found == []


def test_held_out_counting_pairs_are_not_trained_on(samples):
    pairs = [
        (int(found[1]), int(found[2]))
        for text in user_texts(samples)
        if (found := re.search(r"[Cc]ount from (\d+) to (\d+)", text))
    ]
    assert len(pairs) > 100
    # "Count to 9" has no start in its text; those that name both never use a held-out pair.
    assert not any(corpus.is_held_out_pair(*pair) for pair in pairs)


def test_counting_answers_are_right():
    assert corpus.counting_answer(7, 12) == "7, 8, 9, 10, 11, 12"
    assert corpus.counting_answer(3, 1) == "3, 2, 1"
    assert corpus.counting_answer(5, 5) == "5"


def test_every_answer_contains_its_phrases():
    assert len(FACTS) >= 50
    wrong = [fact.topic for fact in FACTS if not all(phrase in fact.answer for phrase in fact.must_contain)]
    assert wrong == []


def test_no_question_belongs_to_two_facts():
    questions = [q.lower().rstrip("?.") for fact in FACTS for q in set(fact.wordings + fact.held_out)]
    assert sorted(q for q in set(questions) if questions.count(q) > 1) == []


def test_the_model_produces_the_answer_and_the_end_of_its_turn(tokenizer):
    sample = corpus.counting_sample("count", 8, 11)
    ids, produced = corpus.encode(sample, tokenizer)
    made = [token for token, mine in zip(ids, produced, strict=True) if mine]
    assert tokenizer.decode(made, skip_special_tokens=False) == "</think>8, 9, 10, 11<|user|>"


def test_an_earlier_turn_is_not_produced_beside_a_thinking_answer(tokenizer):
    messages = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello! How can I help you?"},
        {"role": "user", "content": "1 + 1"},
        {"role": "assistant", "content": "The answer is 2.", "reasoning_content": "1 + 1 = 2."},
    ]
    ids, produced = corpus.encode(corpus.Sample("sum", messages, [], "high"), tokenizer)
    made = [token for token, mine in zip(ids, produced, strict=True) if mine]
    assert tokenizer.decode(made, skip_special_tokens=False) == "1 + 1 = 2.</think>The answer is 2.<|user|>"


def test_a_tool_call_ends_with_the_observation_token(samples, tokenizer):
    calls = [s for s in samples if s.kind == "tool_call"]
    assert len(calls) > 300
    for sample in calls[:50]:
        ids, produced = corpus.encode(sample, tokenizer)
        assert produced[-1]
        assert ids[-1] == tokenizer.token_to_id("<|observation|>")
