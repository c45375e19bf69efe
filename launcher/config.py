"""From the env file and the caller's environment to typed settings, or to one message that names every mistake.

Precedence: built-in < topology < env file < caller's environment. An empty value clears what stands below it.
The file is parsed by python-dotenv without interpolation and never executed.
"""

from __future__ import annotations

import difflib
import importlib.util
import io
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from launcher import kinds
from launcher.errors import Exit, LauncherError
from launcher.table import NODE_NAMES, OTHER_NAMES, ROWS, TABLE, Row, is_foreign, what_became_of
from launcher.topology import Topology

ENVIRONMENT = "environment"
BUILT_IN = "built-in"
REDACTED = "<set, not shown>"
DRAFTED_TOKENS = {"dflash": 7, "mtp": 3, "none": 0}
LONGEST_SHOWN = 60
NOT_FILLED_IN = "is not filled in"
LONGEST_VALUE_BYTES = 64 << 10
LINE_BREAK = re.compile(r"\r\n|\n|\r")
# In quotes, or bare up to a comment.
OPEN_QUOTE = re.compile(r"""[^#=]*=[ \t]*(?:'(?:[^'\\]|\\.)*|"(?:[^"\\]|\\.)*)\Z""")
PLAIN_RUN_DIR = re.compile(
    r"""[ \t]*RUN_DIR[ \t]*=[ \t]*(?:'([^'\\]*)'|"([^"\\]*)"|([^\s'"#](?:[^#]*[^#\s])?)?)(?:[ \t]+\#.*)?[ \t]*"""
)

# Distance at which a name counts as a slip: in the file every name is meant for us, in the environment hardly any is.
SLIP_IN_FILE, SLIP_IN_ENVIRONMENT = 0.7, 0.9


@dataclass(frozen=True)
class Config:
    """Every row of the table with its typed value and where it came from."""

    topology: Topology
    values: Mapping[str, object]
    sources: Mapping[str, str]
    notes: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> object:
        return self.values[name]

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of the nodes, in the order of their ranks."""
        return tuple(self.values[f"{name}_IP"] for name in NODE_NAMES[: self.topology.nodes])

    def text(self, name: str) -> str:
        """The value as one could write it into the file; secrets are not shown."""
        row, value = ROWS[name], self.values[name]
        return REDACTED if row.secret and value else kinds.text_of(row.type, value)


@dataclass(frozen=True)
class Assignment:
    name: str
    text: str
    where: str  # ".env line 12" or "environment"


@dataclass(frozen=True)
class Lines:
    """What an env file holds: assignments, and a sentence for each line that is none."""

    assignments: tuple[Assignment, ...]
    problems: tuple[str, ...]


def load(
    topology: Topology,
    env_text: str | None,
    env_name: str,
    ambient: Mapping[str, str],
    *,
    with_addresses: bool = True,
) -> Config:
    """Raises LauncherError with all problems, one a line. `with_addresses=False`: for what asks no node."""
    lines = read_lines(env_text or "", env_name)
    problems = [*lines.problems, *misplaced(lines.assignments, topology)]
    known = [assignment for assignment in lines.assignments if is_known(assignment.name, topology)]
    outside = [Assignment(row.name, ambient[row.name], ENVIRONMENT)
               for row in TABLE if row.ambient and row.name in ambient and is_known(row.name, topology)]  # fmt: skip
    values, sources = defaults(topology)
    last_written = {}
    for assignment in (*known, *outside):
        last_written[assignment.name] = assignment
        problems += apply(assignment, topology, values, sources)
    if with_addresses:
        problems += address_problems(topology, values, sources, last_written, env_name)
    problems += combination_problems(values, sources)
    if problems:
        raise LauncherError("\n".join(sorted(problems, key=line_of)), Exit.USAGE)
    if values["SPEC_TOKENS"] is None or values["SPEC_METHOD"] == "none":
        values["SPEC_TOKENS"] = DRAFTED_TOKENS[values["SPEC_METHOD"]]
    return Config(
        topology, MappingProxyType(values), MappingProxyType(sources), tuple(notes(topology, env_name, ambient))
    )


def of_what_runs(topology: Topology, env_text: str | None, ambient: Mapping[str, str]) -> Config:
    """Where the run of an unusable env file keeps its state: RUN_DIR as far as it can be read, all else built in.

    Enough to look at what runs and to end it, never to start anything.
    """
    values, sources = defaults(topology)
    for assignment in run_dir_assignments(topology, env_text or "", ambient):
        before = values["RUN_DIR"]
        if apply(assignment, topology, values, sources):
            values["RUN_DIR"] = before
    return Config(topology, MappingProxyType(values), MappingProxyType(sources))


def run_dir_assignments(topology: Topology, env_text: str, ambient: Mapping[str, str]) -> list[Assignment]:
    of_caller = [Assignment("RUN_DIR", ambient["RUN_DIR"], ENVIRONMENT)] if "RUN_DIR" in ambient else []
    if has_parser():
        lines = read_lines(env_text, topology.env_file)
        return [*(one for one in lines.assignments if one.name == "RUN_DIR"), *of_caller]
    return of_caller or read_plain_run_dir(env_text, topology.env_file)


def has_parser() -> bool:
    """Whether env files can be read: stop, status and logs also run where the launcher's packages are not."""
    return importlib.util.find_spec("dotenv") is not None


