"""The launcher's own environment: which one is used, what a broken-off or failed making leaves, who does without."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher import bootstrap, cluster, cluster_life, config, topology, venvs
from launcher.errors import Exit, LauncherError
from launcher.settings import REPOSITORY

# In the place of the launcher: says who runs it, and waits where it is told to.
STAND_IN = """\
import json, sys
print(json.dumps({"python": sys.executable, "flags": [sys.flags.isolated, sys.flags.no_site], "words": sys.argv[1:]}))
sys.stdout.flush()
if "wait" in sys.argv:
    sys.stdin.read()
"""
UNREACHABLE = "nothing-of-this-name==1 --hash=sha256:" + "0" * 64 + "\n"


class Checkout:
    """A checkout whose launcher is a stand-in, and a machine without a network."""

    def __init__(self, folder: Path) -> None:
        self.root, self.lock = folder, folder / "requirements/launcher.txt"
        (folder / "launcher").mkdir()
        self.lock.parent.mkdir()
        for name in ("bootstrap.py", "venvs.py", "pip_output.py", "__init__.py"):
            shutil.copy(REPOSITORY / "launcher" / name, folder / "launcher" / name)
        (folder / "launcher/__main__.py").write_text(STAND_IN)
        shutil.copy(REPOSITORY / "start.sh", folder)
        self.lock.write_text("# nothing\n")

    def begin(self, *words: str, python: Path | None = None, **environment: str) -> subprocess.Popen:
        path = f"{(python or Path(sys.executable)).parent}{os.pathsep}{os.environ['PATH']}"
        return subprocess.Popen(
            [self.root / "start.sh", *words], env={**os.environ, "PATH": path, "PIP_NO_INDEX": "1", **environment},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def call(self, *words: str, **more) -> tuple[int, dict, str]:
        """(exit code, what the stand-in said, standard error)."""
        process = self.begin(*words, **more)
        output, errors = process.communicate(timeout=120)
        return process.returncode, json.loads(output) if output else {}, errors

    @property
    def environments(self) -> list[Path]:
        return venvs.folders(self.root / ".venvs", "launcher")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Checkout:
    """With an environment, made at its first use."""
    checkout = Checkout(tmp_path_factory.mktemp("checkout"))
    code, said, errors = checkout.call("check")
    assert code == 0, errors
    assert "Setting up the launcher's own Python packages" in errors
    (folder,) = checkout.environments
    assert said == {"python": f"{folder}/bin/python", "flags": [1, 0], "words": ["cluster", "start.sh", "tp2", "check"]}
    return checkout


@pytest.fixture
def checkout(made):
    """The same for all: each test leaves one complete environment, of the lock that is there."""
    yield made
    (folder,) = made.environments
    assert venvs.read_stamp(folder)["lock"] == hashlib.sha256(made.lock.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def others(tmp_path_factory) -> list[Path]:
    """Other interpreters: one of another path, and those of other versions that this machine has."""
    copied = tmp_path_factory.mktemp("other") / "python"
    subprocess.run([sys.executable, "-m", "venv", "--copies", "--without-pip", copied], check=True)
    found = [copied / "bin/python3"]
    for name in ("python3.10", "python3.12", "python3.13"):
        asked = subprocess.run(["bash", "-c", f"{name} -c 'import sys; print(sys.executable)'"], capture_output=True)
        if asked.returncode == 0:
            found.append(Path(asked.stdout.decode().strip()))
    return found


def content(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else
        hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }  # fmt: skip


def test_another_python_changes_nothing(checkout, others):
    before = content(checkout.root)
    for python in others:
        code, said, errors = checkout.call("plan", python=python)
        assert (code, errors) == (0, "") and said["python"] == f"{checkout.environments[0]}/bin/python"
    assert content(checkout.root) == before


def test_without_network_a_new_lock_leaves_the_old_environment_and_what_ends_a_run_works(checkout, others):
    before, (folder,), lock = content(checkout.root / ".venvs"), checkout.environments, checkout.lock.read_text()
    checkout.lock.write_text(UNREACHABLE)
    code, said, errors = checkout.call("start")
    assert (code, said) == (Exit.SETUP, {})
    said = errors.splitlines()[-1]
    assert "could not be made: the package index has no nothing-of-this-name==1 for this Python" in said
    for word in cluster.OF_WHAT_RUNS:
        for python in others:
            code, said, errors = checkout.call(word, python=python)
            assert code == 0 and said["python"] == str(python) and said["flags"] == [1, 1]
            assert errors == (
                f"Note: `{word}` runs without the launcher's Python environment: requirements/launcher.txt has changed "
                f"since it was made.\n"
            )
    assert content(checkout.root / ".venvs") == before
    checkout.lock.write_text(lock)
    code, said, errors = checkout.call("start")
    assert (code, errors) == (0, "") and said["python"] == f"{folder}/bin/python"


def test_commands_without_packages_are_those_that_go_by_the_state():
    assert bootstrap.WITHOUT_PACKAGES == cluster.OF_WHAT_RUNS


def test_a_new_environment_replaces_the_old_when_nobody_runs_in_that(checkout):
    (old,) = checkout.environments
    waiting = checkout.begin("wait")
    assert json.loads(waiting.stdout.readline())["python"] == f"{old}/bin/python"
    checkout.lock.write_text("# another\n")
    code, said, _ = checkout.call("plan")
    assert code == 0 and said["python"] != f"{old}/bin/python"
    assert old in checkout.environments and venvs.read_stamp(old)
    waiting.communicate("")
    assert checkout.call("plan")[0] == 0
    assert [f"{folder}/bin/python" for folder in checkout.environments] == [said["python"]]


@pytest.fixture
def slow_pip(tmp_path) -> Path:
    """pip waits for this configuration until somebody writes it."""
    os.mkfifo(tmp_path / "pip.conf")
    return tmp_path / "pip.conf"


def test_a_kill_in_the_middle_leaves_the_old_one_and_no_rest(checkout, slow_pip):
    (old,), lock = checkout.environments, checkout.lock.read_text()
    before = content(old)
    checkout.lock.write_text("# another that is not made\n")
    killed = checkout.begin("start", PIP_CONFIG_FILE=str(slow_pip))
    os.close(os.open(slow_pip, os.O_WRONLY))  # once pip is there
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert content(old) == before and len(checkout.environments) == 2
    assert checkout.call("status")[2].count("\n") == 1
    checkout.lock.write_text(lock)
    code, said, errors = checkout.call("start")
    assert (code, errors) == (0, "") and said["python"] == f"{old}/bin/python"
    assert checkout.environments == [old]


def test_a_second_start_waits_for_the_first_and_uses_what_it_made(checkout, slow_pip, tmp_path):
    checkout.lock.write_text("# a third\n")
    first = checkout.begin("plan", PIP_CONFIG_FILE=str(slow_pip))
    assert "Setting up" in first.stderr.readline()
    second = checkout.begin("plan", PIP_CONFIG_FILE=str(slow_pip))
    assert "waits for another start" in second.stderr.readline()
    writer = os.open(slow_pip, os.O_WRONLY)
    (tmp_path / "empty").touch()
    (tmp_path / "empty").replace(slow_pip)  # for whoever reads it again
    os.close(writer)
    said = [json.loads(process.communicate(timeout=60)[0])["python"] for process in (first, second)]
    assert said == [f"{checkout.environments[-1]}/bin/python"] * 2


def test_an_interpreter_that_is_gone_or_another_is_noticed(checkout, monkeypatch):
    (folder,) = checkout.environments
    monkeypatch.setattr(bootstrap, "LOCK", checkout.lock)
    stamp = venvs.read_stamp(folder)
    assert bootstrap.problem_of(folder) == ""
    monkeypatch.setattr(venvs, "read_stamp", lambda _: stamp | {"version": [3, 9, 18]})
    assert "is gone, or is another one now" in bootstrap.problem_of(folder)
    monkeypatch.setattr(venvs, "read_stamp", lambda _: stamp)
    monkeypatch.setattr(bootstrap, "python_of", lambda _: Path("/nowhere/python3"))
    assert "is gone, or is another one now" in bootstrap.problem_of(folder)
    assert "moved" in bootstrap.problem_of(folder.parent)


def test_an_old_python_is_refused_where_no_environment_is_there(tmp_path):
    other = Checkout(tmp_path)
    code = "import runpy, sys; sys.version_info = (3, 9, 18); runpy.run_path(sys.argv[0], run_name='__main__')"
    script = code.replace("sys.argv[0]", repr(str(tmp_path / "launcher/bootstrap.py")))
    done = subprocess.run([sys.executable, "-c", script, "start.sh", "tp2", "stop"], capture_output=True, text=True)
    assert done.returncode == Exit.REFUSED
    assert done.stderr == "python3 is 3.9.18 here, the launcher needs 3.10 or newer; install one.\n"
    assert other.environments == []


# The launcher itself without its packages


@pytest.fixture
def bare(tmp_path) -> Path:
    """A checkout that has never made an environment, with a settings file."""
    root = tmp_path / "bare"
    shutil.copytree(REPOSITORY / "launcher", root / "launcher", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(REPOSITORY / "requirements", root / "requirements")
    for name in ("start.sh", "start-local.sh", ".env.example"):
        shutil.copy(REPOSITORY / name, root)
    return root


def bare_call(root: Path, script: str, *words: str, python: Path) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name != "RUN_DIR"}
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [root / script, *words], env=environment | {"PATH": path}, capture_output=True, text=True, timeout=60
    )


def test_a_cluster_is_seen_and_ended_without_packages(cluster_stub, bare, others):
    assert cluster_life.start(cluster_stub.config()) == Exit.OK
    (bare / ".env").write_text(f"HEAD_IP=x  # wrong\nRUN_DIR='{cluster_stub.run_dir}' # here\n")
    for python in others:
        status = bare_call(bare, "start.sh", "status", python=python)
        assert status.returncode == Exit.OK and "status:   ready" in status.stdout, status.stderr
        assert status.stderr == (
            "Note: `status` runs without the launcher's Python environment: none has been made yet.\n"
        )
        assert "what the container said" in bare_call(bare, "start.sh", "logs", "1", python=python).stdout
    assert bare_call(bare, "start.sh", "stop", python=others[-1]).stdout == "Stopped.\n"
    assert cluster_stub.running == set()
    assert not (bare / ".venvs").exists()


@pytest.mark.parametrize("word, code", [("status", Exit.NOT_RUNNING), ("logs", Exit.NOT_RUNNING), ("stop", Exit.OK)])
def test_the_local_topology_is_asked_and_ended_with_any_python(bare, others, tmp_path, word, code):
    for python in others:
        done = bare_call(bare, "start-local.sh", word, "--run-dir", str(tmp_path), python=python)
        assert done.returncode == code and "Traceback" not in done.stderr, done.stderr


# RUN_DIR without python-dotenv

TP2 = topology.TOPOLOGIES["tp2"]
WORDS = st.text(st.sampled_from("ab/~ .#'\"\\$=\t"), max_size=12)


@given(st.lists(st.tuples(st.sampled_from(["RUN_DIR=", " RUN_DIR = ", "PORT=", "# RUN_DIR=", "RUN_DIR"]), WORDS)))
def test_the_plain_reading_says_what_the_parser_says_or_refuses(lines):
    text = "\n".join(name + value for name, value in lines)
    read = config.read_lines(text, ".env")
    if read.problems:
        return
    try:
        plain = config.read_plain_run_dir(text, ".env")
    except LauncherError:
        return
    assert plain == [one for one in read.assignments if one.name == "RUN_DIR"]


def test_what_cannot_be_read_plainly_is_refused_unless_the_environment_says_it(monkeypatch):
    monkeypatch.setattr(config, "has_parser", lambda: False)
    text = 'PORT=1\nRUN_DIR="/srv/\\x41"\n'
    with pytest.raises(LauncherError, match=r"\.env line 2: RUN_DIR is written in a way .* as RUN_DIR=DIR"):
        config.of_what_runs(TP2, text, {})
    assert config.of_what_runs(TP2, text, {"RUN_DIR": "/srv/run"})["RUN_DIR"] == "/srv/run"
    assert config.of_what_runs(TP2, "RUN_DIR=/srv/a\nRUN_DIR='/srv/b c'\n", {})["RUN_DIR"] == "/srv/b c"
