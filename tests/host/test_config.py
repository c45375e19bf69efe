import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher import kinds
from launcher.config import REDACTED, load, parse
from launcher.errors import Exit, LauncherError
from launcher.table import OTHER_NAMES, RETIRED, ROWS, TABLE, Goes, is_foreign, what_became_of
from launcher.topology import TOPOLOGIES
from launcher.vllm_flags import FLAGS, base_name

TP2, TP3, TP4 = (TOPOLOGIES[name] for name in ("tp2", "tp3", "tp4"))
TWO = "HEAD_IP=10.0.0.1\nWORKER_IP=10.0.0.2\n"
FOUR = TWO + "WORKER2_IP=10.0.0.3\nWORKER3_IP=10.0.0.4\n"


def config(text: str = "", topology=TP2, **ambient):
    return load(topology, {2: TWO, 3: FOUR[: FOUR.index("WORKER3")], 4: FOUR}[topology.nodes] + text,
                topology.env_file, ambient)  # fmt: skip


def problems(text: str | None, topology=TP2, **ambient) -> list[str]:
    with pytest.raises(LauncherError) as caught:
        load(topology, text, topology.env_file, ambient)
    assert caught.value.code == Exit.USAGE
    return str(caught.value).splitlines()


def problem(line: str, **ambient) -> str:
    """What is said about one line, which is the third."""
    (said,) = problems(TWO + line, **ambient)
    return said


# The table


def test_every_row_is_told_and_has_a_default_of_its_own_kind():
    assert len(ROWS) == len(TABLE)
    for row in TABLE:
        assert len(row.doc) > 10 and row.doc.endswith("."), row.name
        assert not row.reason or re.search(r"lifts? |would make", row.reason), row.name
        text = kinds.text_of(row.type, row.default)
        assert (parse(row, text) if text else row.type.nothing) == row.default, row.name
        assert text or row.may_be_empty or row.required, row.name


def test_defaults_of_topologies_are_settings_of_the_right_kind():
    for topology in TOPOLOGIES.values():
        for name, value in topology.defaults.items():
            assert parse(ROWS[name], kinds.text_of(ROWS[name].type, value)) == value


def test_every_setting_for_vllm_is_carried_by_the_flag_that_the_table_says():
    # MASTER_PORT goes to some ranks only, EXTRA_ARGS is flags itself.
    carried = {(base_name(flag.name), name) for flag in FLAGS for name in flag.settings}
    said = {(base_name(row.flag), row.name) for row in TABLE if row.goes is Goes.SERVER}
    assert said - carried == {(base_name("--master-port"), "MASTER_PORT"), (base_name(""), "EXTRA_ARGS")}


def test_names_with_an_answer_are_no_settings():
    assert not set(ROWS) & {*RETIRED, *OTHER_NAMES}
    assert set(OTHER_NAMES.values()) <= set(ROWS)


def test_a_whole_retired_name_wins_over_its_family():
    assert what_became_of("NCCL_IB_HCA") == RETIRED["NCCL_IB_HCA"]
    assert what_became_of("NCCL_ANYTHING") == RETIRED["NCCL_*"]
    assert what_became_of("ANYTHING") is None


# Precedence


def test_addresses_are_all_that_has_to_be_filled_in():
    assert config().addresses == ("10.0.0.1", "10.0.0.2")
    assert config(topology=TP3).addresses == ("10.0.0.1", "10.0.0.2", "10.0.0.3")
    assert config(topology=TP4).addresses == ("10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4")
    assert set(config().values) == set(ROWS) == set(config().sources)


def test_later_layers_win_and_say_so():
    assert (config()["GPU_MEM_UTIL"], config().sources["GPU_MEM_UTIL"]) == (0.85, "built-in")
    tp4 = config(topology=TP4)
    assert (tp4["GPU_MEM_UTIL"], tp4.sources["GPU_MEM_UTIL"]) == (0.75, "topology tp4")
    file = config("GPU_MEM_UTIL=0.7\n", TP4)
    assert (file["GPU_MEM_UTIL"], file.sources["GPU_MEM_UTIL"]) == (0.7, ".env.tp4 line 5")
    outside = config("GPU_MEM_UTIL=0.7\n", TP4, GPU_MEM_UTIL="0.6")
    assert (outside["GPU_MEM_UTIL"], outside.sources["GPU_MEM_UTIL"]) == (0.6, "environment")


