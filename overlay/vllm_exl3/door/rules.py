"""What the door was told: the settings as one JSON object in the environment, read once at the start."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields

# The launcher writes it (launcher/door_settings.py); a server that is started by hand may do without.
NAME = "EXL3_DOOR"

MIB, KIB = 1 << 20, 1 << 10


class RulesError(ValueError):
    """A rule that does not exist, or with a value that it cannot have."""


@dataclass(frozen=True)
class Rules:
    """`metrics`: "key" or "open". `engine_routes`: serve also what is not in routes.CLIENT_ROUTES. `cors_origins`,
    `allowed_hosts`: see docs/security.md. The rest are the most that one request, or all connections, may have; times
    are seconds."""

    metrics: str = "key"
    engine_routes: bool = False
    api_docs: bool = False
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    max_body_mib: int = 16
    max_n: int = 16
    max_prompts: int = 64
    max_logprobs: int = 20
    max_stop_strings: int = 64
    max_grammar_kib: int = 1024
    grammar_timeout_s: int = 10
    receive_timeout_s: int = 60
    max_connections: int = 1024

    @property
    def max_body_bytes(self) -> int:
        return self.max_body_mib * MIB

    @property
    def max_grammar_bytes(self) -> int:
        return self.max_grammar_kib * KIB


def parse(environment: Mapping[str, str]) -> Rules:
    """Raises RulesError naming the rule, what it is and what it may be."""
    text = environment.get(NAME, "").strip()
    try:
        given = json.loads(text) if text else {}
    except ValueError as error:
        raise RulesError(f"{NAME}: is not JSON ({error}); unset it or let the launcher write it") from None
    if not isinstance(given, dict):
        raise RulesError(f"{NAME}: is {type(given).__name__}, expected an object of rules")
    known = {field.name: field for field in fields(Rules)}
    values = {}
    for name, value in given.items():
        if name not in known:
            raise RulesError(f"{NAME}: has {name!r}, expected some of {', '.join(known)}")
        values[name] = _checked(name, known[name].default, value)
    return Rules(**values)


def _checked(name: str, default: object, value: object) -> object:
    if isinstance(default, tuple):
        if isinstance(value, list) and all(isinstance(one, str) for one in value):
            return tuple(value)
        raise RulesError(f"{NAME}: {name} is {value!r}, expected a list of texts")
    if name == "metrics" and value not in ("key", "open"):
        raise RulesError(f"{NAME}: {name} is {value!r}, expected key or open")
    if type(value) is not type(default) or (type(value) is int and value < 1):
        raise RulesError(f"{NAME}: {name} is {value!r}, expected a value like {default!r}")
    return value
