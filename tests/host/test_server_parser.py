"""The recorded parser of the pinned vLLM takes the server arguments of every plan; what it refuses is refused early."""

import json
import re

import pytest
from cluster_settings import settings
from hypothesis import given
from hypothesis import strategies as st
from server_arguments import DAMAGE, damaged, distinct, parsed

from launcher import server_parser
from launcher.refusals import refusals
from launcher.running_checks import PINS
from launcher.vllm_flags import FLAGS, RESERVED, SHORT, why_not_extra


def test_the_record_is_of_the_pinned_vllm():
    (pinned,) = (pin.version for pin in PINS if pin.package == "vllm")
    assert server_parser.read_record()["vllm"] == pinned, "tools/record_server_parser.py records the new version"


def test_every_plan_is_taken():
    refused = {}
    for words, name in distinct().items():
        try:
            parsed(words)
        except server_parser.Refused as error:
            refused[name] = str(error)
    assert refused == {} and len(distinct()) > 200


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_arguments_are_refused(name):
    with pytest.raises(server_parser.Refused):
        parsed(damaged(name))


def docker(**changes):
    return settings(RUNTIME="docker", **changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"EXTRA_ARGS": "--max-num-sequences 4"}, "unrecognized arguments: --max-num-sequences"),
        ({"EXTRA_ARGS": "--seed seven"}, "invalid int value: 'seven'"),
        ({"EXTRA_ARGS": "--seed"}, "expected one argument"),
        ({"EXTRA_ARGS": '--compilation-config \'{"mod": 3}\''}, "it has no field 'mod'"),
        ({"EXTRA_ARGS": "--compilation-config.mod 3"}, "it has no field 'mod'"),
        ({"MOE_BACKEND": "cutlas"}, "invalid choice: 'cutlas'"),
        ({"EXTRA_ARGS": "--seed 7 nonsense"}, "'nonsense', which belongs to no flag"),
    ],
)
def test_what_vllm_would_refuse_is_refused_before_a_start(changes, said):
    (sentence,) = refusals(docker(**changes))
    assert said in sentence and re.match(r"\.env line \d+: (EXTRA_ARGS|MOE_BACKEND)", sentence)
    assert refusals(settings(RUNTIME="native", **changes)) == []


@pytest.mark.parametrize(
    "word",
    ["-tp=4", "-tp 4", "-qfp8", "-q=fp8", "-n2", "--disable-prefix-caching", "--disable-pref",
     "--no_enable_prefix_caching", "--no-enable-prefix", "-sc={}", "--served.x 1"],
)  # fmt: skip
def test_no_spelling_of_an_owned_flag_gets_in(word):
    said = refusals(docker(EXTRA_ARGS=word))
    assert said and all("EXTRA_ARGS has" in sentence for sentence in said)


@pytest.mark.parametrize("flag", [*(row.name for row in FLAGS), *RESERVED])
def test_every_way_of_writing_an_owned_flag_is_known(flag):
    spellings = server_parser.names_by_flag()[flag]
    assert [name for name in spellings if name.startswith("--") and not why_not_extra(name)] == []
    assert {name for name in spellings if not name.startswith("--")} <= set(SHORT)


def test_flags_that_only_begin_like_an_owned_one_are_the_users():
    assert refusals(docker(EXTRA_ARGS="--kv-cache-dtype-skip-layers 1 --hf-config-path /x")) == []


WORDS = ("--seed", "-tp", "--a.b", "=", "-", "--", "-O", "-O2", "{}", "x", "--port.", "--.+", "1k")


@given(st.lists(st.sampled_from(WORDS) | st.text(max_size=4), max_size=5))
def test_any_words_are_read_or_refused(words):
    try:
        server_parser.parse(words)
    except server_parser.Refused:
        pass


@pytest.mark.parametrize(
    ("text", "value"), [("7168", 7168), ("1k", 1000), ("1K", 1024), ("2.5m", 2_500_000), (" 3G ", 3 << 30)]
)
def test_sizes_are_read_as_vllm_does(text, value):
    assert server_parser.human_readable_int(text) == value


def test_parts_of_an_object_make_one():
    given = parsed("--compilation-config.mode 3 --compilation-config.cudagraph_capture_sizes+ 1,2 -O 1".split())
    assert given["compilation_config"] == {"mode": 3, "cudagraph_capture_sizes": ["1", "2"]}
    assert json.dumps(given["optimization_level"]) in ("1", '"1"')
