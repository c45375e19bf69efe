"""What a command found, told once: as text for people, or as the one JSON document that docs/json.md describes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from launcher import arguments, version
from launcher.errors import Exit

# Grows when a field goes or changes its meaning, not when one is added.
SCHEMA_VERSION = 1


class Report(Protocol):
    kind: str  # the schema: launcher/schemas/KIND.json

    @property
    def code(self) -> Exit: ...

    @property
    def problem(self) -> str:
        """The sentence that goes with a code other than OK."""

    def text(self) -> str: ...

    def body(self) -> Mapping[str, object]: ...


@dataclass(frozen=True)
class PlanReport:
    """What `plan` tells of a topology, in both forms."""

    kind: ClassVar[str] = "plan"
    code: ClassVar[Exit] = Exit.OK
    problem: ClassVar[str] = ""
    content: Mapping[str, object]
    words: str

    def body(self) -> Mapping[str, object]:
        return self.content

    def text(self) -> str:
        return self.words


def tell(report: Report, *, as_json: bool, notes: Sequence[str] = ()) -> Exit:
    print(render(report.kind, report.code, report.problem, report.body(), notes) if as_json else report.text())
    return report.code


def tell_error(message: str, code: Exit, words: Sequence[str]) -> None:
    """Of a command that came to no result: the document, where the command line asks for one. People have been told."""
    if arguments.wants_json(words):
        print(render("error", code, message, {}))


def render(kind: str, code: Exit, problem: str, body: Mapping[str, object], notes: Sequence[str] = ()) -> str:
    error = {"exit_code": int(code), "name": code.name, "message": problem} if code else None
    head = {"schema": kind, "schema_version": SCHEMA_VERSION, "version": version.product()}
    return json.dumps({**head, "exit_code": int(code), "error": error, "notes": list(notes), **body}, indent=2)
