"""Hostile settings: never a traceback; each refusal names the line, or where else it comes from, and the setting."""

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from launcher import __main__ as command_line
from launcher import cluster, cluster_life, programs, settings
from launcher.arguments import parse
from launcher.errors import Exit, LauncherError
from launcher.table import RETIRED, TABLE
from launcher.topology import TOPOLOGIES

TP2 = TOPOLOGIES["tp2"]
ADDRESSES = "HEAD_IP=10.0.0.1\nWORKER_IP=10.0.0.2\n"
# The same 500 every time: what is found by chance belongs into HOSTILE.
FUZZ = hypothesis_settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


class NodesAreAsked(Exception):
    """As far as settings alone lead."""


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A checkout with its env file, and paths that are not what is expected there."""
    folder = tmp_path_factory.mktemp("hostile")
    os.mkfifo(folder / "fifo")
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "nowhere").symlink_to(folder / "missing")
    (folder / "file").write_bytes(b"\0\xff")
    (folder / "model").mkdir()
    os.mkfifo(folder / "model" / "config.json")
    (folder / "model" / "model.safetensors").symlink_to("/dev/zero")
    (folder / "shut").mkdir(0o000)
    (folder / ".env.example").write_text("HEAD_IP=\nWORKER_IP=\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster, "REPOSITORY", folder)
        patch.setattr(cluster_life, "look", no_node)
        yield folder
    (folder / "shut").chmod(0o700)


def no_node(config, state):
    raise NodesAreAsked


def said(command: str, places: Path, content: bytes, ambient: dict[str, str]) -> str:
    """The refusal of a command, empty if there is none. Any other exception is a traceback, and fails the test."""
    (places / ".env").write_bytes(content)
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()):
        try:
            cluster.main(["start.sh", "tp2", command], ambient)
        except NodesAreAsked:
            return ""
        except LauncherError as error:
            assert error.code in (Exit.USAGE, Exit.REFUSED)
            out.getvalue().encode()
            return str(error)
    out.getvalue().encode()
    return ""


HOSTILE = [
    "", " ", "''", '"', "'", "$(touch /tmp/x)", "`id`", "${HOME}", "a\nb", "a\0b", "\x1b[2J", "\r", "-1", "+5", "0x10",
    "1e999", "-1e999", "nan", "inf", "1_000", "٣", "²", "9" * 30, "9" * 5000, "0" * 400, "1.5.2", "é" * 300,
    "\ud800", "\udcff", "\u202e", "\ufeff", "a" * 70_000, "x/" * 3000, "/" + "y" * 300, "~", "~root/x", "~/",
    "/", "//", ".", "..", "/proc/x", "/proc/self/mem", "/sys/x", "/dev/null", "/dev/null/x", "/dev/zero", "/dev/full",
    "{P}/fifo", "{P}/fifo/x", "{P}/loop", "{P}/loop/x", "{P}/nowhere", "{P}/nowhere/x", "{P}/file", "{P}/file/x",
    "{P}/model", "{P}/shut/x", "{P}/new/er", "a,b,,c", ",", "a,a", "-", "--", "--port 1", "--port=1 --model x", "-c",
    "--kv-cache-dtype", "'{\"a\": ", "--x '" + "[" * 5000 + "'", "127.0.0.1", "0.0.0.0", "::1", "fe80::1%eth0",
    "999.1.1.1", "10.0.0.1", "host.example", "no-such-check", "weights", "docker", "native", "mp", "ray", "dflash",
    "mtp", "none", "on", "off", "#", "# x", "=", "a=b",
]  # fmt: skip
NAMES = [row.name for row in TABLE]
VALUE = st.sampled_from(HOSTILE) | st.text(max_size=30) | st.integers().map(str) | st.floats().map(str)
OTHER_NAMES = [*RETIRED, "PATH", "LD_PRELOAD", "X" * 5000, "é", "export PORT", ""]
NAME = st.sampled_from(NAMES) | st.sampled_from(NAMES) | st.sampled_from(OTHER_NAMES)


def quoted(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


LINE = st.tuples(NAME, VALUE).map(lambda one: f"{one[0]}={quoted(one[1])}\n") | st.tuples(NAME, VALUE).map(
    lambda one: f"{one[0]}={one[1]}\n"
)
ODD_BYTES = ["PORT=1".encode("utf-16"), "PORT=1".encode("utf-16-le"), b"\0" * 50, b"\xef\xbb\xbf"]
BYTES = st.binary(max_size=40) | st.sampled_from(ODD_BYTES)
# A file of lines, sometimes with bytes that are no text.
FILE = st.tuples(st.booleans(), st.lists(LINE, max_size=4), st.just(b"") | BYTES).map(
    lambda one: (ADDRESSES if one[0] else "").encode() + "".join(one[1]).encode("utf-8", "surrogatepass") + one[2]
)
AMBIENT = st.dictionaries(st.sampled_from(NAMES), VALUE.filter(lambda value: "\0" not in value), max_size=2)

PLACE = r"(?:\.env line \d+|environment|\.env|topology tp2)"
# Where, and of what kind the sentence is: a setting by name, or a line that is none.
LOCATED = re.compile(rf"{PLACE}(?: and {PLACE})*: |\.env could not be read: ")


def located(refusal: str) -> None:
    for line in refusal.split("\n"):
        found = LOCATED.match(line)
        assert found, line
        rest = line[found.end() :]
        is_named = any(name in rest for name in NAMES) or re.match(
            r"\S* ?(is no setting|stands alone)|is not of the form|remove `export`|it is|\S*: ", rest
        )
        assert is_named, line
        assert len(line) < 1000 and line.isprintable(), line


@FUZZ
@given(content=FILE, ambient=AMBIENT)
def test_no_settings_make_a_traceback(places, content, ambient):
    content = content.replace(b"{P}", os.fsencode(places))
    ambient = {name: value.replace("{P}", str(places)) for name, value in ambient.items()}
    by_plan = said("plan", places, content, ambient)
    if by_plan:
        located(by_plan)
        assert said("check", places, content, ambient) == by_plan


OF_WHAT_RUNS = ["stop", "status", "logs"]


@hypothesis_settings(FUZZ, max_examples=150)
@given(text=st.text(max_size=200) | st.lists(LINE, max_size=6).map("".join), name=st.sampled_from(OF_WHAT_RUNS))
def test_what_needs_no_settings_goes_by_what_runs(places, text, name):
    (places / ".env").write_bytes(text.replace("{P}", str(places)).encode("utf-8", "surrogatepass"))
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        with contextlib.suppress(LauncherError):
            cluster.main(["start.sh", "tp2", name], {"RUN_DIR": str(places / "run")})


FLAGS = [one.flag for one in settings.TABLE if not one.secret and one.name != "detach"]
PROGRAM = programs.local()
WORDS = st.lists(st.tuples(st.sampled_from(FLAGS), VALUE.filter(lambda value: "\0" not in value)), max_size=3).map(
    lambda pairs: [f"{flag}={value}" for flag, value in pairs]
)


@hypothesis_settings(FUZZ, max_examples=200)
@given(words=WORDS, key=st.none() | VALUE)
def test_no_flag_makes_a_traceback(places, words, key):
    words = [word.replace("{P}", str(places)) for word in words]
    ambient, said = {} if key is None else {"VLLM_API_KEY": key}, ""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            command_line.run(parse(PROGRAM, ["plan", *words]), ambient)
        except LauncherError as error:
            said = str(error)
    if said:
        by_parser = re.match(r"\S+ plan: argument(s:)? --", said)
        assert by_parser or said.startswith((*FLAGS, "environment: VLLM_API_KEY")), said
        assert not said.startswith("environment") or len(key) < 20 or key not in said


# Env files that are no files


def env_as(places: Path, make) -> str:
    path = places / ".env"
    path.unlink(missing_ok=True)
    make(path)
    try:
        with pytest.raises(LauncherError) as caught:
            cluster.main(["start.sh", "tp2", "check"], {})
    finally:
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    return str(caught.value)


ODD_FILES = {
    "folder": (lambda path: path.mkdir(), "it is a folder and no plain file"),
    "pipe": (os.mkfifo, "it is a pipe, a socket or a device"),
    "endless": (lambda path: path.symlink_to("/dev/zero"), "it is a pipe, a socket or a device"),
    "huge": (lambda path: path.write_bytes(b"#" * (2 << 20)), "it is larger than 1048576 bytes"),
    "loop": (lambda path: path.symlink_to(path.name), "Too many levels of symbolic links"),
    "UTF-16": (lambda path: path.write_text("PORT=1\n", encoding="utf-16"), "it is not UTF-8 text"),
    "binary": (lambda path: path.write_bytes(b"\x80\x81"), "it is not UTF-8 text"),
}


@pytest.mark.parametrize("make, why", ODD_FILES.values(), ids=ODD_FILES)
def test_an_env_file_that_is_none_is_refused(places, make, why):
    assert env_as(places, make).startswith(f".env could not be read: {why}")


def test_a_link_to_nowhere_is_not_written_through(places):
    assert "is not filled in" in env_as(places, lambda path: path.symlink_to("missing"))
    assert not (places / "missing").exists()


def test_a_file_that_may_not_be_read_is_refused(places):
    def make(path):
        path.write_text("PORT=1\n")
        path.chmod(0)

    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    assert env_as(places, make).startswith(".env could not be read: Permission denied")


# plan and check refuse alike

ALIKE = {
    "marlin": ("MOE_BACKEND=marlin\n", r"\.env line 3: MOE_BACKEND is marlin"),
    "skip": ("SKIP_CHECKS=weigths\n", r"\.env line 3: SKIP_CHECKS: there is no check 'weigths'; did you mean weights"),
    "flag": ("PORT=9000\nEXTRA_ARGS=--port 1\n", r"\.env line 4 and \.env line 3: EXTRA_ARGS has --port"),
    "ports": ("PORT=6400\n", r"\.env line 3: PORT is 6400: Ray takes"),
    "run": ("RUN_DIR=/proc/x\n", r"\.env line 3: RUN_DIR is /proc/x: /proc belongs to the kernel"),
    "file": ("RUN_DIR=/dev/null/x\n", r"\.env line 3: RUN_DIR is /dev/null/x: /dev/null is there and is no folder"),
    "long": (f"RUN_DIR=/{'x/' * 2500}\n", r'\.env line 3: RUN_DIR "/x/.*" is too long for a path'),
    "native": ("RUNTIME=native\n", r"\.env line 3: RUNTIME is native and NATIVE_PYTHON is empty"),
    "steps": ("MAX_NUM_SEQS=256\nMAX_NUM_BATCHED_TOKENS=64\n",
              r"\.env line 4 and \.env line 3: MAX_NUM_BATCHED_TOKENS is 64"),
    "key": ("VLLM_API_KEY=abcdef\nEXTRA_ARGS=--x abcdef\n",
            r"\.env line 4 and \.env line 3: EXTRA_ARGS holds the value"),
}  # fmt: skip


@pytest.mark.parametrize("text, sentence", ALIKE.values(), ids=ALIKE)
def test_plan_refuses_what_check_refuses(places, text, sentence):
    refusal = said("plan", places, (ADDRESSES + text).encode(), {})
    assert re.match(sentence, refusal), refusal
    for command in ("check", "start", "restart"):
        assert said(command, places, (ADDRESSES + text).encode(), {}) == refusal


def test_plan_refuses_a_damaged_checkpoint_in_the_words_of_check(places):
    text = (ADDRESSES + f"MODEL_DIR={places}/model\n").encode()
    assert re.match(r"\.env line 3: MODEL_DIR: .*/config\.json: not readable", said("plan", places, text, {}))
    assert said("plan", places, text + b"SKIP_CHECKS=memory-plan\n", {}) == ""


# The command itself, as a process


@pytest.mark.parametrize("name, value", [("RUN_DIR", "/proc/x"), ("MODEL_DIR", "/" + "x" * 5000), ("PORT", "٣")])
def test_the_command_ends_in_one_sentence(name, value):
    ambient = {"HEAD_IP": "10.0.0.1", "WORKER_IP": "10.0.0.2", name: value, "PATH": os.environ["PATH"]}
    done = subprocess.run(
        [sys.executable, "-m", "launcher", "cluster", "start.sh", "tp2", "plan"], cwd=settings.REPOSITORY, env=ambient,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode in (Exit.USAGE, Exit.REFUSED)
    assert done.stderr.strip().startswith(f"environment: {name} ") and "Traceback" not in done.stderr
    assert done.stderr.strip().count("\n") == 0