def test_an_explicit_empty_clears_what_stands_below():
    cleared = config("KV_CACHE_GIB=9\nEXTRA_ARGS=--x\nPORT=9000\n", TP4, KV_CACHE_GIB="", EXTRA_ARGS="", PORT="")
    assert (cleared["KV_CACHE_GIB"], cleared.sources["KV_CACHE_GIB"]) == (None, "environment")
    assert (cleared["EXTRA_ARGS"], cleared.sources["EXTRA_ARGS"]) == ((), "environment")
    assert (cleared["PORT"], cleared.sources["PORT"]) == (8888, "built-in")
    back = config("GPU_MEM_UTIL=0.7\n", TP4, GPU_MEM_UTIL="")
    assert (back["GPU_MEM_UTIL"], back.sources["GPU_MEM_UTIL"]) == (0.75, "topology tp4")


def test_everything_may_come_from_the_environment():
    outside = load(TP2, None, ".env", {"HEAD_IP": "10.0.0.1", "WORKER_IP": "10.0.0.2", "VLLM_API_KEY": "k"})
    assert outside["VLLM_API_KEY"] == "k"
    assert outside.notes == ()


def test_names_of_other_programs_count_in_the_file_only():
    mixed = config("NCCL_DEBUG=WARN\n", NCCL_DEBUG="TRACE", NCCL_SOCKET_IFNAME="wlan0", HF_HOME="/x", VLLM_PORT="1",
                   GLOO_SOCKET_IFNAME="wlan0", NCCL_IB_GID_INDEX="9")  # fmt: skip
    assert (mixed["NCCL_DEBUG"], mixed.sources["NCCL_DEBUG"]) == ("WARN", ".env line 3")
    assert mixed["NCCL_IB_GID_INDEX"] is None
    (note,) = mixed.notes
    for name in ("NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "HF_HOME", "VLLM_PORT", "GLOO_SOCKET_IFNAME"):
        assert name in note
    assert "NCCL_DEBUG and NCCL_IB_GID_INDEX can be set in .env" in note
    assert "wlan0" not in note and "TRACE" not in note


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_environment_counts_for_every_name_of_ours(row):
    assert row.ambient == (row.name == "VLLM_API_KEY" or not is_foreign(row.name))


def test_slips_in_the_environment_are_noted():
    (note,) = config(MAX_MODLE_LEN="5").notes
    assert "did you mean MAX_MODEL_LEN?" in note
    (note,) = config(WORKER2_IP="10.0.0.3").notes
    assert "start.sh serves 2 nodes" in note
    assert config(HOME="/root", PATH="/bin", SSH_AUTH_SOCK="/x", LANG="C", HOSTNAME="x").notes == ()


# Values


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("VISION=off", "VISION", False),
        ("VISION='Yes' # seen", "VISION", True),
        ("PORT='  9000 '", "PORT", 9000),
        ("KV_CACHE_GIB=.5", "KV_CACHE_GIB", 0.5),
        ("SPEC_METHOD=MTP", "SPEC_METHOD", "mtp"),
        ("HEAD_CX7_IB=rocep1s0f0, roceP2p1s0f0", "HEAD_CX7_IB", ("rocep1s0f0", "roceP2p1s0f0")),
        ("HEAD_CX7_IB=", "HEAD_CX7_IB", ()),
        ("HEAD_GID=", "HEAD_GID", None),
        ("CACHE_DIR='/my caches'", "CACHE_DIR", "/my caches"),
        ("BIND=0.0.0.0", "BIND", "0.0.0.0"),
        ("VLLM_API_KEY='a$b`c'", "VLLM_API_KEY", "a$b`c"),
        ("SKIP_CHECKS=gpu-clocks,wall-clock", "SKIP_CHECKS", ("gpu-clocks", "wall-clock")),
        ("EXL3_GUARDS_OFF='chunk-ends, topk-ids'", "EXL3_GUARDS_OFF", ("chunk-ends", "topk-ids")),
        ("EXTRA_ARGS=", "EXTRA_ARGS", ()),
        ('EXTRA_ARGS=\'--a "b c" --json {"x":1}\'', "EXTRA_ARGS", ("--a", "b c", "--json", "{x:1}")),
        ("EXTRA_ARGS=--n $(id) ${HOME}", "EXTRA_ARGS", ("--n", "$(id)", "${HOME}")),
    ],
)
def test_values_are_typed(line, name, value):
    assert config(line + "\n")[name] == value
    assert type(config(line + "\n")[name]) is type(value)


