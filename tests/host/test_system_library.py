"""What a bare machine lacks for vLLM's CPU build is brought by root, and named to everybody else."""

import pytest

from launcher import system_library
from launcher.errors import Exit, LauncherError


@pytest.fixture
def machine(monkeypatch):
    """Without the library; what is run is booked, and apt-get brings it where `works`."""
    ran = []

    class Machine:
        works, commands = True, ran

    def run(command):
        ran.append(list(command))
        if Machine.works and "install" in command:
            monkeypatch.setattr(system_library, "LIBRARY", "libc.so.6")
        return 0

    monkeypatch.setattr(system_library, "LIBRARY", "libnowhere.so.9")
    monkeypatch.setattr(system_library, "run", run)
    monkeypatch.setattr(system_library, "way_to_root", list)
    monkeypatch.setattr(system_library.shutil, "which", lambda program: f"/usr/bin/{program}")
    return Machine


def test_root_brings_it_and_says_so(machine, capsys):
    system_library.bring()
    system_library.bring()
    assert [command[4:] for command in machine.commands] == [
        ["update"], ["install", "-y", "--no-install-recommends", "libnuma1"]
    ]  # fmt: skip
    assert "Installing the system package libnuma1" in capsys.readouterr().err


@pytest.mark.parametrize("root", [None, []])
def test_where_it_stays_away_the_start_is_refused_with_the_command(machine, monkeypatch, root):
    machine.works = False
    monkeypatch.setattr(system_library, "way_to_root", lambda: root)
    with pytest.raises(LauncherError, match=r"system: libnowhere.so.9, .* sudo apt-get install libnuma1") as refused:
        system_library.bring()
    assert refused.value.code == Exit.REFUSED and bool(machine.commands) is (root is not None)


def test_a_machine_that_has_it_is_left_alone(machine, monkeypatch):
    monkeypatch.setattr(system_library, "LIBRARY", "libc.so.6")
    system_library.bring()
    assert machine.commands == []