def read_plain_run_dir(text: str, env_name: str) -> list[Assignment]:
    """What python-dotenv would say of RUN_DIR, where its value has no escapes and no line breaks; else a refusal."""
    found, is_open = [], False
    for number, line in enumerate(LINE_BREAK.split(text.removeprefix("\ufeff")), 1):
        if re.match(r"[ \t]*RUN_DIR[ \t]*=", line):
            match, where = PLAIN_RUN_DIR.fullmatch(line), f"{env_name} line {number}"
            if match is None or is_open:  # what stands behind an open quote may be text
                raise LauncherError(
                    f"{where}: RUN_DIR is written in a way that only the launcher's own Python packages can read, and "
                    f"they are not here; give it in the environment, as RUN_DIR=DIR.",
                    Exit.USAGE,
                )
            found.append(Assignment("RUN_DIR", next(filter(None, match.groups()), ""), where))
        is_open = is_open or bool(OPEN_QUOTE.match(line))
    return found


def line_of(problem: str) -> int:
    """For sorting: what has no line comes last."""
    found = re.match(r"[^\n]*? line (\d+): ", problem)
    return int(found[1]) if found else 1 << 60


# Reading the file


def read_lines(text: str, env_name: str) -> Lines:
    """Assignments with the line on which each begins; the values of lines that cannot be read are never repeated."""
    from dotenv.parser import parse_stream  # not at the top: see has_parser

    text = text.removeprefix("\ufeff")
    # python-dotenv's own count takes the two signs of a Windows line end for two lines after a line that it refuses.
    ends = [found.end() for found in LINE_BREAK.finditer(text)]
    assignments, problems, position = [], [], 0
    for binding in parse_stream(io.StringIO(text, newline="")):
        source = binding.original.string
        start = source.lstrip()
        where = f"{env_name} line {1 + bisect_right(ends, position + len(source) - len(start))}"
        position += len(source)
        problem = problem_of_form(binding, start)
        if problem:
            problems.append(f"{where}: {problem}")
        elif binding.key is not None:
            assignments.append(Assignment(binding.key, binding.value, where))
    return Lines(tuple(assignments), tuple(problems))


def problem_of_form(binding, start: str) -> str | None:
    if binding.error:
        span = len(LINE_BREAK.findall(start.rstrip("\r\n")))
        extent = f" (read as one with the next {span} lines: a quote is open)" if span else ""
        return f"is not of the form NAME=value{extent}; close every quote and put only a # comment behind it."
    if binding.key is None:
        return None
    if re.match(r"export[ \t]", start):
        return f"remove `export` in front of {shortened(binding.key)}; this file is read, not run."
    if binding.value is None:
        return f"{shortened(binding.key)} stands alone; write {shortened(binding.key)}=value, or # in front of it."
    return None


def shortened(text: str) -> str:
    text = "".join(sign if sign.isprintable() else "?" for sign in text)
    return text if len(text) <= LONGEST_SHOWN else text[: LONGEST_SHOWN - 3] + "..."


# Names


def is_known(name: str, topology: Topology) -> bool:
    return name in ROWS and (ROWS[name].rank is None or ROWS[name].rank < topology.nodes)


def misplaced(assignments: Sequence[Assignment], topology: Topology) -> Iterator[str]:
    """Names that are no setting of this topology, and those that are set twice."""
    first: dict[str, str] = {}
    for assignment in assignments:
        name, where = assignment.name, assignment.where
        if not is_known(name, topology):
            yield f"{where}: {about_unknown(name, topology)}"
        elif name in first:
            yield f"{where}: {name} is set a second time, first in {first[name]}; keep one of them."
        first.setdefault(name, where)


def about_unknown(name: str, topology: Topology) -> str:
    if name in ROWS:
        return f"{name} describes node {ROWS[name].rank}, and {topology.script} serves {topology.nodes}; remove it."
    shown, known = shortened(name), [row.name for row in TABLE if is_known(row.name, topology)]
    became = what_became_of(name)
    meant = nearest(name, known, SLIP_IN_ENVIRONMENT if became else SLIP_IN_FILE)
    if meant:
        return f"{shown} is no setting; did you mean {meant}?"
    if became:
        return f"{shown} is no setting of this launcher: {became}; remove it."
    return f"{shown} is no setting; docs/configuration.md lists all. Remove it."


def nearest(name: str, known: Sequence[str], cutoff: float) -> str | None:
    """The setting that was probably meant."""
    if OTHER_NAMES.get(name.upper()) in known:
        return OTHER_NAMES[name.upper()]
    if len(name) > LONGEST_SHOWN:
        return None
    close = difflib.get_close_matches(name.upper(), known, 1, cutoff)
    return close[0] if close else None


