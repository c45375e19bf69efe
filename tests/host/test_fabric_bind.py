"""The library that closes wildcard sockets to other networks, preloaded into a small program."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from launcher import fabric_bind
from launcher.settings import REPOSITORY

PROGRAM = REPOSITORY / "launcher" / "fabric_bind.py"
LISTEN = """
import json, socket, sys
family, address, port = sys.argv[1:]
with socket.socket(getattr(socket, family)) as s:
    s.bind((address, int(port)))
    print(json.dumps(s.getsockname()[0]))
"""


def bound_to(tmp_path, family: str, address: str, port: int = 0, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, PROGRAM, tmp_path / "bind.so", sys.executable, "-c", LISTEN, family, address, str(port)],
        env=os.environ | {"EXL3_BIND_ADDRESS": "127.0.0.5"} | environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "family, address, expected",
    [
        ("AF_INET", "0.0.0.0", "127.0.0.5"),
        ("AF_INET", "", "127.0.0.5"),
        ("AF_INET6", "::", "::ffff:127.0.0.5"),
        ("AF_INET", "127.0.0.1", "127.0.0.1"),
    ],
)
def test_only_the_wildcard_address_is_changed(tmp_path, family, address, expected):
    assert bound_to(tmp_path, family, address) == expected


def test_the_excepted_port_stays_open_to_all(tmp_path, unused_port):
    assert bound_to(tmp_path, "AF_INET", "0.0.0.0", unused_port, EXL3_BIND_EXCEPT=str(unused_port)) == "0.0.0.0"
    assert bound_to(tmp_path, "AF_INET", "0.0.0.0", unused_port, EXL3_BIND_EXCEPT="1") == "127.0.0.5"


def test_without_a_compiler_it_says_so_and_starts_nothing(tmp_path):
    done = subprocess.run(
        [sys.executable, PROGRAM, tmp_path / "bind.so", "touch", tmp_path / "started"],
        env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1 and "no C compiler" in done.stderr
    assert not (tmp_path / "started").exists()


def test_a_missing_command_is_named(tmp_path):
    assert shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    done = subprocess.run(
        [sys.executable, PROGRAM, tmp_path / "bind.so", "no-such-program"], capture_output=True, text=True, timeout=60
    )
    assert "cannot start no-such-program" in done.stderr


def test_the_image_s_library_is_taken_where_its_source_is_ours(tmp_path, monkeypatch):
    """As in our image: no compiler is needed at a start."""
    monkeypatch.setattr(fabric_bind, "BUILT", tmp_path / "image" / "fabric_bind.so")
    monkeypatch.setattr(fabric_bind, "compile_library", lambda library: pytest.fail("compiled"))
    ran = []
    monkeypatch.setattr(os, "execvp", lambda program, command: ran.append(os.environ["LD_PRELOAD"]))
    monkeypatch.setenv("LD_PRELOAD", "")
    (tmp_path / "image").mkdir()
    fabric_bind.BUILT.write_bytes(b"")
    shutil.copy(fabric_bind.SOURCE, fabric_bind.BUILT.with_suffix(".c"))
    fabric_bind.main(str(tmp_path / "mine.so"), ["true"])
    assert ran == [str(fabric_bind.BUILT)]


def test_the_image_s_library_of_another_source_is_not_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(fabric_bind, "BUILT", tmp_path / "fabric_bind.so")
    fabric_bind.BUILT.write_bytes(b"")
    fabric_bind.BUILT.with_suffix(".c").write_text("// older\n")
    compiled = []
    monkeypatch.setattr(fabric_bind, "compile_library", compiled.append)
    monkeypatch.setattr(os, "execvp", lambda program, command: None)
    monkeypatch.setenv("LD_PRELOAD", "")
    fabric_bind.main(str(tmp_path / "mine.so"), ["true"])
    assert compiled == [str(tmp_path / "mine.so")]
