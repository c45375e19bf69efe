"""Writes what is derived from the table: the example of each topology's env file and docs/configuration.md.

python -m launcher.documents            writes them
python -m launcher.documents --check    fails when one is not what the table says
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

from launcher import kinds
from launcher.config import is_known
from launcher.table import FOREIGN_PREFIXES, OWN_NAMES, RETIRED, TABLE, Group, Row
from launcher.topology import TOPOLOGIES, Topology

REPOSITORY = Path(__file__).resolve().parent.parent
WIDTH = 100
NUMBERS = {2: "two", 3: "three", 4: "four"}


# Env files


def env_text(topology: Topology, active: Mapping[str, str] | None = None) -> str:
    """An env file with what must be filled in and `active` as settings, everything else as a comment."""
    active = active or {}
    lines = [
        f"# Settings of ./{topology.script} ({NUMBERS[topology.nodes]} nodes). Fill in the addresses; a commented line "
        "shows a default.",
        "# NAME=value; a value with spaces or # stands in single quotes. This file is read and never run:",
        "# $NAME and `command` are plain text. docs/configuration.md says more.",
    ]
    for group in Group:
        lines += ["", f"# --- {group.value} ---"]
        for row in TABLE:
            if row.group is group and is_known(row.name, topology):
                lines += ["", *comment(row), assignment(row, topology, active)]
    return "\n".join(lines) + "\n"


def comment(row: Row) -> list[str]:
    text = row.doc + (f" One of: {', '.join(row.choices)}." if row.choices else "")
    text += f" Empty: {row.empty}." if row.empty else ""
    return textwrap.wrap(
        text, WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False, break_long_words=False
    )


def assignment(row: Row, topology: Topology, active: Mapping[str, str]) -> str:
    if row.name in active:
        return f"{row.name}={quoted(active[row.name])}"
    line = f"{row.name}={quoted(kinds.text_of(row.type, default(row, topology)))}"
    return line if row.required else f"#{line}"


def default(row: Row, topology: Topology) -> object:
    return topology.defaults.get(row.name, row.default)


def quoted(text: str) -> str:
    """As python-dotenv reads it back."""
    if re.fullmatch(r"[A-Za-z0-9_./:@,+~=-]*", text):
        return text
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


# The reference page


def configuration() -> str:
    chapters = [
        INTRODUCTION.format(prefixes=listed(f"{prefix}*" for prefix in FOREIGN_PREFIXES), own=listed(OWN_NAMES))
    ]
    chapters += [chapter(group) for group in Group]
    chapters += [safe_defaults(), retired_names()]
    return "\n".join(chapters)


INTRODUCTION = """\
# Settings

<!-- Made from launcher/table.py by `python -m launcher.documents`; changes here are lost. -->

`./start.sh` reads `.env`, `./start-tp3.sh` reads `.env.tp3` and `./start-tp4.sh` reads `.env.tp4`. The first start
copies the example beside it; only the addresses of the nodes have to be filled in. `./start.sh plan` shows each value
that is not the built-in one and where it came from.

- **Who wins:** built-in default < default of the topology < file < your environment (`MAX_NUM_SEQS=2 ./start.sh`).
- **Empty** (`EXTRA_ARGS= ./start.sh`) clears what stands below it: where a meaning of "empty" is given, the setting is
  empty; elsewhere it goes back to its default.
- **Names that other programs own** ({prefixes}, but for {own}) count in the file only.
  Your environment may have them for other reasons; there they are ignored, with a note.
- **The file is read, never run.** `$NAME`, `$(command)` and `export` are refused where they cannot be meant. A value
  with spaces, `#` or quotes stands in single quotes, with `\\'` and `\\\\` for a quote and a backslash.
- **Every mistake is named** with its line: a name that is none, a value of the wrong kind, a name that is set twice.
- `./start.sh import OLD/.env` takes over the file of an older recipe and says what became of each line.
"""


def listed(names) -> str:
    return ", ".join(f"`{name}`" for name in names)


def chapter(group: Group) -> str:
    lines = [f"## {group.value}", "", "| Setting | Kind | Default | Goes to | Meaning |", "|---|---|---|---|---|"]
    for row in TABLE:
        if row.group is group:
            cells = [f"`{row.name}`", kind_cell(row), default_cell(row), goes_cell(row), meaning_cell(row)]
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def kind_cell(row: Row) -> str:
    if row.choices:
        return ", ".join(f"`{word}`" for word in row.choices)
    if row.minimum is None:
        return row.type.word
    return f"{row.type.word}, {row.minimum:.7g} to {row.maximum:.7g}"


def default_cell(row: Row) -> str:
    if row.required:
        return "must be filled in"
    cells = [shown(row, row.default)]
    for topology in TOPOLOGIES.values():
        if row.name in topology.defaults:
            cells.append(f"{shown(row, topology.defaults[row.name])} on {NUMBERS[topology.nodes]} nodes")
    return "; ".join(cells)


def shown(row: Row, value: object) -> str:
    text = kinds.text_of(row.type, value)
    return f"`{text}`" if text else "empty"


def goes_cell(row: Row) -> str:
    return row.goes.value + (f" `{row.flag}`" if row.flag else "")


def meaning_cell(row: Row) -> str:
    return row.doc + (f" Empty: {row.empty}." if row.empty else "")


def safe_defaults() -> str:
    """Settings whose default is chosen for safety; those that each node has are told once."""
    lines = [
        "## Defaults that are the safe choice", "",
        "Where a public report says that a faster way answers wrongly or hangs, it is off until a test lifts it.", "",
        "| Setting | Default | Why, and what would lift it |", "|---|---|---|",
    ]  # fmt: skip
    told: dict[str, list[Row]] = {}
    for row in TABLE:
        if row.reason:
            told.setdefault(row.reason, []).append(row)
    for reason, rows in told.items():
        lines.append(f"| {listed(row.name for row in rows)} | {default_cell(rows[0])} | {reason} |")
    return "\n".join(lines) + "\n"


def retired_names() -> str:
    lines = [
        "## Names that are no settings here", "",
        "Names of the older recipe and of programs inside its containers. In a file they get this answer.", "",
        "| Name | What became of it |", "|---|---|",
        *(f"| `{name}` | {sentence(answer)} |" for name, answer in RETIRED.items()),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def sentence(answer: str) -> str:
    return answer[0].upper() + answer[1:] + ("" if answer.endswith(".") else ".")


# Files


def documents() -> Iterator[tuple[str, str]]:
    """(path in the repository, content)."""
    for topology in TOPOLOGIES.values():
        yield topology.example, env_text(topology)
    yield "docs/configuration.md", configuration()


def stale(root: Path) -> list[str]:
    return [name for name, text in documents()
            if not (root / name).is_file() or (root / name).read_text(encoding="utf-8") != text]  # fmt: skip


def main(arguments: list[str], root: Path = REPOSITORY) -> int:
    if arguments not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    if arguments == ["--check"]:
        for name in stale(root):
            print(f"{name}: is not what launcher/table.py says; run: python -m launcher.documents", file=sys.stderr)
        return 1 if stale(root) else 0
    for name, text in documents():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
