"""Takes over the env file of an older recipe: what is kept, replaced or dropped, why, and our file's text."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from launcher import documents, kinds
from launcher.config import Assignment, is_known, load, nearest, parse, read_lines, shortened
from launcher.errors import LauncherError
from launcher.table import OTHER_NAMES, ROWS, TABLE, Row, what_became_of
from launcher.topology import Topology
from launcher.vllm_flags import FLAGS, flag_of, why_not_extra

GIB = 1 << 30
KEPT, REPLACED, DROPPED = "kept", "replaced", "dropped"

# What an older file pins and a start here finds anew. An index or a name that has shifted since would fail.
FOUND_ANEW = re.compile(r"(HEAD|WORKER[0-9]?)_(CX7_IF|CX7_IB|GID)|NCCL_IB_GID_INDEX")
OF_THE_OLD_IMAGE = {"IMAGE": "an image of the older recipe lacks the plugin"}

# Flags whose value is written differently in our setting; other flags carry it as it is.
CONVERTED = {
    "--kv-cache-memory-bytes": lambda text: f"{int(text) / GIB:.3f}".rstrip("0").rstrip("."),
    "--enable-prefix-caching": lambda _: "1",
    "--no-enable-prefix-caching": lambda _: "0",
    "--no-async-scheduling": lambda _: "0",
    "--enforce-eager": lambda _: "1",
    "--enable-expert-parallel": lambda _: "1",
    "--no-enable-flashinfer-autotune": lambda _: "0",
    "--language-model-only": lambda _: "0",
}


@dataclass(frozen=True)
class Item:
    """What became of one assignment, or of one flag in it."""

    where: str
    verdict: str
    what: str  # NAME=value of the old file, secrets not shown
    reason: str


@dataclass(frozen=True)
class Imported:
    items: tuple[Item, ...]
    text: str  # our env file
    todo: tuple[str, ...]  # what our file still needs before it can be used

    @property
    def report(self) -> tuple[str, ...]:
        lines = []
        for verdict in (KEPT, REPLACED, DROPPED):
            items = [item for item in self.items if item.verdict == verdict]
            lines += [f"{verdict.capitalize()}: {len(items)}"] if items else []
            lines += [f"  {item.what} ({item.where}): {item.reason}" for item in items]
        return (*lines, *(["Still to do:"] if self.todo else []), *(f"  {sentence}" for sentence in self.todo))


@dataclass
class Taken:
    """Settings as text, gathered while the old file is read. A later line wins, as in a shell."""

    topology: Topology
    values: dict[str, str] = field(default_factory=dict)
    items: list[Item] = field(default_factory=list)
    places: dict[str, int] = field(default_factory=dict)  # of a setting's item in `items`

    def say(self, where: str, verdict: str, what: str, reason: str) -> None:
        self.items.append(Item(where, verdict, what, reason))

    def take(self, name: str, text: str, item: Item) -> None:
        """Puts a value over an earlier one, which is then told as overruled."""
        if name in self.places:
            earlier = self.items[self.places[name]]
            self.items[self.places[name]] = replace(earlier, verdict=DROPPED, reason=f"overruled by {item.where}")
        self.values[name], self.places[name] = text, len(self.items)
        self.items.append(item)


def import_text(topology: Topology, old_text: str, old_name: str = "old file") -> Imported:
    """Never fails: what cannot be understood is dropped, and said."""
    taken = Taken(topology)
    lines = read_lines(unexported(old_text), old_name)
    for problem in lines.problems:
        taken.say(problem.partition(": ")[0], DROPPED, "a line", "shell code, which is never run; check what it set")
    # The older recipe handed EXTRA_ARGS over last, so they overruled its settings.
    for assignment in sorted(lines.assignments, key=lambda assignment: assignment.name == "EXTRA_ARGS"):
        take(taken, assignment)
    active = {row.name: taken.values[row.name] for row in TABLE if is_worth_a_line(taken, row)}
    text = documents.env_text(topology, active)
    return Imported(tuple(taken.items), text, (*still_to_do(topology, text), *cache_hint(taken)))


def unexported(text: str) -> str:
    """The older recipe's shell ran its file, so `export` was allowed there. Line numbers stay."""
    return re.sub(r"^([ \t]*)export[ \t]+(?=[A-Za-z_]\w*=)", r"\1", text, flags=re.MULTILINE)


def is_worth_a_line(taken: Taken, row: Row) -> bool:
    """Whether our file differs from its example in this setting."""
    if row.name not in taken.values:
        return False
    text = taken.values[row.name]
    value = parse(row, text) if text else row.type.nothing
    return row.required or value != documents.default(row, taken.topology)


def still_to_do(topology: Topology, text: str) -> list[str]:
    try:
        load(topology, text, topology.env_file, {})
    except LauncherError as error:
        return str(error).splitlines()
    return []


def cache_hint(taken: Taken) -> Iterator[str]:
    """The older recipe sized the cache by what was left; here its size is given, so a longer context may not fit."""
    default = documents.default(ROWS["MAX_MODEL_LEN"], taken.topology)
    if "KV_CACHE_GIB" not in taken.values and int(taken.values.get("MAX_MODEL_LEN") or 0) > default:
        needed = 7.4 + 7.1e-6 * int(taken.values["MAX_MODEL_LEN"])
        yield (
            f"KV_CACHE_GIB is {documents.default(ROWS['KV_CACHE_GIB'], taken.topology):g} unless you set it; one "
            f"conversation of MAX_MODEL_LEN={taken.values['MAX_MODEL_LEN']} was reported to need about {needed:.1f}."
        )


