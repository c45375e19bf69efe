"""What the plans give to vLLM: the server's arguments for every setting that has a flag, with its ugly values."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from pathlib import Path

from cluster_settings import CASES, plan_of, settings

from launcher import commands, kinds, server_parser
from launcher import plan as local_plan
from launcher import settings as local_settings
from launcher.kinds import to_text
from launcher.refusals import refusals
from launcher.table import TABLE, Row

MODULE, COMMAND = "vllm.entrypoints.openai.api_server", "serve"
SHAPES = tuple(itertools.product(("tp2", "tp3", "tp4"), ("docker", "native"), ("ray", "mp")))
METHODS = ("none", "mtp", "dflash")
EXTRA = (
    "--seed 7",
    "--hf-overrides '{\"a\": 1}' --safetensors_load_strategy=lazy",
    "--compilation-config.cudagraph_mode FULL_AND_PIECEWISE -O2",
)
# Beside a flag of its own some settings need another one.
NEEDS = {"BIND": {"VLLM_API_KEY": "sk-1"}}


def server_words(plan) -> Iterator[list[str]]:
    """The arguments of each server of a plan."""
    for rank in plan.ranks:
        for unit in rank.units:
            if unit.name == "server":
                yield arguments(unit.start)


def arguments(words) -> list[str]:
    """Those that vLLM's parser gets: from `serve` on, or what is behind the module's name."""
    words = list(words)
    return words[words.index(MODULE) + 1 :] if MODULE in words else words[words.index(COMMAND) :]


def changed_settings() -> Iterator[dict[str, object]]:
    """One setting at a time with each of its choices, or with its bounds; every method of drafting; extra flags."""
    yield {}
    for row in (row for row in TABLE if row.flag):
        for value in ugly_values(row):
            yield {row.name: value, **NEEDS.get(row.name, {})}
    for method, vision in itertools.product(METHODS, (False, True)):
        yield {"SPEC_METHOD": method, "VISION": vision}
    for words in EXTRA:
        yield {"EXTRA_ARGS": words}


def ugly_values(row: Row) -> tuple:
    if row.choices:
        return row.choices
    if row.type is kinds.SWITCH:
        return (False, True)
    if None not in (row.minimum, row.maximum):
        return (to_text(row.minimum), to_text(row.maximum), *([""] if row.empty else []))
    return {"MODEL_DIR": ("/data/a b",), "DRAFT_DIR": ("/data/a=b",), "BIND": ("0.0.0.0", "::1"),
            "MOE_BACKEND": ("triton",)}[row.name]  # fmt: skip


def of_clusters() -> Iterator[tuple[str, list[str]]]:
    """(what it is, words) of the golden plans and of every combination of shape and changed setting that is allowed."""
    for name, (config, is_found) in CASES.items():
        yield from ((name, words) for words in server_words(plan_of(config(), is_found)))
    for topology, runtime, executor in SHAPES:
        for changes in changed_settings():
            config = settings(topology, **{"RUNTIME": runtime, "EXECUTOR": executor, **changes})
            for rank in range(config.topology.nodes if not refusals(config) else 0):
                if words := commands.server(config, rank):
                    yield f"{topology} {runtime} {executor} {changes}", arguments(words)


def of_local() -> Iterator[tuple[str, list[str]]]:
    for flags in ({}, {"expert_parallel": True}, {"tensor_parallel_size": 2, "port": 9000, "max_model_len": 64}):
        values = local_settings.resolve({"model": Path("/a b/model"), "run_dir": Path("/r"), **flags}, {})
        argv = local_plan.serve(values, Path("/env/bin/python"))
        yield f"local {flags}", arguments(argv)


@functools.cache
def distinct() -> dict[tuple[str, ...], str]:
    """All of them once each, with the first plan that has them."""
    found: dict[tuple[str, ...], str] = {}
    for name, words in itertools.chain(of_local(), of_clusters()):
        found.setdefault(tuple(words), name)
    return found


def with_flag(words: tuple[str, ...], flag: str, *instead: str) -> tuple[str, ...]:
    """The same words with something else in the place of a flag, and of its value where both are given anew."""
    at = words.index(flag)
    return (*words[:at], *instead, *words[at + len(instead) :])


# What a plan must never hold again: (flag, what stands in its place), each refused by vLLM's parser.
DAMAGE = {
    "renamed flag": ("--max-num-seqs", ("--max-num-sequences",)),
    "renamed switch": ("--no-async-scheduling", ("--no-asynchronous-scheduling",)),
    "not a number": ("--max-model-len", ("--max-model-len", "long")),
    "not a choice": ("--mm-encoder-tp-mode", ("--mm-encoder-tp-mode", "sliced")),
    "not JSON": ("--speculative-config", ("--speculative-config", "{'method': 'mtp'}")),
    "no value": ("--port", ("--port", "--enforce-eager")),
    "a value for a switch": ("--enable-auto-tool-choice", ("--enable-auto-tool-choice=yes",)),
}


def damaged(name: str) -> tuple[str, ...]:
    flag, instead = DAMAGE[name]
    words = next(words for words in distinct() if flag in words and words[0] != COMMAND)
    return with_flag(words, flag, *instead)


def parsed(words, parser=None) -> dict[str, object]:
    """By the recorded parser, or another made from a record."""
    own = words[1:] if words[0] == COMMAND else words
    return vars(server_parser.parse(own, parser))
