"""Writes down what a vLLM's own parser of server arguments knows: launcher/server_parser.json is what this printed.

    pip download --no-deps vllm==0.33.0 && unzip -q vllm-0.33.0-*.whl 'vllm/*' -x '*.so' -d DIR
    VLLM_PLUGINS= PYTHONPATH=DIR .venv-local/bin/python -m tools.record_server_parser > launcher/server_parser.json

Nothing of vLLM is compiled for it: its CPU platform stands in, on which the parser does not depend.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import importlib
import inspect
import json
import sys
import types
import typing

# Where the parser is: it moves from version to version.
MODULES = ("vllm.entrypoints.common.cli_args", "vllm.entrypoints.launchers.cli_args")
# Objects that the parser leaves to the engine as they were written.
LATER = {"--speculative-config": ("vllm.config", "SpeculativeConfig")}
SIMPLE = {bool: "bool", int: "int", float: "float", str: "str", dict: "dict", list: "list", type(None): "null"}
ACTIONS = {
    "_StoreAction": "store", "_StoreTrueAction": "flag", "_AppendAction": "append", "_HelpAction": "help",
    "BooleanOptionalAction": "switch", "EnableDisableAction": "switch", "LoRAParserAction": "store",
    "DeprecatedLogConfigFileAction": "store",
}  # fmt: skip
# What a nameless function of the parser makes of a text.
NAMELESS = {"ab_c": "lower_snake", "ab-c": "lower"}


def make_parser() -> argparse.ArgumentParser:
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    if not vllm.platforms.current_platform.device_type:
        vllm.platforms._current_platform = CpuPlatform()
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return parser_module().make_arg_parser(FlexibleArgumentParser())


def parser_module() -> types.ModuleType:
    for name in MODULES:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
    raise SystemExit(f"This vLLM has none of {', '.join(MODULES)}: its parser has moved; name the new place here.")


def record(parser: argparse.ArgumentParser) -> dict:
    import vllm

    objects: dict[str, dict] = {}
    for module, name in LATER.values():
        objects[name] = fields_of(getattr(importlib.import_module(module), name))
    named: dict[int, list[str]] = {}
    for text, action in parser._option_string_actions.items():
        named.setdefault(id(action), []).append(text)
    actions = [action_of(action, named[id(action)], objects) for action in parser._actions if id(action) in named]
    return {"vllm": vllm.__version__, "actions": actions, "objects": dict(sorted(objects.items()))}


def action_of(action: argparse.Action, flags: list[str], objects: dict) -> dict:
    kind = ACTIONS.get(type(action).__name__)
    if kind is None:
        raise SystemExit(f"{flags[0]}: {type(action).__name__} is an action that this program does not know; add it.")
    found = {"flags": flags, "dest": action.dest, "action": kind}
    if kind == "switch":
        negative = getattr(action, "negative_option_strings", {name for name in flags if name.startswith("--no-")})
        found["negative"] = sorted(negative)
    if kind in ("store", "append"):
        found["type"] = type_of(action.type, objects)
        later = [name for flag, (_, name) in LATER.items() if flag in flags]
        found |= {"object": later[0]} if later else {}
        found |= {"nargs": action.nargs} if action.nargs else {}
        found |= {"choices": list(action.choices)} if action.choices else {}
    return found


def type_of(function, objects: dict) -> str:
    """One word for what makes a value of a text; `?` before it where None is a value, too."""
    if function is None:
        return "str"
    inside = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
    if function.__name__ == "_optional_type":
        return "?" + type_of(inside["return_type"], objects).lstrip("?")
    if function.__name__ == "_parse_type":
        return type_of(inside["return_type"], objects)
    if function.__name__ == "parse_dataclass":
        whole = function.__defaults__[0]
        objects[whole.__name__] = fields_of(whole)
        return f"object:{whole.__name__}"
    if function.__name__ == "<lambda>":
        try:
            return NAMELESS[function("Ab-C")]
        except (KeyError, TypeError, ValueError, argparse.ArgumentTypeError):
            return "any"
    return {"loads": "json"}.get(function.__name__, function.__name__)


def fields_of(whole: type) -> dict[str, dict]:
    """Field -> {"types": ..., "choices": ...} as far as simple types tell, {} where anything may stand."""
    hints = typing.get_type_hints(whole)
    given = [field.name for field in dataclasses.fields(whole) if field.init]
    return {name: simple(hints[name]) for name in given}


def simple(hint) -> dict:
    kinds, choices = set(), set()
    for one in alternatives(hint):
        origin = typing.get_origin(one) or one
        if origin is typing.Literal:
            choices |= set(typing.get_args(one))
        elif inspect.isclass(origin) and issubclass(origin, enum.Enum):
            # vLLM takes their names, and pydantic their values.
            choices |= {*origin.__members__, *(member.value for member in origin)}
        elif origin in SIMPLE:
            kinds.add(SIMPLE[origin])
        else:
            return {}
    choices = {choice for choice in choices if type(choice) in SIMPLE}
    kinds |= {SIMPLE[type(choice)] for choice in choices}
    # Beside a plain text, words are suggestions.
    closed = choices and not {hint for hint in alternatives(hint) if hint is str}
    return {"types": sorted(kinds)} | ({"choices": sorted(choices, key=str)} if closed else {})


def alternatives(hint) -> list:
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        return alternatives(typing.get_args(hint)[0])
    if origin in (typing.Union, types.UnionType):
        return [part for one in typing.get_args(hint) for part in alternatives(one)]
    return [hint]


def text_of(found: dict) -> str:
    """JSON with an action or a class to a line, so that a new vLLM's record can be compared with the last."""
    lines = [f'{{"vllm": {json.dumps(found["vllm"])},', '"actions": [']
    lines.append(",\n".join(json.dumps(action) for action in found["actions"]) + "],")
    lines.append('"objects": {')
    lines.append(",\n".join(f"{json.dumps(name)}: {json.dumps(one)}" for name, one in found["objects"].items()) + "}}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(text_of(record(make_parser())))