def test_drafted_tokens_follow_the_method_unless_set():
    assert [config(f"SPEC_METHOD={method}")["SPEC_TOKENS"] for method in ("dflash", "mtp", "none")] == [7, 3, 0]
    assert config("SPEC_TOKENS=5\n")["SPEC_TOKENS"] == 5
    assert config("SPEC_TOKENS=5\nSPEC_METHOD=none\n")["SPEC_TOKENS"] == 0


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("PORT=abc", 'PORT is "abc"; it must be a whole number from 1 to 65535.'),
        ("PORT=70000", 'PORT is "70000"; it must be a whole number from 1 to 65535.'),
        ("PORT=-1", 'PORT is "-1"; it must be'),
        (f"PORT={'9' * 5000}", "...\"; it must be"),
        ("GPU_MEM_UTIL=nan", "it must be a number from 0.05 to 0.95"),
        ("VISION=maybe", "it must be 1 or 0"),
        ("SPEC_METHOD=eagle", "one of none, mtp, dflash"),
        ("KV_CACHE_DTYPE=bf16", "one of fp8, auto"),
        ("CACHE_DIR=caches", "a whole path, or one from ~/ on"),
        ("CACHE_DIR=$HOME/caches", "settings are text and never run by a shell; write out what is meant"),
        ("MAX_MODEL_LEN=$(nproc)", "never run by a shell"),
        ("SSH_USER=`id -un`", "never run by a shell"),
        ("CACHE_DIR=~other/x", "another user's home folder"),
        ("SSH_USER=-oProxyCommand=x", "a user name"),
        ("IMAGE=--privileged", "an image such as"),
        ("HEAD_CX7_IF=a,b", "one network interface"),
        ("HEAD_CX7_IB=a,a", "names something twice"),
        ("EXL3_GUARDS_OFF=topk-ids,chunks", "names 'chunks', which is no guard; it must be some of chunk-ends, "),
        ("EXTRA_ARGS='a \"b'", "cannot be split into words by shell rules: no closing quotation"),
        ("BIND=everywhere", "an IP address of this machine"),
        ("RUNTIME=native", "RUNTIME is native and NATIVE_PYTHON is empty"),
    ],
)  # fmt: skip
def test_wrong_values_are_refused_with_their_line(line, said):
    message = problem(line + "\n")
    assert message.startswith(".env line 3: ")
    assert said in message


def test_environment_is_named_as_the_place():
    assert problem("", PORT="abc").startswith("environment: PORT is ")


def test_a_key_is_never_repeated():
    for line in ("VLLM_API_KEY='sec ret'", 'VLLM_API_KEY="sec', "VLLM_API_KEY='sec' ret", "VLLM_API_KEYS=sec"):
        assert "sec" not in problem(line + "\n")
    assert config("VLLM_API_KEY=sec\n").text("VLLM_API_KEY") == REDACTED
    assert config().text("VLLM_API_KEY") == ""


# Addresses


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("127.0.0.1", "is a loopback address"),
        ("0.0.0.0", "is not the address of one machine"),
        ("224.0.0.1", "is not the address of one machine"),
        ("fe80::1", "is an IPv6 address"),
        ("10.0.0", "it must be an IPv4 address"),
        ("10.0.0.0.2", "it must be an IPv4 address"),
        ("spark-1", "it must be an IPv4 address"),
        ("10.0.0.1", "which HEAD_IP is already"),
    ],
)
def test_wrong_addresses_are_refused(address, said):
    (message,) = problems(f"HEAD_IP=10.0.0.1\n\nWORKER_IP={address}\n")
    assert message.startswith(".env line 3: WORKER_IP ")
    assert said in message


def test_missing_addresses_are_all_named():
    first, second = problems("# nothing\nHEAD_IP=\n")
    assert first.startswith(".env line 2: HEAD_IP is not filled in")
    assert second.startswith(".env: WORKER_IP is not filled in")
    assert len(problems(None, TP4)) == 4


def test_a_third_address_in_the_file_of_two_is_refused():
    assert problem("WORKER2_IP=10.0.0.3\n") == (
        ".env line 3: WORKER2_IP describes node 2, and start.sh serves 2; remove it."
    )


