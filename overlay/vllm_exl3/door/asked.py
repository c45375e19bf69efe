"""How much a request asks for: limits by field, wherever in a JSON body the API's forms have it. Pure functions.

The body is read by the parser that FastAPI uses, so that what is judged is what vLLM will see.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from vllm_exl3.door.errors import Refusal
from vllm_exl3.door.rules import KIB, Rules

# A stop string is compared with the end of the text at every token.
LONGEST_STOP_CHARACTERS = 1024
# Objects that hold sampling fields one level down.
INNER = ("sampling_params",)
# Fields from which a grammar is made.
GRAMMAR_FIELDS = (
    "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_grammar", "guided_choice",
    "structural_tag", "text", "tools", "output_format", "output_config",
)  # fmt: skip


def as_number(value: object) -> float | None:
    """As pydantic reads a number field: texts of digits count too. None where it is none."""
    try:
        return float(value) if isinstance(value, int | float | str) else None
    except (ValueError, OverflowError):
        return None


def length(value: object) -> float | None:
    if isinstance(value, str):
        return 1
    return len(value) if isinstance(value, list | dict) else None


def prompts(value: object) -> float | None:
    """A list of texts or of lists is several prompts, a list of numbers is one."""
    return len(value) if isinstance(value, list) and value and not isinstance(value[0], int | float) else None


def conversations(value: object) -> float | None:
    return len(value) if isinstance(value, list) and value and isinstance(value[0], list) else None


def logprobs(value: object) -> float | None:
    """-1 asks for the whole vocabulary."""
    number = None if isinstance(value, bool) else as_number(value)
    return float("inf") if number is not None and number < 0 else number


@dataclass(frozen=True)
class Limit:
    rule: str  # of Rules; in capitals, the setting
    measure: Callable[[object], float | None]
    unit: str


N = Limit("max_n", as_number, "answers")
STOPS = Limit("max_stop_strings", length, "entries")
LOGPROBS = Limit("max_logprobs", logprobs, "alternatives per token")

LIMITS: Mapping[str, Limit] = {
    "n": N, "best_of": N,
    "prompt": Limit("max_prompts", prompts, "prompts"),
    "prompts": Limit("max_prompts", prompts, "prompts"),
    "messages": Limit("max_prompts", conversations, "conversations"),
    "logprobs": LOGPROBS, "top_logprobs": LOGPROBS, "prompt_logprobs": LOGPROBS,
    "stop": STOPS, "stop_sequences": STOPS, "stop_token_ids": STOPS, "bad_words": STOPS,
}  # fmt: skip


def read(body: bytes) -> dict | None:
    """The object that a body holds; None where it holds none, which vLLM refuses in its own words."""
    if not body:
        return None
    try:
        found = json.loads(body)
    except RecursionError:
        raise Refusal(400, "invalid_json", "The body is nested too deeply; send a flatter one.") from None
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def refuse_too_much(asked: dict, rules: Rules) -> None:
    """Raises Refusal naming the field, what it asks for, the limit and its setting."""
    for name, value in fields_of(asked):
        limit = LIMITS.get(name)
        amount = limit and limit.measure(value)
        most = limit and getattr(rules, limit.rule)
        if amount is not None and not amount <= most:
            raise too_much(name, f"{amount:g} {limit.unit}", str(most), limit.rule)
        if limit is STOPS:
            refuse_long_entries(name, value if isinstance(value, list) else [value])
    size = sum(len(json.dumps(value)) for name, value in fields_of(asked) if name in GRAMMAR_FIELDS and value)
    if size > rules.max_grammar_bytes:
        raise too_much("tools and response format", f"{size / KIB:.0f} KiB", f"{rules.max_grammar_kib} KiB",
                       "max_grammar_kib")  # fmt: skip


def refuse_long_entries(name: str, entries: list) -> None:
    for entry in entries:
        if isinstance(entry, str) and len(entry) > LONGEST_STOP_CHARACTERS:
            raise Refusal(
                400, "request_too_large",
                f"{name}: has an entry of {len(entry)} characters, at most {LONGEST_STOP_CHARACTERS} are compared; "
                f"shorten it.", name,
            )  # fmt: skip


def fields_of(asked: dict) -> Iterator[tuple[str, object]]:
    yield from asked.items()
    for name in INNER:
        if isinstance(asked.get(name), dict):
            yield from asked[name].items()


def too_much(field: str, asked: str, most: str, rule: str) -> Refusal:
    return Refusal(
        400, "request_too_large",
        f"{field}: asks for {asked}, this server gives at most {most} in one request; ask for less, or raise "
        f"{rule.upper()}.", field if " " not in field else None,
    )  # fmt: skip


# What is compiled

Part = tuple[str, str]  # (kind of grammar_trial.COMPILE, its text)


def grammars_of(asked: dict) -> list[Part]:
    """What vLLM will compile for this request, as parts. What is not of a known form is left to vLLM's own refusal."""
    parts: list[Part] = []
    for name, value in fields_of(asked):
        reader = READERS.get(name)
        if reader and value:
            parts += [(kind, text if isinstance(text, str) else json.dumps(text)) for kind, text in reader(value)]
    return parts


