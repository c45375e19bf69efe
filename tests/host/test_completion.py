"""Completion: bash completes for real; zsh and fish where they are installed."""

import shutil
import subprocess

import pytest

from launcher import completion, programs
from launcher.arguments import make_parser
from launcher.settings import REPOSITORY

# (what is typed, what is offered). The last word is the one under the cursor.
TYPED = [
    (["./start.sh", "st"], {"start", "stop", "status"}),
    (["./start.sh", "check", "--"], {"--help", "--json"}),
    (["/any/where/start-tp3.sh", "logs", ""], {"0", "1", "2"}),
    (["./start-tp4.sh", "logs", ""], {"0", "1", "2", "3"}),
    (["./start-tp4.sh", "shell", "3", "--"], {"--help"}),
    (["./start.sh", "image", ""], {"build", "pull", "use", "copy", "warm", "status"}),
    (["./start.sh", "image", "build", "--s"], {"--skip-exllamav3"}),
    (["./start.sh", "cache", ""], {"reset"}),
    (["./start.sh", "completion", ""], {"bash", "zsh", "fish"}),
    (["./download.sh", "--dry"], {"--dry-run"}),
    (["./download.sh", "fetch", "--dry"], {"--dry-run"}),
    (["./download.sh", "--streams", "1"], {"1", "10", "11", "12", "13", "14", "15", "16"}),
    (["./download.sh", "bundle", "mod"], {"models"}),
    (["./start-local.sh", "--model", "mod"], {"models"}),
    (["./start-local.sh", "--p"], {"--port"}),
    (["./start-local.sh", "--port", ""], set()),
    (["./start-local.sh", "--port", "9000", "--det"], {"--detach"}),
    (["./start-local.sh", "nonsense", "--det"], {"--detach"}),
]

BASH = """
source /dev/stdin
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
command=$(complete -p "${1##*/}") || exit 9
compopt() { :; }  # has a meaning only while the user presses the key
"$(sed 's/.*-F \\([^ ]*\\) .*/\\1/' <<<"$command")" "$1"
printf '%s\\n' "${COMPREPLY[@]}"
"""
FISH = "source; complete -C $argv[1]"
ZSH = """
compdef() { : }
compadd() { shift; print -l -- "$@" }
_files() { print -l -- '<files>' }
source /dev/stdin
words=("$@") CURRENT=$#
_exl3_complete
"""


def run(shell: list[str], script: str) -> list[str]:
    done = subprocess.run(shell, input=script, capture_output=True, text=True, cwd=REPOSITORY, timeout=60)
    assert done.returncode == 0 and done.stderr == "", done
    return [line for line in done.stdout.splitlines() if line]


def needed(program: str) -> str:
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"{program} is not installed (package {program})")
    return path


@pytest.fixture(scope="module")
def scripts() -> dict[str, str]:
    return {shell: completion.script(shell) for shell in completion.SHELLS}


@pytest.mark.parametrize("words, offered", TYPED, ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_bash_offers_what_can_be_typed(scripts, words, offered):
    assert set(run(["bash", "--norc", "-c", BASH, "bash", *words], scripts["bash"])) == offered


def test_bash_offers_every_command_of_every_script(scripts):
    for program in programs.programs():
        wanted = [*(command.name for command in program.commands), "completion"]
        assert run(["bash", "--norc", "-c", BASH, "bash", program.script, ""], scripts["bash"]) == wanted


def test_a_script_is_loaded_as_its_help_says(tmp_path):
    """From the script itself, in an interactive bash that then knows the five names."""
    line = f"source <('{REPOSITORY}/start-local.sh' completion bash); complete -p"
    done = subprocess.run(["bash", "--norc", "-c", line], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0
    assert {f"complete -F _exl3_complete {program.script[2:]}" for program in programs.programs()} <= set(
        done.stdout.splitlines()
    )


@pytest.mark.parametrize("words, offered", TYPED, ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_fish_offers_what_can_be_typed(scripts, words, offered):
    said = run([needed("fish"), "--no-config", "-c", FISH, " ".join(words)], scripts["fish"])
    found = {line.partition("\t")[0].rstrip("/") for line in said}
    # fish offers flags beside words wherever nothing has been typed.
    assert {word for word in found if words[-1] or not word.startswith("-")} - {"-h"} == offered


@pytest.mark.parametrize("words, offered", TYPED, ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_zsh_is_given_what_can_be_typed(scripts, words, offered):
    """zsh itself leaves out what does not begin as the word does."""
    given = set(run([needed("zsh"), "-f", "-c", ZSH, "zsh", *words], scripts["zsh"]))
    if offered == {"models"}:
        assert given == {"<files>"}
    else:
        assert {word for word in given if word.startswith(words[-1])} == offered


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_the_shell_can_read_it(scripts, shell):
    run([needed(shell), "-n"], scripts[shell])


def test_every_word_is_safe_to_stand_in_a_script():
    words = [word for place in completion.places() for word in
             (*place.words, *place.commands, *place.flags, *place.values, *sum(place.takes.values(), ()))]  # fmt: skip
    assert words and all(word == completion.FILES or word.replace("-", "").replace(".", "").isalnum() for word in words)


def test_every_flag_of_every_command_has_its_place():
    places = {place.key: place for place in completion.places()}
    for program in programs.programs():
        commands = make_parser(program)._subparsers._group_actions[0].choices
        for name, parser in commands.items():
            flags = {flag for action in parser._actions for flag in action.option_strings}
            assert flags == set(places[f"{program.script[2:]} {name}"].flags)
