"""The command line of every start script, by one mechanism: default command, help, --version and completion."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from launcher.errors import MEANINGS, Exit, LauncherError

WIDEST, NARROWEST = 100, 50
INDENT = 2
JSON = "--json"
HELP_OR_VERSION = ("-h", "--help", "--version")


@dataclass(frozen=True)
class Command:
    name: str
    doc: str  # what it does, as a clause
    add: Callable[[argparse.ArgumentParser], None] = lambda parser: None  # its flags and arguments
    tells_json: bool = False
    more: str = ""  # below its own help


@dataclass(frozen=True)
class Program:
    """A start script. `default` is the command that flags without a command belong to."""

    script: str  # as the user types it
    description: str
    default: str
    commands: Sequence[Command]
    examples: Sequence[tuple[str, str]]  # words after the script, and what they do
    docs: str  # where to read on


class Parser(argparse.ArgumentParser):
    """Refuses as every other part of the launcher does. A flag is typed whole: the next release may add one that a
    shorter form would also fit.

    Help is as wide as the terminal, within limits; where there is none, as wide as COLUMNS or 80.
    """

    def __init__(self, **options) -> None:
        options.setdefault("formatter_class", formatter)
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> None:
        raise LauncherError(f"{self.prog}: {message}; `{self.prog} --help` lists what there is.", Exit.USAGE)


def formatter(prog: str, **options) -> argparse.HelpFormatter:
    return argparse.RawDescriptionHelpFormatter(prog, **{"max_help_position": 26, "width": width(), **options})


def width() -> int:
    return max(NARROWEST, min(WIDEST, shutil.get_terminal_size().columns))


# Parsing


def parse(program: Program, words: Sequence[str]) -> argparse.Namespace:
    """Help, version and completion are printed here, and end the process. Raises LauncherError for wrong usage."""
    return make_parser(program).parse_args(with_default(program, words))


def with_default(program: Program, words: Sequence[str]) -> list[str]:
    """`help COMMAND`, as of other programs, is another way to write `COMMAND --help`."""
    if words[:1] == ["help"]:
        return [*words[1:], "--help"]
    names_command = bool(words) and (not words[0].startswith("-") or words[0] in HELP_OR_VERSION)
    return list(words) if names_command else [program.default, *words]


def make_parser(program: Program) -> Parser:
    commands = [*program.commands, COMPLETION]
    parser = Parser(
        prog=program.script, usage="%(prog)s [COMMAND] [FLAGS]", epilog=epilog(program),
        description=f"{wrapped(program.description)}\n\n{section('commands', command_lines(commands))}",
    )  # fmt: skip
    parser.add_argument("--version", action=PrintVersion, nargs=0, help="show what this is and exit")
    # The description lists them: argparse would not, where the longest name comes last, in one column.
    made = parser.add_subparsers(dest="command", required=True, prog=program.script, help=argparse.SUPPRESS)
    for command in commands:
        add_command(made, program, command)
    return parser


def add_command(commands, program: Program, command: Command) -> None:
    more = f"Examples and exit codes: {program.script} --help. {program.docs}"
    made = commands.add_parser(command.name, description=sentence(command.doc), epilog=command.more or wrapped(more))
    add_flags(made, command)


def add_flags(parser, command: Command) -> None:
    command.add(parser)
    if command.tells_json:
        parser.add_argument(JSON, action="store_true", help="Print one JSON document, as docs/json.md describes.")


def wants_json(words: Sequence[str]) -> bool:
    """Also of a command line that cannot be parsed."""
    return JSON in words


# Help


def epilog(program: Program) -> str:
    sections = [flags_of_default(program), section("examples", example_lines(program)),
                section("exit codes", exit_lines()), f"{wrapped('COMMAND --help lists the flags of a command.')}\n"
                f"{wrapped(program.docs)}"]  # fmt: skip
    return "\n\n".join(one for one in sections if one)


def flags_of_default(program: Program) -> str:
    """As argparse itself would print them."""
    command = next(one for one in program.commands if one.name == program.default)
    alone = Parser(prog=program.script, usage=argparse.SUPPRESS, add_help=False)
    add_flags(alone.add_argument_group(f"flags of {command.name}, the command where none is named"), command)
    return alone.format_help().strip("\n")


def section(title: str, lines: Sequence[str]) -> str:
    return "\n".join([f"{title}:", *lines])


def command_lines(commands: Sequence[Command]) -> list[str]:
    return in_columns([(command.name, command.doc) for command in commands], max(len(one.name) for one in commands))


def example_lines(program: Program) -> list[str]:
    typed = [(f"{program.script} {words}".rstrip(), what) for words, what in program.examples]
    return in_columns(typed, max(len(command) for command, _ in typed))


def exit_lines() -> list[str]:
    return in_columns([(str(int(code)), meaning.replace("`", "")) for code, meaning in MEANINGS.items()], 3)


def in_columns(rows: Sequence[tuple[str, str]], first: int) -> list[str]:
    """Where too little is left for the second column, it goes below the first."""
    start = INDENT + first + 2
    is_narrow = width() - start < 30
    margin = " " * (2 * INDENT + 2 if is_narrow else start)
    lines = []
    for left, right in rows:
        head = " " * INDENT + left
        lines += [head] if is_narrow else []
        lines += textwrap.wrap(right, width(), initial_indent=margin if is_narrow else head.ljust(start),
                               subsequent_indent=margin, break_on_hyphens=False)  # fmt: skip
    return lines


def sentence(doc: str) -> str:
    return wrapped(doc[0].upper() + doc[1:] + ".")


def wrapped(text: str) -> str:
    return textwrap.fill(text, width(), break_on_hyphens=False, break_long_words=False)


# What is printed instead of running


class PrintVersion(argparse.Action):
    def __call__(self, parser, *_) -> None:
        from launcher import version

        sys.stdout.write(version.describe())
        parser.exit()


class PrintCompletion(argparse.Action):
    def __call__(self, parser, namespace, shell, *_) -> None:
        from launcher import completion

        sys.stdout.write(completion.script(shell))
        parser.exit()


COMPLETION = Command(
    "completion",
    "print what makes bash, zsh or fish complete the commands and flags of all five scripts",
    lambda parser: parser.add_argument("shell", choices=["bash", "zsh", "fish"], action=PrintCompletion),
    more="""\
to load it, now or at the start of each shell:
  ~/.bashrc                    source <(/path/to/start.sh completion bash)
  ~/.zshrc, after compinit     source <(/path/to/start.sh completion zsh)
  ~/.config/fish/config.fish   /path/to/start.sh completion fish | source
""",
)
