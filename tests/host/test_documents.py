import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher import documents, kinds
from launcher.config import Lines, is_known, load, read_lines
from launcher.table import RETIRED, ROWS, TABLE, Goes
from launcher.topology import TOPOLOGIES

ADDRESSES = {f"{name}_IP": f"10.0.0.{rank + 1}" for rank, name in enumerate(("HEAD", "WORKER", "WORKER2", "WORKER3"))}


@pytest.fixture(params=TOPOLOGIES.values(), ids=TOPOLOGIES)
def topology(request):
    return request.param


def required(topology) -> list[str]:
    return list(ADDRESSES)[: topology.nodes]


def test_what_is_in_the_repository_is_what_the_table_says():
    assert documents.stale(documents.REPOSITORY) == []


def test_check_fails_when_a_file_is_missing_or_changed(tmp_path, capsys):
    assert documents.main(["--check"], tmp_path) == 1
    assert documents.main([], tmp_path) == 0
    assert documents.main(["--check"], tmp_path) == 0
    (tmp_path / ".env.example").write_text("PORT=1\n")
    capsys.readouterr()
    assert documents.main(["--check"], tmp_path) == 1
    assert capsys.readouterr().err.startswith(".env.example: is not what launcher/table.py says; run: ")
    assert documents.main(["--chekc"], tmp_path) == 2


def test_only_addresses_are_active_in_an_example(topology):
    lines = read_lines(documents.env_text(topology), "x")
    assert lines.problems == ()
    assert {line.name: line.text for line in lines.assignments} == dict.fromkeys(required(topology), "")


def test_commented_lines_are_the_defaults(topology):
    """With every comment sign before a setting removed, and addresses filled in, nothing changes."""
    text = documents.env_text(topology, ADDRESSES)
    plain = load(topology, text, topology.env_file, {})
    active = load(topology, re.sub(r"^#(?=[A-Z][A-Z0-9_]*=)", "", text, flags=re.MULTILINE), topology.env_file, {})
    assert active.values == plain.values
    assert set(re.findall(r"^#?([A-Z][A-Z0-9_]*)=", text, re.MULTILINE)) == {
        row.name for row in TABLE if is_known(row.name, topology)
    }


def test_page_has_every_setting_topology_default_reason_and_retired_name():
    page = documents.configuration()
    for row in TABLE:
        assert f"| `{row.name}` |" in page
        assert row.reason in page
    for name in RETIRED:
        assert f"| `{name}` |" in page
    assert "`0.85`; `0.8` on three nodes; `0.75` on four nodes" in page


def test_secrets_of_a_page_or_example_are_empty():
    assert all(ROWS[name].default == "" for name in ROWS if ROWS[name].secret)
    assert all(not row.flag for row in TABLE if row.secret or row.goes is Goes.ENVIRONMENT)


def test_files_have_no_long_lines(topology):
    assert max(map(len, documents.env_text(topology).splitlines())) <= 110


TEXT = st.text(st.characters(exclude_characters="\0\r", exclude_categories=["Cs"]), max_size=60)


@given(TEXT)
def test_quoted_text_is_read_back_as_it_was(text):
    assert read_lines(f"A={documents.quoted(text)} # comment\nB=1\n", "x") == Lines(
        (read_lines("A=1\n", "x").assignments[0].__class__("A", text, "x line 1"),
         read_lines("B=1\n", "x").assignments[0].__class__("B", "1", f"x line {2 + text.count(chr(10))}")), ()
    )  # fmt: skip


@given(st.lists(TEXT, min_size=1, max_size=5))
def test_extra_arguments_survive_the_file(words):
    active = {**ADDRESSES, "EXTRA_ARGS": kinds.text_of(kinds.WORDS, tuple(words))}
    topology = TOPOLOGIES["tp4"]
    assert load(topology, documents.env_text(topology, active), ".env.tp4", {})["EXTRA_ARGS"] == tuple(words)
