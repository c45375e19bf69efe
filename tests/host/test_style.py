"""Rules of style.md that a machine can check."""

import ast
import fnmatch
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.settings import REPOSITORY

LONGEST_FUNCTION = 80


def sources(pattern: str) -> list[str]:
    """Files of the checkout, which need not be one of git's; what builds and environments left is none of them."""
    found = []
    for folder, below, files in os.walk(REPOSITORY):
        below[:] = [name for name in below if not re.match(r"\.(?!ci$)|build$|__pycache__$|.*\.egg-info$", name)]
        found += fnmatch.filter((str(Path(folder, name).relative_to(REPOSITORY)) for name in files), pattern)
    return sorted(found)


SHELL_SCRIPTS = (*sources("*.sh"), ".ci/run", "tests/run")


def functions(tree: ast.AST):
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def length(node) -> int:
    return node.end_lineno - node.lineno + 1


def test_no_function_is_longer_than_a_screen_or_two():
    names = sources("*.py")
    assert names
    long = [
        f"{name}:{node.lineno} {node.name}: {length(node)} lines"
        for name in names
        for node in functions(ast.parse((REPOSITORY / name).read_text()))
        if length(node) > LONGEST_FUNCTION
    ]
    assert long == []


def test_length_counts_what_it_should():
    source = (
        "def short():\n    return 1\n\n\nclass C:\n    async def long(self):\n" + "        x = 1\n" * LONGEST_FUNCTION
    )
    assert [length(node) > LONGEST_FUNCTION for node in functions(ast.parse(source))] == [False, True]


@pytest.mark.parametrize("name", sources("launcher/*.py"))
def test_file_says_what_it_is_for(name):
    text = (REPOSITORY / name).read_text()
    assert ast.get_docstring(ast.parse(text)), f"{name} has no first line that says what it holds"


@pytest.mark.parametrize("name", SHELL_SCRIPTS)
def test_shell_script_keeps_the_rules(name):
    text = (REPOSITORY / name).read_text()
    assert "set -euo pipefail" in text
    assert not re.search(r"\beval\b|^\s*(source|\.) |^\s*\w+\(\)|shellcheck disable", text, re.MULTILINE)


@pytest.mark.needs("shellcheck")
def test_shellcheck_finds_nothing():
    done = subprocess.run(["shellcheck", *SHELL_SCRIPTS], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_ruff_finds_nothing():
    done = subprocess.run([sys.executable, "-m", "ruff", "check", "."], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