# Lines and names


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("WORKER1_IP=10.0.0.3", "WORKER1_IP is no setting; did you mean WORKER_IP?"),
        ("WORKER1_CX7_IF=x", "did you mean WORKER_CX7_IF?"),
        ("WORKER_GID_INDEX=3", "did you mean WORKER_GID?"),
        ("MAX_MODEL_LENGTH=3", "did you mean MAX_MODEL_LEN?"),
        ("gpu_mem_util=0.8", "did you mean GPU_MEM_UTIL?"),
        ("GPU_MEMORY_UTILIZATION=0.8", "did you mean GPU_MEM_UTIL?"),
        ("NCCL_DEBGU=INFO", "did you mean NCCL_DEBUG?"),
        ("NCCL_SOCKET_IFNAME=x", "it is found from each node's address"),
        ("ABLIT=1", "set MODEL_DIR; remove it."),
        ("GLM53_ANY=1", "steered patches of the older image"),
        ("FLASHINFER_DISABLE_VERSION_CHECK=1", "hangs or answers wrongly"),
        ("QWERTZ=1", "QWERTZ is no setting; docs/configuration.md lists all."),
        ("export PORT=1", "remove `export` in front of PORT"),
        ("PORT", "PORT stands alone"),
        ("PORT='1", "is not of the form NAME=value"),
        ("source other.env", "is not of the form NAME=value"),
        ("HEAD_IP=10.0.0.9", "HEAD_IP is set a second time, first in .env line 1"),
    ],
)
def test_lines_that_are_no_settings_are_refused(line, said):
    message = problem(line + "\n")
    assert message.startswith(".env line 3: ")
    assert said in message


def test_line_numbers_count_blank_lines_comments_and_values_of_several_lines():
    text = TWO + "\n\n# EXTRA\nEXTRA_ARGS='--a\n--b'\r\n\r\n   PORT=x\n"
    assert problems(text)[0].startswith(".env line 9: PORT ")
    assert config("EXTRA_ARGS='--a\n--b'\n")["EXTRA_ARGS"] == ("--a", "--b")


def test_line_numbers_hold_after_a_refused_line_with_windows_ends():
    said = problems("\ufeffno setting\r\nPORT=x\r\n" + TWO)
    assert [line.split(":")[0] for line in said] == [".env line 1", ".env line 2"]


def test_all_problems_are_told_in_the_order_of_their_lines():
    said = problems("PORT=x\nFOO_BAR_X=1\nexport A=1\nHEAD_IP=10.0.0.1\nVISION=2\n", KV_CACHE_GIB="much")
    assert [re.match(r"[^:]*", line)[0] for line in said] == [
        ".env line 1", ".env line 2", ".env line 3", ".env line 5", "environment", ".env",
    ]  # fmt: skip


NAMES = st.sampled_from([*ROWS, *RETIRED, *OTHER_NAMES]) | st.text(max_size=20)
VALUES = st.text(max_size=30) | st.sampled_from(
    ["1", "'", '"', "$(id)", "`id`", "${X}", "10.0.0.3", "a,b", "-1", "1e9"]
)
LINES = st.text(max_size=40) | st.tuples(NAMES, VALUES).map("=".join) | st.sampled_from(TWO.splitlines())
SAID = re.compile(r"(\.env line (\d+)|\.env|environment): \S")


@given(st.lists(LINES, max_size=12), st.sampled_from(["\n", "\r\n", "\r"]))
def test_any_text_parses_or_yields_messages_that_name_lines(lines, line_break):
    text = line_break.join(lines)
    try:
        parsed = load(TP2, text, ".env", {})
    except LauncherError as error:
        last = len(re.findall(r"\r\n|\r|\n", text)) + 1
        for message in str(error).splitlines():
            said = SAID.match(message)
            assert said, message
            assert 1 <= int(said[2] or 1) <= last
            assert said[2] or re.search(r"(HEAD|WORKER)_IP is not filled in", message)
    else:
        assert len(set(parsed.addresses)) == 2


@given(st.dictionaries(st.sampled_from(list(ROWS)), st.text(max_size=20), max_size=6))
def test_any_environment_counts_or_is_named(ambient):
    try:
        load(TP2, TWO, ".env", ambient)
    except LauncherError as error:
        for message in str(error).splitlines():
            assert re.match(r"(environment|\.env line [12]): \w+ ", message), message
