"""The table of arms: pairs are covered, nothing is left out without being named."""

from dataclasses import astuple

import arms
import pytest
from arms import AXES, Platform, choose, every, named, options, pairs, pairwise, plain

H200, SPARK, CPU = Platform("cuda", 9), Platform("cuda", 12), Platform("cpu")


def test_every_pair_of_values_is_in_some_arm_and_arms_are_few():
    chosen = pairwise()
    assert set().union(*map(pairs, chosen)) == set().union(*map(pairs, every()))
    assert len(chosen) <= 12 < len(every()) == 128
    assert chosen == pairwise()


def test_no_arm_is_needless():
    chosen = pairwise()
    for gone in range(len(chosen)):
        rest = chosen[:gone] + chosen[gone + 1 :]
        assert set().union(*map(pairs, rest)) < set().union(*map(pairs, every()))


@pytest.mark.parametrize("platform", [H200, SPARK, CPU])
@pytest.mark.parametrize("wanted", arms.SETS)
def test_what_is_not_run_is_named_with_its_reason(platform, wanted):
    chosen, lacks = choose(wanted, platform)
    run = {word for arm in chosen for word in astuple(arm)}
    if wanted == "product":
        assert {arm.name for arm in chosen} | set(lacks) == {arm.name for arm in arms.product()}
    else:
        assert run | set(lacks) - {"chunks", "indexer"} == {word for values in AXES.values() for word in values}
        assert not run & set(lacks)
    assert all(lacks.values())


def test_platforms_have_what_they_have():
    assert choose("all", H200)[1] == {} and len(choose("all", H200)[0]) == 128
    assert set(choose("all", SPARK)[1]) == {"fp8"}
    assert choose("pairwise", CPU)[0] == [plain("auto")]
    assert "fp8" in choose("nocache-nodrafts-sync-eager-triton-fp8", CPU)[1].popitem()[0]


@pytest.mark.parametrize("name", ["cache", "cache-nodrafts-sync-eager-triton-fp4", "pairwise-", ""])
def test_an_unknown_name_is_answered_with_the_words(name):
    with pytest.raises(ValueError, match=r"no such arm; a name is \(cache\|nocache\)-.*pairwise, all, product"):
        choose(name, H200)


def test_each_value_of_each_axis_reaches_vllm():
    """Two arms that differ in one word must not give the same engine."""
    for axis, values in AXES.items():
        words = dict(zip(AXES, astuple(plain("auto")), strict=True))
        made = [str(options(named("-".join((words | {axis: value}).values())), H200)) for value in values]
        assert len(set(made)) == len(values), axis


def test_names_are_arms():
    assert all(named(arm.name) == arm for arm in every())
    assert [arm.kv for arm in every() if arm.is_plain] == ["auto", "fp8"]
