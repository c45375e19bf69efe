"""The table of arms: pairs are covered, nothing is left out without being named."""

import json
from dataclasses import astuple

import arms
import pytest
from arms import AXES, Platform, choose, every, named, options, pairs, pairwise, plain

from launcher import config, topology, vllm_flags

ADDRESSES = {"HEAD_IP": "10.0.0.1", "WORKER_IP": "10.0.0.2"}
H200, SPARK, CPU = Platform("cuda", 9), Platform("cuda", 12), Platform("cpu")


@pytest.fixture
def plan_of_two_nodes() -> dict[str, str | bool]:
    """Flag -> value of the server that `start` would run with default settings."""
    settings = config.load(topology.TOPOLOGIES["tp2"], None, ".env", ADDRESSES)
    flags = {flag.name: flag.value(settings, {"model": "/model", "draft": "/draft"}) for flag in vllm_flags.FLAGS}
    return {name: value for name, value in flags.items() if value is not None}


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


def test_a_spark_gets_what_the_plans_say(plan_of_two_nodes):
    """Flags of a plan that an engine's options have too are the same; what a plan leaves to vLLM, an arm does."""
    (arm,) = [one for one in arms.product() if one.drafts == "dflash7"]
    made, flags = options(arm, SPARK), plan_of_two_nodes
    assert "attention_backend" not in made and "--attention-backend" not in flags
    assert made["kv_cache_dtype"] == flags["--kv-cache-dtype"]
    assert made["enable_prefix_caching"] is ("--enable-prefix-caching" in flags)
    assert made["async_scheduling"] is ("--no-async-scheduling" not in flags)
    assert made["enforce_eager"] is ("--enforce-eager" in flags)
    assert made["additional_config"] == json.loads(flags["--additional-config"])
    draft, planned = made["speculative_config"], json.loads(flags["--speculative-config"])
    assert {name: draft[name] for name in draft if name != "model"} == {
        name: planned[name] for name in planned if name not in ("model", "draft_tensor_parallel_size")
    }


def test_hopper_keeps_its_backends():
    assert options(plain("auto"), H200)["attention_backend"] == "FLASH_ATTN_MLA_SPARSE"
    assert options(plain("fp8"), H200)["kv_cache_dtype"] == "fp8_ds_mla"


def test_names_are_arms():
    assert all(named(arm.name) == arm for arm in every())
    assert [arm.kv for arm in every() if arm.is_plain] == ["auto", "fp8"]
