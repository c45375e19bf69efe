"""Progress on terminals of every kind, and elsewhere."""

import io

import pytest

from launcher import console


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [20, 60, 200])
def test_a_line_that_is_redrawn_never_wraps(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    console.Progress("load", terminal).tick("weights: " + "x" * 100)
    assert terminal.getvalue().startswith("\r\033[K  load")
    assert len(terminal.getvalue().removeprefix("\r\033[K")) < columns


@pytest.mark.parametrize("stream, term", [(Terminal, "dumb"), (io.StringIO, "xterm")])
def test_nothing_is_redrawn_where_it_cannot_be(stream, term, monkeypatch):
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(console, "HEARTBEAT_S", 0)
    out = stream()
    progress = console.Progress("load", out)
    progress.tick("weights")
    progress.end("done")
    assert "\033" not in out.getvalue() and out.getvalue().count("\n") == 2
