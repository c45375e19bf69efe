"""The installed vLLM's own parser takes the server arguments of every plan; the recorded one reads them as it does.

The same tests pass with vLLM 0.33.0's files (tools/record_server_parser.py says how to get them):
VLLM_PLUGINS= PYTHONPATH=overlay:DIR pytest THIS_FILE
"""

import argparse
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")
sys.path.append(str(Path(__file__).resolve().parents[1] / "host"))

from server_arguments import COMMAND, DAMAGE, damaged, distinct, parsed
from vllm.engine.arg_utils import AsyncEngineArgs

from launcher import server_parser
from tools import record_server_parser


@pytest.fixture(scope="module")
def module_parser():
    """Of `python -m vllm.entrypoints.openai.api_server`."""
    return record_server_parser.make_parser()


@pytest.fixture(scope="module")
def command_parser():
    """Of `vllm serve`."""
    from vllm.entrypoints.cli.serve import cmd_init
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    (serve,) = cmd_init()
    serve.subparser_init(parser.add_subparsers(dest="subparser"))
    return parser


@pytest.fixture(scope="module")
def recorded(module_parser):
    return server_parser.make_parser(record_server_parser.record(module_parser))


@pytest.fixture(scope="module")
def read(module_parser, command_parser):
    """Every plan's arguments as the installed vLLM reads them."""

    def one(words):
        parser = command_parser if words[0] == COMMAND else module_parser
        try:
            return parser.parse_args(list(words))
        except SystemExit as error:
            return error

    return {words: one(words) for words in distinct()}


def test_the_installed_vllm_takes_every_plan(read):
    assert [distinct()[words] for words, found in read.items() if isinstance(found, SystemExit)] == []


def test_vllms_further_checks_of_the_arguments_pass(read):
    check = record_server_parser.parser_module().validate_parsed_serve_args
    for words, found in read.items():
        if "--chat-template" not in words:  # that file is the user's
            check(found)


def test_the_recorded_parser_reads_them_as_vllm_does(read, recorded):
    """Objects, which vLLM makes of JSON, are compared by their fields."""
    for words, found in read.items():
        for name, value in parsed(words, recorded).items():
            theirs = getattr(found, name)
            if isinstance(value, dict) and not isinstance(theirs, dict):
                assert [key for key in value if not hasattr(theirs, key)] == []
            elif name != "optimization_level":
                assert theirs == value, (name, words)


def test_the_engine_takes_the_objects(read):
    """`AsyncEngineArgs` makes its configurations of them; drafts it leaves to later, so their fields are looked up."""
    from vllm.config import SpeculativeConfig

    by_objects = {tuple(word for word in words if word.startswith("{")): found for words, found in read.items()}
    for found in by_objects.values():
        made = AsyncEngineArgs.from_cli_args(found)
        for name, value in (made.speculative_config or {}).items():
            assert name in SpeculativeConfig.__dataclass_fields__, name
            if name == "attention_backend":
                assert SpeculativeConfig._parse_attention_backend(value).name == value


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_arguments_are_refused_by_both(name, module_parser, recorded, capsys):
    words = damaged(name)
    with pytest.raises((SystemExit, ValueError, argparse.ArgumentError)):
        module_parser.parse_args(list(words))
    with pytest.raises(server_parser.Refused):
        parsed(words, recorded)


@pytest.mark.parametrize(
    "words",
    ["--compilation-config {\"mod\":3}", "--attention-config {\"backend\":\"NOT_ONE\"}", "--seed=x", "-tp", "-asc x",
     "--kv-transfer-config {\"kv_role\":\"neither\"}", "--load-format", "--runner nothing", "--enable-lora=1"],
)  # fmt: skip
def test_both_refuse(words, module_parser, recorded, capsys):
    with pytest.raises((SystemExit, ValueError)):
        module_parser.parse_args(words.split())
    with pytest.raises(server_parser.Refused):
        server_parser.parse(words.split(), recorded)


@pytest.mark.parametrize(
    "words",
    ["--compilation-config.mode 3", "-cc.cudagraph_mode=NONE", "-tp=2", "-O2", "--max_model_len 1k", "--max-model 2K",
     "--attention-config {\"backend\":\"flash_attn\"}", "--generation-config vllm", "--no-enable-chunked-prefill",
     "--structured-outputs-config.backend xgrammar", "--kv-cache-memory-bytes 1G"],
)  # fmt: skip
def test_both_take(words, module_parser, recorded):
    theirs, ours = module_parser.parse_args(words.split()), server_parser.parse(words.split(), recorded)
    (name,) = [name for name in vars(ours) if name != "model_tag"]
    if not isinstance(getattr(ours, name), dict):
        assert str(getattr(ours, name)) == str(getattr(theirs, name))


def test_the_kept_record_is_what_the_program_writes(module_parser):
    """Of its own version it is the same text, of another it has the same form."""
    import vllm

    found, kept = record_server_parser.record(module_parser), server_parser.read_record()
    assert set(found) == set(kept)
    assert {action["type"].lstrip("?").partition(":")[0] for action in kept["actions"] if "type" in action} <= {
        *server_parser.TYPES, "object"
    }  # fmt: skip
    if vllm.__version__ == kept["vllm"]:
        assert record_server_parser.text_of(found) == server_parser.RECORD.read_text()
