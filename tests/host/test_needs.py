"""tests/run on a machine that lacks what tests need: what is installed, what is skipped, and what is said."""

import os
import subprocess
import sys

import needs
import pytest

from launcher.settings import REPOSITORY


@pytest.fixture
def bare(monkeypatch):
    """A machine without any program, and somebody who may not become root."""
    monkeypatch.setattr(needs, "find", lambda program: None)
    monkeypatch.setattr(needs.shutil, "which", lambda program: None)
    monkeypatch.setattr(needs.os, "geteuid", lambda: 1000)


def test_a_reason_names_programs_and_packages(bare):
    assert needs.reason() == ""
    assert needs.reason("sshd", "rsync", "root") == "missing: sshd, rsync, root (Debian: openssh-server rsync)"
    assert needs.reason("root") == "missing: root"


def test_only_what_the_chosen_tests_need_is_installed(bare):
    everything = needs.missing_packages([])
    assert {"buildah", "debootstrap", "rsync", "openssh-server", "iproute2"} <= set(everything)
    assert everything == needs.missing_packages(["-k", "x", "tests/"]) == sorted(set(everything))
    assert needs.missing_packages(["tests/tools", "-x"]) == []
    assert "buildah" not in needs.missing_packages(["tests/host/test_probe.py::test_x"])
    assert needs.missing_packages(["tests/image", "tests/cluster"]) == sorted(
        set(needs.missing_packages(["tests/image"])) | set(needs.missing_packages(["tests/cluster"]))
    )


def test_who_may_not_install_is_told_how(bare, monkeypatch, capsys):
    monkeypatch.setattr(needs, "run", lambda command: pytest.fail(f"ran {command}"))
    needs.main(["tests/image"])
    assert "tests will be skipped" in capsys.readouterr().err
    needs.main(["tests/tools"])
    assert capsys.readouterr().err == ""


def test_root_installs_what_it_names(bare, monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(needs.os, "geteuid", lambda: 0)
    monkeypatch.setattr(needs.shutil, "which", lambda program: f"/usr/bin/{program}")
    monkeypatch.setattr(needs, "missing_packages", lambda arguments: ["openssh-server", "rsync"])
    monkeypatch.setattr(needs, "run", lambda command: ran.append(command) or subprocess.CompletedProcess(command, 0))
    needs.main([])
    assert capsys.readouterr().err == "Installing system packages that the tests need: openssh-server rsync\n"
    assert [command[-2:] for command in ran[:2]] == [["-qq", "update"], ["openssh-server", "rsync"]]


def test_a_failed_installation_is_told_and_ends_nothing(bare, monkeypatch, capsys):
    monkeypatch.setattr(needs, "way_to_root", lambda: ["sudo", "-n"])
    monkeypatch.setattr(needs.shutil, "which", lambda program: f"/usr/bin/{program}")
    failed = subprocess.CompletedProcess([], 100, b"E: Unable to locate package rsync\n")
    monkeypatch.setattr(needs, "run", lambda command: failed)
    needs.main(["tests/host"])
    said = capsys.readouterr().err
    assert "    E: Unable to locate package rsync\n" in said and "`sudo apt-get install " in said


def test_an_sshd_that_came_for_the_tests_does_not_listen():
    assert needs.installing(["openssh-server"], has_systemd=True)[-1] == ["systemctl", "disable", "--now", "ssh"]
    for packages, has_systemd in ((["openssh-server"], False), (["rsync"], True)):
        assert len(needs.installing(packages, has_systemd)) == 2


def test_it_runs_before_there_is_an_environment():
    """As tests/run calls it: any Python, no packages."""
    command = [sys.executable, "-I", "-S", REPOSITORY / "tests/needs.py", "tests/tools"]
    assert subprocess.run(command, capture_output=True, text=True).returncode == 0


RUN = """
import sys
sys.path.insert(0, "tests")
import needs, pytest
needs.find = lambda program: None
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("flags, code", [((), 0), (("--complete",), 1)])
def test_what_is_missing_is_skipped_and_told_last_but_in_ci(flags, code):
    words = ["-n0", "-p", "no:cacheprovider", "tests/host/test_probe.py", "-k", "iproute2", *flags]
    done = subprocess.run(
        [sys.executable, "-c", RUN, *words], cwd=REPOSITORY, capture_output=True, text=True,
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
    )  # fmt: skip
    assert done.returncode == code, done.stdout
    *_, told, closing = done.stdout.strip().splitlines()
    assert "missing: ip (Debian: iproute2)" in done.stdout
    assert ("1 skipped" in closing and told == "Not tested: 1, missing: ip (Debian: iproute2)") == (code == 0)


def test_ctrl_c_is_heard_by_what_tests_start_in_the_background():
    code = "import signal; print(signal.getsignal(signal.SIGINT) == signal.default_int_handler)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "True\n"
