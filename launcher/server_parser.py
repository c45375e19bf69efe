"""vLLM's own parser of server arguments, made anew from what tools/record_server_parser.py wrote down of it.

So a flag that the pinned vLLM does not know, or a value that it does not take, is refused before anything starts.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

RECORD = Path(__file__).with_suffix(".json")
SUFFIXED = re.compile(r"(\d+)(\.\d+)?([kmgtKMGT])")
POWERS = "kmgt"
JSON_TYPES = {bool: "bool", int: "int", float: "float", str: "str", dict: "dict", list: "list", type(None): "null"}
NUMBERS = {"bool", "int", "float"}
OPTIMIZATION = "--optimization-level"  # which vLLM lets be written as -O1, -O=1 and -O 1


class Refused(ValueError):
    """What the parser says about the arguments."""


@functools.cache
def read_record() -> dict:
    return json.loads(RECORD.read_text(encoding="utf-8"))


@functools.cache
def recorded_parser() -> argparse.ArgumentParser:
    return make_parser(read_record())


@functools.cache
def names_by_flag() -> Mapping[str, tuple[str, ...]]:
    """Every way of writing a flag, whether it sets or clears, by each of these ways."""
    by_dest: dict[str, tuple[str, ...]] = {}
    actions = read_record()["actions"]
    for action in actions:
        by_dest[action["dest"]] = (*by_dest.get(action["dest"], ()), *action["flags"])
    return {flag: by_dest[action["dest"]] for action in actions for flag in action["flags"]}


def flags_of(given: Iterable[str]) -> list[tuple[str, ...]]:
    """The ways of writing each flag that was given, by the names under which parse() answers."""
    by_dest = {action["dest"]: tuple(action["flags"]) for action in reversed(read_record()["actions"])}
    return [by_dest[dest] for dest in given if dest in by_dest]


def parse(words: Sequence[str], parser: argparse.ArgumentParser | None = None) -> argparse.Namespace:
    """What vLLM would read from arguments; names that are not given are absent. Raises Refused."""
    return (parser or recorded_parser()).parse_args(prepared(words))


# Arguments


def prepared(words: Sequence[str]) -> list[str]:
    """Arguments as argparse reads them: names with dashes, and parts of objects (--a.b 1) as one object for each."""
    plain: list[str] = []
    parts: dict[str, dict] = {}
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if word.startswith("-O") and word != "-O":
            plain += [OPTIMIZATION, word[2:].removeprefix("=")]
        elif word.startswith("-") and "." in name and not re.fullmatch(r"-[\d.]+", name):
            flag, _, path = name.partition(".")
            put(parts.setdefault(dashed(flag), {}), path, value if equals else next(rest, ""))
        else:
            plain.append(OPTIMIZATION if word == "-O" else dashed(name) + equals + value)
    for flag, value in parts.items():
        plain += [flag, json.dumps(value)]
    return plain


def dashed(name: str) -> str:
    return name.replace("_", "-") if name.startswith("--") else name


def put(into: dict, path: str, text: str) -> None:
    *way, last = path.removesuffix("+").split(".")
    for step in way:
        into = into.setdefault(step, {})
        if not isinstance(into, dict):
            raise Refused(f"{path} is a part of what is not an object")
    into[last] = text.split(",") if path.endswith("+") else value_of(text)


def value_of(text: str) -> object:
    for read in (json.loads, human_readable_int):
        try:
            return read(text)
        except ValueError:
            continue
    return text


# Types


def human_readable_int(text: str) -> int:
    match = SUFFIXED.fullmatch(text.strip())
    if not match:
        return int(text)
    whole, decimals, suffix = match.groups()
    power = POWERS.index(suffix.lower()) + 1
    if suffix.islower():
        return int(float(whole + (decimals or "")) * 1000**power)
    if decimals:
        raise ValueError(f"decimals before {suffix}")
    return int(whole) * 1024**power


def human_readable_int_or_auto(text: str) -> int:
    return -1 if text.strip().lower() in ("-1", "auto") else human_readable_int(text)


def union_dict_and_str(text: str) -> object:
    return json.loads(text) if re.fullmatch(r"(?s)\s*{.*}\s*", text) else text


def lower_snake(text: str) -> str:
    return text.lower().replace("-", "_")


TYPES: dict[str, Callable[[str], object]] = {
    "str": str, "int": int, "float": float, "json": json.loads, "any": str, "parse_reasoning_parser": str,
    "lower": str.lower, "lower_snake": lower_snake, "human_readable_int": human_readable_int,
    "human_readable_int_or_auto": human_readable_int_or_auto, "union_dict_and_str": union_dict_and_str,
}  # fmt: skip


def type_named(word: str, whole: Mapping[str, dict] | None) -> Callable[[str], object]:
    """The function for a type of the record; `whole` are the fields where the value is an object."""

    def convert(text: str) -> object:
        if word.startswith("?") and text in ("", "None"):
            return None
        value = json.loads(text) if whole is not None else TYPES[word.lstrip("?")](text)
        return value if whole is None else checked(value, whole)

    convert.__name__ = "object" if whole is not None else word.lstrip("?")
    return convert


def checked(value: object, fields: Mapping[str, dict]) -> dict:
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("an object is needed, {...}")
    for name, one in value.items():
        field = fields.get(name.replace("-", "_"))
        if field is None:
            raise argparse.ArgumentTypeError(f"it has no field {name!r}")
        choices, types = field.get("choices"), field.get("types")
        if choices and isinstance(one, str) and not is_choice(one, choices):
            raise argparse.ArgumentTypeError(f"{name} is {one!r}, needed is one of {', '.join(map(str, choices))}")
        if types and not fits(one, types):
            raise argparse.ArgumentTypeError(f"{name} is {one!r}, needed is {' or '.join(types)}")
    return value


def is_choice(text: str, choices: Sequence) -> bool:
    # vLLM reads names of enumerations in any case, and "auto" as nothing chosen.
    return text in map(str, choices) or text.upper() in choices or text.lower() == "auto"


def fits(value: object, types: Sequence[str]) -> bool:
    own = JSON_TYPES[type(value)]
    if own in types:
        return True
    # Numbers and switches are read from each other, and from text that holds one.
    return bool(NUMBERS & set(types)) and (own in NUMBERS or (own == "str" and is_number(value)))


def is_number(text: str) -> bool:
    return bool(re.fullmatch(r"\s*[+-]?[\d.]+(e[+-]?\d+)?\s*|true|false|yes|no|on|off|[tfyn]", text.lower()))


# The parser


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise Refused(message)


class Switch(argparse.Action):
    """A flag with an opposite."""

    def __init__(self, option_strings, dest, negative=(), **more):
        super().__init__(option_strings, dest, nargs=0, **more)
        self.negative = negative

    def __call__(self, parser, namespace, values, option_string=None):
        setattr(namespace, self.dest, option_string not in self.negative)


def make_parser(record: Mapping) -> argparse.ArgumentParser:
    parser = Parser(add_help=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("model_tag", nargs="?")
    for action in record["actions"]:
        parser.add_argument(*action["flags"], dest=action["dest"], **keywords(action, record["objects"]))
    return parser


def keywords(action: Mapping, objects: Mapping[str, dict]) -> dict:
    if action["action"] == "switch":
        return {"action": Switch, "negative": action["negative"]}
    if action["action"] in ("flag", "help"):
        return {"action": "store_true"}
    named = action.get("object") or action["type"].partition("object:")[2]
    kind = type_named(action["type"], objects[named] if named else None)
    more = {name: action[name] for name in ("nargs", "choices") if name in action}
    return {"action": action["action"], "type": kind, **more}