def notes(topology: Topology, env_name: str, ambient: Mapping[str, str]) -> Iterator[str]:
    """What the caller's environment has and what does not count, by name only."""
    known = [row.name for row in TABLE if is_known(row.name, topology)]
    ignored = sorted(name for name in ambient if is_foreign(name) or (name not in ROWS and what_became_of(name)))
    if ignored:
        ours = [name for name in ignored if name in ROWS]
        hint = f"; {' and '.join(ours)} can be set in {env_name}" if ours else ""
        named = ", ".join(map(shortened, ignored))
        yield f"your environment has {named}: other programs' names, which do not count here{hint}."
    for name in sorted(set(ambient) - set(ignored)):
        if name in ROWS and name not in known:
            yield f"your environment has {name}: {topology.script} serves {topology.nodes} nodes, so it does not count."
        elif name not in ROWS and 8 <= len(name) <= LONGEST_SHOWN and name.isupper():
            close = difflib.get_close_matches(name, known, 1, SLIP_IN_ENVIRONMENT)
            if close:
                yield f"your environment has {shortened(name)}, which is no setting; did you mean {close[0]}?"


# Values


def defaults(topology: Topology) -> tuple[dict[str, object], dict[str, str]]:
    values = {row.name: topology.defaults.get(row.name, row.default) for row in TABLE}
    own = f"topology {topology.name}"
    return values, {row.name: own if row.name in topology.defaults else BUILT_IN for row in TABLE}


def apply(assignment: Assignment, topology: Topology, values: dict, sources: dict) -> list[str]:
    """Puts one assignment over what is there. A name whose value cannot be used is taken out."""
    row = ROWS[assignment.name]
    text = assignment.text if row.type in kinds.FREE_FORM else assignment.text.strip()
    try:
        if text:
            values[row.name], sources[row.name] = parse(row, text), assignment.where
        elif row.may_be_empty:
            values[row.name], sources[row.name] = row.type.nothing, assignment.where
        else:
            fallback, origin = defaults(topology)
            values[row.name], sources[row.name] = fallback[row.name], origin[row.name]
    except ValueError as error:
        values.pop(row.name, None)
        return [f"{assignment.where}: {row.name} {error}"]
    return []


def parse(row: Row, text: str) -> object:
    """Raises ValueError with the end of a sentence that begins with the setting's name."""
    shown = "(not shown)" if row.secret else f'"{shortened(text)}"'
    refuse_unwritable(text, shown)
    if row.type not in kinds.FREE_FORM and kinds.SHELL_EXPANSION.search(text):
        raise ValueError(f"is {shown}: settings are text and never run by a shell; write out what is meant.")
    try:
        value = choice(row, text) if row.choices else row.type.parse(text)
    except ValueError as error:
        said = f"{shown} {error}" if str(error) else f"is {shown}"
        raise ValueError(f"{said}; it must be {row.needs}.") from None
    if row.minimum is not None and not row.minimum <= value <= row.maximum:
        raise ValueError(f"is {shown}; it must be {row.needs}.")
    return value


def refuse_unwritable(text: str, shown: str) -> None:
    """What no argument list, no file of ours and no terminal takes."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise ValueError(f"is {shown}: it holds bytes that are no UTF-8 text; write it as UTF-8.") from None
    if size > LONGEST_VALUE_BYTES:
        raise ValueError(f"is {size} bytes long, and at most {LONGEST_VALUE_BYTES} are taken; put it into a file.")


def choice(row: Row, text: str) -> str:
    by_lower = {word.lower(): word for word in row.choices}
    if text.lower() not in by_lower:
        raise ValueError
    return by_lower[text.lower()]


# What only several settings together can get wrong


def address_problems(
    topology: Topology, values: Mapping, sources: Mapping, written: Mapping[str, Assignment], env_name: str
) -> Iterator[str]:
    seen: dict[str, str] = {}
    for rank, prefix in enumerate(NODE_NAMES[: topology.nodes]):
        name = f"{prefix}_IP"
        if name not in values:
            continue  # written in a form that cannot be used, which has been said
        address = values[name]
        if not address:
            where = written[name].where if name in written else env_name
            yield (
                f"{where}: {name} {NOT_FILLED_IN}; it must be the address of node {rank} on the link between the "
                f"nodes, which `ip -4 addr` shows there."
            )
        elif address in seen:
            yield f"{sources[name]}: {name} is {address}, which {seen[address]} is already; each node has its own."
        seen.setdefault(address, name)


def combination_problems(values: Mapping, sources: Mapping) -> Iterator[str]:
    if values.get("RUNTIME") == "native" and values.get("NATIVE_PYTHON") == "":
        yield (
            f"{sources['RUNTIME']}: RUNTIME is native and NATIVE_PYTHON is empty; set it to the Python of the virtual "
            f"environment that every node has."
        )