def of_format(value: object) -> Iterator[tuple[str, object]]:
    """OpenAI's response_format and text.format, Anthropic's output format."""
    if not isinstance(value, dict):
        return
    if isinstance(value.get("format"), dict):
        yield from of_format(value["format"])
    holder = value.get("json_schema")
    schema = holder.get("schema") if isinstance(holder, dict) and "schema" in holder else holder
    schema = schema if schema is not None else value.get("schema")
    if isinstance(schema, dict | str):
        yield "json", schema
    if value.get("type") == "structural_tag":
        yield from of_tag(value)


def of_tag(value: object) -> Iterator[tuple[str, object]]:
    """A structural tag in either form: of schemas between texts, or xgrammar's own."""
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(value) if isinstance(value, str) else value
    if isinstance(value, dict) and isinstance(value.get("structures"), list):
        for structure in value["structures"]:
            if isinstance(structure, dict) and isinstance(structure.get("schema"), dict):
                yield "json", structure["schema"]
    else:
        yield "structural_tag", value


def of_structured(value: object) -> Iterator[tuple[str, object]]:
    if not isinstance(value, dict):
        return
    for kind in ("json", "regex", "grammar"):
        if isinstance(value.get(kind), dict | str):
            yield kind, value[kind]
    if isinstance(value.get("structural_tag"), dict | str):
        yield from of_tag(value["structural_tag"])
    if isinstance(value.get("choice"), list):
        yield "choice", value["choice"]


def one(kind: str) -> Callable[[object], Iterator[tuple[str, object]]]:
    return lambda value: of_structured({kind: value})


def of_tools(value: object) -> Iterator[tuple[str, object]]:
    """vLLM pins a strict tool's arguments to its schema, and of another only their names and basic types."""
    for tool in value if isinstance(value, list) else ():
        if not isinstance(tool, dict):
            continue
        function = tool["function"] if isinstance(tool.get("function"), dict) else tool
        schema = function.get("parameters") or function.get("input_schema")
        if isinstance(schema, dict):
            yield "json", schema if function.get("strict") or tool.get("strict") else outline(schema)


def outline(schema: dict) -> dict:
    properties = schema.get("properties")
    names = properties if isinstance(properties, dict) else {}
    types = {name: one["type"] if isinstance(one, dict) and isinstance(one.get("type"), str) else "string"
             for name, one in names.items()}  # fmt: skip
    return {"type": "object", "properties": {name: {"type": kind} for name, kind in types.items()}}


READERS: Mapping[str, Callable[[object], Iterator[tuple[str, object]]]] = {
    "response_format": of_format, "text": of_format, "output_format": of_format, "output_config": of_format,
    "structured_outputs": of_structured, "tools": of_tools, "structural_tag": one("structural_tag"),
    "guided_json": one("json"), "guided_regex": one("regex"), "guided_grammar": one("grammar"),
    "guided_choice": one("choice"),
}  # fmt: skip
