import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.config import load
from launcher.errors import LauncherError
from launcher.importing import DROPPED, KEPT, REPLACED, import_text
from launcher.table import OTHER_NAMES, RETIRED, ROWS
from launcher.topology import TOPOLOGIES

TP2 = TOPOLOGIES["tp2"]
TWO = "HEAD_IP=10.0.0.1\nexport WORKER_IP=10.0.0.2\n"


def imported(text: str):
    return import_text(TP2, text, "OLD/.env")


def fate(line: str) -> tuple[str, str]:
    """(verdict, reason) of a line that stands third."""
    items = [item for item in imported(f"{TWO}{line}\n").items if item.where == "OLD/.env line 3"]
    assert len(items) == 1
    return items[0].verdict, items[0].reason


def config(text: str):
    return load(TP2, imported(TWO + text).text, ".env", {})


def test_a_whole_old_file_becomes_one_that_starts():
    old = """\
# my pair
NCCL_IB_GID_INDEX=3
HEAD_CX7_IF=enp1s0f1np1
HEAD_CX7_IB=rocep1s0f1
MAX_MODEL_LEN=500000
GPU_MEM_UTIL=0.85
SPEC_METHOD=mtp
ABLIT=0
VLLM_API_KEY=very-secret
EXTRA_ARGS="--kv-cache-memory-bytes 15032385536 --cudagraph-capture-sizes 1 2 4 8 --no-enable-prefix-caching"
"""
    result = imported(TWO + old)
    ours = load(TP2, result.text, ".env", {})
    assert ours.addresses == ("10.0.0.1", "10.0.0.2")
    assert (ours["NCCL_IB_GID_INDEX"], ours["HEAD_CX7_IF"], ours["HEAD_CX7_IB"]) == (None, "", ())
    assert (ours["MAX_MODEL_LEN"], ours["KV_CACHE_GIB"], ours["PREFIX_CACHE"]) == (500_000, 14.0, False)
    assert ours["EXTRA_ARGS"] == ("--cudagraph-capture-sizes", "1", "2", "4", "8")
    assert ours["VLLM_API_KEY"] == "very-secret"
    assert result.todo == ()
    assert "very-secret" not in "\n".join(result.report)
    assert "#GPU_MEM_UTIL=0.85" in result.text  # the default here, too, so it stays a comment


@pytest.mark.parametrize(
    ("line", "verdict", "reason"),
    [
        ("MAX_NUM_SEQS=2", KEPT, "means the same here"),
        ("PORT=8888", KEPT, "the default here, too"),
        ("WORKER_GID=3", REPLACED, "found from the node's address"),
        ("WORKER1_CX7_IF=enp1s0f1np1", REPLACED, "found from the node's address"),
        ("GPU_MEMORY_UTILIZATION=0.8", REPLACED, "is GPU_MEM_UTIL here"),
        ("IMAGE=vllm/vllm-openai:glm53-flash-arm64-cu130", REPLACED, "lacks the plugin"),
        ("NCCL_SOCKET_IFNAME=enp1s0f1np1", DROPPED, "it is found from each node's address"),
        ("GLM53_FAIR=1", DROPPED, "patches of the older image"),
        ("WORKER2_IP=10.0.0.3", DROPPED, "start.sh serves 2 nodes"),
        ("KV_CACHE_DTYPE=bf16", DROPPED, "one of fp8, auto"),
        ("CACHE_DIR=$HOME/.cache", DROPPED, "never run by a shell"),
        ("PORT=", DROPPED, "empty, so the default holds"),
        ("MAX_MODELS_LEN=1", DROPPED, "MAX_MODEL_LEN is the nearest"),
        ("MY_OWN=1", DROPPED, "no setting here"),
        ("if true; then", DROPPED, "shell code"),
        ("EXTRA_ARGS='\"'", DROPPED, "cannot be split into words"),
        ("EXTRA_ARGS=--chat-template=/x", KEPT, "stays in EXTRA_ARGS"),
        ("EXTRA_ARGS=--max_num_seqs=2", REPLACED, "is MAX_NUM_SEQS=2 here"),
        ("EXTRA_ARGS='--kv-cache-memory-bytes 14GB'", DROPPED, "set KV_CACHE_GIB instead"),
        ("EXTRA_ARGS='--gpu-memory-utilization 2'", DROPPED, "from 0.05 to 0.95"),
        ("EXTRA_ARGS='--tensor-parallel-size 2'", DROPPED, "the launcher decides it"),
        ("EXTRA_ARGS='--host 0.0.0.0'", DROPPED, "set BIND"),
    ],
)
def test_each_line_is_kept_replaced_or_dropped_with_a_reason(line, verdict, reason):
    got, said = fate(line)
    assert got == verdict
    assert reason in said


def test_a_later_line_overrules_an_earlier_one_and_flags_overrule_lines():
    result = imported(TWO + "EXTRA_ARGS='--max-num-seqs 6'\nMAX_NUM_SEQS=2\nMAX_NUM_SEQS=3\n")
    assert load(TP2, result.text, ".env", {})["MAX_NUM_SEQS"] == 6
    overruled = [item.reason for item in result.items if item.what.startswith("MAX_NUM_SEQS")]
    assert overruled == ["overruled by OLD/.env line 5", "overruled by OLD/.env line 3"]


@pytest.mark.parametrize("line", ["API_KEY=hush", "HF_TOKEN=hush", "MY_SECRET=hush", "EXTRA_ARGS='--api-key hush'",
                                  "EXTRA_ARGS=--api-key=hush", "VLLM_API_KEY='hush hush'"])  # fmt: skip
def test_secrets_are_not_printed(line):
    assert "hush" not in "\n".join(imported(f"{TWO}{line}\n").report)


def test_what_is_missing_is_told():
    first, second = imported("PORT=9000\n").todo
    assert "HEAD_IP is not filled in" in first and "WORKER_IP is not filled in" in second


def test_a_context_that_the_default_cache_may_not_hold_is_told():
    (said,) = imported(TWO + "MAX_MODEL_LEN=850000\n").todo
    assert "KV_CACHE_GIB is 11 unless you set it" in said and "about 13.4" in said
    assert imported(TWO + "MAX_MODEL_LEN=850000\nKV_CACHE_GIB=14\n").todo == ()


def test_values_with_spaces_and_quotes_are_written_so_that_they_are_read_back():
    assert config("""EXTRA_ARGS='--x "a b" --y "it\\'s"'\n""")["EXTRA_ARGS"] == ("--x", "a b", "--y", "it's")
    assert config("CACHE_DIR='/a b#c'\n")["CACHE_DIR"] == "/a b#c"


NAMES = st.sampled_from([*ROWS, *RETIRED, *OTHER_NAMES]) | st.text(max_size=12)
VALUES = st.text(max_size=30) | st.sampled_from(
    ["1", "850000", "--max-num-seqs 3 -x", "--host=", "--a.b=1", "mtp", "10.0.0.3"]
)
OLD_LINES = st.text(max_size=40) | st.tuples(NAMES, VALUES).map("=".join)


@given(st.lists(OLD_LINES, max_size=12))
def test_any_old_file_is_taken_over_into_one_that_lacks_addresses_at_most(lines):
    result = imported("\n".join(lines))
    try:
        load(TP2, result.text, ".env", {})
    except LauncherError as error:
        for message in str(error).splitlines():
            assert any(words in message for words in ("is not filled in", "is already", "NATIVE_PYTHON is empty"))
