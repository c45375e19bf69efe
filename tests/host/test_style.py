"""Rules of style.md that a machine can check."""

import ast
import re
import subprocess

import pytest

from launcher.settings import REPOSITORY

LONGEST_FUNCTION = 80


def tracked(*patterns: str) -> list[str]:
    command = ["git", "-C", str(REPOSITORY), "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns]
    return [name for name in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
            if (REPOSITORY / name).is_file()]  # fmt: skip


def functions(tree: ast.AST):
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def length(node) -> int:
    return node.end_lineno - node.lineno + 1


def test_no_function_is_longer_than_a_screen_or_two():
    names = tracked("*.py")
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


@pytest.mark.parametrize("name", tracked("launcher/*.py"))
def test_file_says_what_it_is_for(name):
    text = (REPOSITORY / name).read_text()
    assert ast.get_docstring(ast.parse(text)), f"{name} has no first line that says what it holds"


@pytest.mark.parametrize("name", [*tracked("*.sh"), ".ci/run", "tests/run"])
def test_shell_script_keeps_the_rules(name):
    text = (REPOSITORY / name).read_text()
    assert "set -euo pipefail" in text
    assert not re.search(r"\beval\b|^\s*(source|\.) |^\s*\w+\(\)|shellcheck disable", text, re.MULTILINE)
