"""Completion of the start scripts in bash, zsh and fish, made from their parsers."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from launcher.arguments import make_parser
from launcher.programs import programs

FILES = "<files>"  # among values
Rows = Sequence[tuple[str, Sequence[str]]]


@dataclass(frozen=True)
class Place:
    """A position on a command line: a script, followed by some of its commands."""

    words: tuple[str, ...]
    commands: tuple[str, ...]
    flags: tuple[str, ...]
    values: tuple[str, ...]  # of positional arguments
    takes: dict[str, tuple[str, ...]] = field(default_factory=dict)  # a flag that takes a value -> which ones

    @property
    def key(self) -> str:
        return " ".join(self.words)


def script(shell: str) -> str:
    text, table = SHELLS[shell]
    found = places()
    return text.format(tables=tables(found, table), names=names(found))


def places() -> list[Place]:
    found = []
    for program in programs():
        name = Path(program.script).name
        first, *others = places_of((name,), make_parser(program))
        default = next(place for place in others if place.words == (name, program.default))
        flags = tuple(dict.fromkeys((*first.flags, *default.flags)))
        found += [replace(first, flags=flags, takes=first.takes | default.takes), *others]
    return found


def places_of(words: tuple[str, ...], parser: argparse.ArgumentParser) -> Iterator[Place]:
    """argparse offers no way to ask a parser what it takes; its list of actions is what other tools go by, too."""
    below: dict[str, argparse.ArgumentParser] = {}
    flags, values, takes = [], [], {}
    for action in parser._actions:
        if isinstance(action.choices, dict):
            below = action.choices
        elif action.option_strings:
            flags += action.option_strings
            takes |= {flag: values_of(action) for flag in action.option_strings if action.nargs != 0}
        else:
            values += values_of(action)
    yield Place(words, tuple(below), tuple(flags), tuple(values), takes)
    for name, command in below.items():
        yield from places_of((*words, name), command)


def values_of(action: argparse.Action) -> tuple[str, ...]:
    if action.choices is not None:
        return tuple(map(str, action.choices))
    return (FILES,) if action.type is Path or action.metavar in ("FILE", "DIR") else ()


# The scripts: two functions that set `found`, to the words of a place or to the values of a flag there, and one that
# looks up the place and the word before the cursor.


def tables(places: Sequence[Place], table: Callable[[str, Rows], str]) -> str:
    words = [(place.key, (*place.commands, *place.values, *place.flags)) for place in places]
    values = [(f"{place.key} {flag}", found) for place in places for flag, found in place.takes.items()]
    return f"{table('_exl3_words', words)}\n\n{table('_exl3_values', values)}"


def names(places: Sequence[Place]) -> str:
    return " ".join(place.key for place in places if len(place.words) == 1)


def quoted(words: Iterable[str]) -> str:
    return " ".join(f"'{word}'" for word in words)


def in_bash(name: str, rows: Rows) -> str:
    cases = [f"    '{key}') found=({quoted(found)}) ;;" for key, found in rows]
    return "\n".join([f"{name}() {{", "  found=()", '  case "$1" in', *cases, "    *) return 1 ;;", "  esac", "}"])


def in_fish(name: str, rows: Rows) -> str:
    cases = [f"        case '{key}'\n            set -g found {quoted(found)}" for key, found in rows]
    return "\n".join([f"function {name}", "    set -g found", '    switch "$argv[1]"', *cases, "        case '*'",
                      "            return 1", "    end", "    return 0", "end"])  # fmt: skip


BASH = """\
{tables}

_exl3_complete() {{
  local key=${{1##*/}} current=${{COMP_WORDS[COMP_CWORD]}} i found hidden
  for ((i = 1; i < COMP_CWORD; i++)); do
    _exl3_words "$key ${{COMP_WORDS[i]}}" || break
    key="$key ${{COMP_WORDS[i]}}"
  done
  _exl3_values "$key ${{COMP_WORDS[COMP_CWORD - 1]}}" || _exl3_words "$key"
  COMPREPLY=()
  if [[ " ${{found[*]}} " == *' <files> '* && $current != -* ]]; then
    compopt -o filenames
    mapfile -t COMPREPLY < <(compgen -f -- "$current")
  else
    [[ $current == -* ]] && hidden='<files>' || hidden='-*'
    mapfile -t COMPREPLY < <(compgen -X "$hidden" -W "${{found[*]}}" -- "$current")
  fi
}}

complete -F _exl3_complete {names}
"""

ZSH = """\
{tables}

_exl3_complete() {{
  local key=${{words[1]:t}} i
  local -a found
  for ((i = 2; i < CURRENT; i++)); do
    _exl3_words "$key ${{words[i]}}" || break
    key="$key ${{words[i]}}"
  done
  _exl3_values "$key ${{words[CURRENT - 1]}}" || _exl3_words "$key"
  if [[ " ${{found[*]}} " == *' <files> '* && ${{words[CURRENT]}} != -* ]]; then
    _files
  else
    [[ ${{words[CURRENT]}} == -* ]] || found=(${{found:#-*}})
    compadd -- ${{found:#<files>}}
  fi
}}

compdef _exl3_complete {names}
"""

FISH = """\
{tables}

function _exl3_complete
    set -l typed (commandline -opc)
    set -l current (commandline -ct)
    set -l key (string replace -r '.*/' '' -- $typed[1])
    for word in $typed
        _exl3_words "$key $word"; and set key "$key $word"
    end
    _exl3_values "$key $typed[-1]"; or _exl3_words $key
    if contains -- '<files>' $found; and not string match -q -- '-*' $current
        __fish_complete_path $current
    else
        string match -v -- '<files>' $found  # fish itself shows flags only after a dash
    end
end

for name in {names}
    complete -c $name -f -a '(_exl3_complete)'
end
"""

SHELLS = {"bash": (BASH, in_bash), "zsh": (ZSH, in_bash), "fish": (FISH, in_fish)}
