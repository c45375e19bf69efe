"""The judge of a soak on made-up log-probabilities: a wrong token, a NaN and a broken floor must show."""

import math

import judge
import pytest
from judge import NAN, Answer, Finding, findings, floor, longest_only, margins, score, verdict

FIRST = Answer("s1", 0, [1, 2, 3], [4, 5], cached=0)
SECOND = Answer("s1", 1, [1, 2, 3, 4, 5, 6], [7, 8, 9], cached=4, edge="block x 1 +0")
OTHER = Answer("s2", 0, [9, 9], [1, 1])


def reader(bad=None):
    """An engine that holds every token of a text for the best one, but the `bad` ones {(position, token): lead}."""
    read = []

    def rows(tokens):
        read.append(tokens)
        result = [None]
        for position, token in enumerate(tokens[1:], start=1):
            lead = (bad or {}).get((position, token), 0)
            result.append({token: -1.0, token + 100: -1.0 + lead} if lead else {token: -1.0})
        return result

    rows.read = read
    return rows


def test_a_session_is_read_once_and_every_answer_is_scored():
    read = reader()
    scored = score(read, [FIRST, OTHER, SECOND])
    assert sorted(map(len, read.read)) == [4, 9]
    assert {(one.answer.session, one.answer.turn, len(one.margins)) for one in scored} == {
        ("s1", 0, 2), ("s1", 1, 3), ("s2", 0, 2),
    }  # fmt: skip
    assert findings(scored, 0.0) == []


def test_turns_that_went_another_way_are_read_by_themselves():
    again = Answer("s1", 0, [1, 2, 3], [4, 6])  # not what the second turn begins with
    assert [len(inside) for _, inside in longest_only([again, SECOND, FIRST])] == [2, 1]


@pytest.mark.parametrize(
    ("position", "token", "where"), [(3, 4, ("s1", 0, 0)), (4, 5, ("s1", 0, 1)), (8, 9, ("s1", 1, 2))]
)
def test_a_wrong_token_is_found_where_it_stands(position, token, where):
    found = findings(score(reader({(position, token): 0.5}), [FIRST, SECOND]), bar=0.4)
    assert [(one.session, one.turn, one.position) for one in found] == [where]
    assert found[0].margin == pytest.approx(0.5)
    assert findings(score(reader({(position, token): 0.5}), [FIRST, SECOND]), bar=0.6) == []


# Readings with noise


def noisy(*bads):
    """Reading `number` has the wrong tokens of bads[number], or those of the last one."""
    asked = []

    def rows(tokens, number):
        asked.append(number)
        return reader(bads[min(number, len(bads) - 1)])(tokens)

    rows.asked = asked
    return rows


def test_what_rounding_may_have_decided_is_no_finding():
    again = noisy({(3, 4): 3.0}, {})
    scored = score(reader({(3, 4): 7.0}), [FIRST, SECOND], again)
    assert findings(scored, bar=0.2) == [] and again.asked == [0, 1]
    assert verdict(scored, bar=0.2)["excused"] == 1


def test_what_no_noise_explains_is_found_with_its_smallest_margin():
    again = noisy({(3, 4): 5.0}, {(3, 4): 6.0})
    scored = score(reader({(3, 4): 7.0}), [FIRST, SECOND], again)
    assert [one.margin for one in findings(scored, bar=0.2)] == [5.0]
    assert len(again.asked) == judge.NOISY_READINGS and verdict(scored, bar=0.2)["excused"] == 0


def test_noise_adds_no_finding_of_its_own():
    scored = score(reader({(3, 4): 7.0}), [FIRST], noisy({(4, 5): 9.0}))
    assert findings(scored, bar=0.2) == [] and scored[0].margins == [0.0, 0.0]


def test_many_bad_tokens_are_no_ties():
    long = Answer("s3", 0, [1], list(range(10, 30)))
    bad = {(i, token): 4.0 for i, token in enumerate(long.tokens, start=1)}
    again = noisy({})
    assert findings(score(reader(bad), [long], again), bar=0.2) and again.asked == []


@pytest.mark.parametrize("first", [True, False], ids=["in the first reading", "in the noisy one"])
def test_a_nan_is_never_read_away(first):
    bad = {(3, 4): NAN} if first else {(3, 4): 7.0}
    again = noisy({(4, 5): 1.0} if first else {(3, 4): NAN})
    scored = score(reader(bad | {(4, 5): 7.0}), [FIRST], again)
    assert findings(scored, bar=0.2)[0].position == 0


def test_a_token_that_the_judge_was_given_shifted_would_be_seen():
    """Planted: answers are scored one position too late."""
    late = [Answer("s1", 1, [*SECOND.prompt, 7], [8, 9])]
    rows = reader()(SECOND.whole)
    assert all(math.isnan(margin) for margin in margins(rows[len(SECOND.prompt) : -1], late[0].tokens))


def test_only_the_first_wrong_token_of_an_answer_is_told():
    found = findings(score(reader({(6, 7): 2.0, (7, 8): 3.0}), [SECOND]), bar=1.0)
    assert [(one.position, one.margin) for one in found] == [(0, pytest.approx(2.0))]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_a_number_is_found_under_every_bar(bad):
    found = findings(score(reader({(7, 8): bad}), [SECOND]), bar=1e9)
    assert [one.position for one in found] == [1]


def test_a_nan_of_the_engine_itself_is_found_though_the_tokens_are_right():
    nan = Answer("s3", 2, [1], [2], nan=True)
    assert findings(score(reader(), [nan]), bar=1.0) == [Finding("s3", 2, 0, None, None, 1, None)]


def test_a_row_without_the_token_is_not_right():
    assert math.isnan(margins([{5: -0.1}], [6])[0])


def test_the_floor_is_the_plain_arms_largest_and_never_below_the_grain():
    assert floor(score(reader({(4, 5): 0.25}), [FIRST])) == 0.25
    assert floor(score(reader(), [FIRST])) == judge.LEAST_FLOOR


@pytest.mark.parametrize("bad", [0.6, float("nan")])
def test_a_plain_arm_that_is_wrong_itself_gives_no_floor(bad):
    with pytest.raises(ValueError, match="wrong itself: 1 tokens"):
        floor(score(reader({(4, 5): bad}), [FIRST]))


def test_no_answers_give_no_floor():
    with pytest.raises(ValueError, match="gave no answers"):
        floor([])


def test_a_verdict_names_session_turn_position_and_cache():
    said = verdict(score(reader({(7, 8): 0.75}), [FIRST, SECOND]), bar=0.2)
    assert (said["turns"], said["tokens"], said["hits"], said["above_zero"]) == (2, 5, 1, 1)
    assert [one["text"] for one in said["findings"]] == [
        "session s1, turn 1, position 1: 0.750 below the best token; prompt of 6 tokens (block x 1 +0), "
        "4 tokens from the cache"
    ]