# One assignment


def take(taken: Taken, old: Assignment) -> None:
    name = OTHER_NAMES.get(old.name, old.name)
    what = f"{shortened(old.name)}={shown(name, old.text)}"
    if name == "EXTRA_ARGS":
        take_flags(taken, old)
    elif FOUND_ANEW.fullmatch(name):
        taken.say(old.where, REPLACED, what, "found from the node's address at every start; set it again to overrule")
    elif name in OF_THE_OLD_IMAGE:
        taken.say(old.where, REPLACED, what, f"{OF_THE_OLD_IMAGE[name]}; ours is {ROWS[name].default}")
    elif is_known(name, taken.topology):
        take_value(taken, old, name, what)
    else:
        taken.say(old.where, DROPPED, what, why_dropped(taken.topology, name))


def shown(name: str, text: str) -> str:
    """Names that look like those of secrets are not ours to print, even where we do not know them."""
    hidden = re.search(r"(^|[_-])(KEY|TOKEN|SECRET|PASSWORD)$", name.upper()) and name != "SSH_KEY" and text
    return "(not shown)" if hidden else shortened(text)


def why_dropped(topology: Topology, name: str) -> str:
    if name in ROWS:
        return f"{topology.script} serves {topology.nodes} nodes"
    became = what_became_of(name)
    if became:
        return became
    meant = nearest(name, [row.name for row in TABLE if is_known(row.name, topology)], 0.8)
    return "no setting here" + (f"; {meant} is the nearest" if meant else "")


def take_value(taken: Taken, old: Assignment, name: str, what: str) -> None:
    row = ROWS[name]
    text = old.text if row.type in kinds.FREE_FORM else old.text.strip()
    if not text and not row.may_be_empty:
        taken.say(old.where, DROPPED, what, "empty, so the default holds")
        return
    try:
        value = parse(row, text) if text else row.type.nothing
    except ValueError as error:
        taken.say(old.where, DROPPED, what, f"{name} {error}")
        return
    verdict, reason = KEPT, "means the same here"
    if name != old.name:
        verdict, reason = REPLACED, f"is {name} here"
    elif value == documents.default(row, taken.topology):
        reason = "the default here, too"
    taken.take(name, text, Item(old.where, verdict, what, reason))


# The flags of EXTRA_ARGS


def take_flags(taken: Taken, old: Assignment) -> None:
    """Flags that have a setting become that setting; what the launcher decides is dropped; the rest stays."""
    try:
        words = shlex.split(old.text)
    except ValueError as error:
        taken.say(old.where, DROPPED, "EXTRA_ARGS", f"cannot be split into words by shell rules: {error}")
        return
    rest: list[str] = []
    for group in flag_groups(words):
        flag = flag_of(group[0])
        reason = why_not_extra(flag) if flag else None
        words_shown = shown(flag, " ".join(group)) if flag else shortened(" ".join(group))
        what = f"EXTRA_ARGS {flag} {words_shown}" if words_shown.startswith("(") else f"EXTRA_ARGS {words_shown}"
        if reason is None:
            rest += group
            taken.say(old.where, KEPT, what, "has no setting, stays in EXTRA_ARGS")
        else:
            take_flag(taken, old.where, flag, group, what, reason)
    if rest and "\0" not in old.text:
        taken.values["EXTRA_ARGS"] = shlex.join(rest)
    else:
        taken.values.pop("EXTRA_ARGS", None)


def flag_groups(words: list[str]) -> Iterator[list[str]]:
    """A flag with the words behind it."""
    group: list[str] = []
    for word in words:
        if flag_of(word) and group:
            yield group
            group = []
        group.append(word)
    if group:
        yield group


def take_flag(taken: Taken, where: str, flag: str, group: list[str], what: str, reason: str) -> None:
    name, text = setting_of(flag, group)
    if name is None:
        taken.say(where, DROPPED, what, reason)
        return
    try:
        parse(ROWS[name], text)
    except ValueError as error:
        taken.say(where, DROPPED, what, f"{name} {error}")
        return
    taken.take(name, text, Item(where, REPLACED, what, f"is {name}={shortened(text)} here"))


def setting_of(flag: str, group: list[str]) -> tuple[str | None, str]:
    """(setting, value as text) of a flag that carries one setting; (None, "") of one that carries several or none."""
    owners: Mapping[str, tuple[str, ...]] = {row.name: row.settings for row in FLAGS}
    names = owners.get(flag, ())
    has_text = "=" in group[0] or len(group) == 2
    if len(names) != 1 or ROWS.get(names[0]) is None or "." in group[0].split("=", 1)[0]:
        return None, ""
    text = group[0].split("=", 1)[1] if "=" in group[0] else (group[1] if has_text else "")
    if flag in CONVERTED:
        try:
            return names[0], CONVERTED[flag](text)
        except ValueError:
            return None, ""
    return (names[0], text) if has_text else (None, "")
