"""The guard that ends a rank before its node is out of memory."""

import subprocess
import sys

import pytest

from launcher import memory_guard
from launcher.settings import REPOSITORY

GIB = 1 << 30


@pytest.fixture
def meminfo(tmp_path, monkeypatch):
    """Answers one value a look; the last one stays."""

    def write(*available_gib):
        path, values = tmp_path / "meminfo", list(available_gib)

        def next_look(_):
            value = values.pop(0) if len(values) > 1 else values[0]
            path.write_text(f"MemTotal: 1 kB\nMemAvailable: {int(value * 2**20)} kB\n")

        monkeypatch.setattr(memory_guard.time, "sleep", next_look)
        return path

    return write


def test_the_rank_is_ended_after_two_looks_below_the_floor(tmp_path, meminfo, capsys):
    ended = tmp_path / "ended"
    code = memory_guard.main(GIB, ["touch", str(ended)], meminfo(5, 0.5, 5, 0.5, 0.4))
    assert code == memory_guard.ENDED_THE_RANK and ended.exists()
    assert "0.40 GiB available, less than the 1.00 GiB of MEMORY_GUARD_GIB" in capsys.readouterr().out


def test_a_table_without_the_number_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_guard.time, "sleep", lambda _: None)
    (tmp_path / "meminfo").write_text("MemTotal: 1 kB\n")
    with pytest.raises(SystemExit, match="does not tell MemAvailable"):
        memory_guard.main(GIB, ["true"], tmp_path / "meminfo")


def test_the_program_runs_as_it_is_sent(tmp_path):
    program = REPOSITORY / "launcher" / "memory_guard.py"
    done = subprocess.run(
        [sys.executable, "-I", program, str(1 << 60), "touch", tmp_path / "ended"], capture_output=True, timeout=30
    )
    assert done.returncode == memory_guard.ENDED_THE_RANK and (tmp_path / "ended").exists()
