"""The texts of a soak: as long as planned, shared where planned, the same for a seed."""

from pathlib import Path

import pytest

pytest.importorskip("tokenizers")

from sessions import KINDS, Edges, Session, Turn
from words import Words, first_prompt

LOCAL = Path(__file__).parents[2] / "models" / "local"


@pytest.fixture(scope="module")
def words():
    return Words(LOCAL)


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("untrained")
    (folder / "config.json").write_text('{"text_config": {"vocab_size": 512}}')
    return Words(folder)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 7, 300, 1500])
def test_questions_are_as_long_as_planned_and_the_seeds(words, untrained, kind, count):
    for some in (words, untrained):
        asked = some.asked(kind, 5, count)
        assert len(asked) == count and asked == some.asked(kind, 5, count)
        assert all(0 <= token < some.vocabulary for token in asked)
    assert words.asked(kind, 5, 300) != words.asked(kind, 6, 300)


def test_shorter_prefixes_begin_longer_ones(words, untrained):
    for some in (words, untrained):
        assert some.prefix(1, 9000)[:700] == some.prefix(1, 700) != some.prefix(2, 700)


def test_foreign_text_is_beyond_ascii(words):
    text = words.tokenizer.decode(words.asked("foreign", 0, 200))
    assert sum(not character.isascii() for character in text) > len(text) / 4


def test_a_needle_stands_far_in_front_of_its_question(words):
    turn = Turn(1500, 16, 3, "needle", edge="far")
    prompt = first_prompt(words, Session("s0", 0, Edges(256, 509, 9216).far - 1495, (turn,), False))
    text = words.tokenizer.decode(prompt)
    assert len(prompt) == 8197 and text.startswith("The word behind the door is ")
    assert text.endswith("The word is")
