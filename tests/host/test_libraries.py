"""What libraries and pip say: it is in a log, and the screen has sentences of ours. Without a network, above all."""

import logging
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from documents_of import read

from launcher import bootstrap, environment, libraries, pip_output
from launcher.environment import Sources
from launcher.errors import Exit, LauncherError
from launcher.settings import REPOSITORY
from launcher.weights import bundle

CLOSED = "http://127.0.0.1:9"  # the discard service, which nobody runs: refused at once
# Words that only libraries use on their own behalf.
RAW = re.compile(r"Retrying in|WARNING:|Warning:|Traceback|thrown while|NewConnectionError|ERROR:|\[Retry |%\|")


@pytest.fixture
def logs(tmp_path):
    """The root logger of this process, as it was before."""
    root = logging.getLogger()
    handlers, raises = list(root.handlers), logging.raiseExceptions
    logging.captureWarnings(False)  # another test's, whose place pytest has taken since
    yield tmp_path / "run"
    logging.captureWarnings(False)
    root.handlers[:], logging.raiseExceptions = handlers, raises


def log_of(folder: Path) -> str:
    return (folder / libraries.NAME).read_text()


def test_loggers_and_warnings_of_libraries_go_to_the_log(logs, capfd):
    logger = logging.getLogger("some_library.part")
    logger.addHandler(logging.StreamHandler(sys.stderr))
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        libraries.log_to(logs)  # in the place of pytest's own look at warnings
        assert not logs.exists()
        logger.warning("a hint at https://host/file?signature=abc")
        logging.getLogger("another").error("worse")
        warnings.warn("old way", DeprecationWarning, stacklevel=1)
    said = log_of(logs)
    assert "a hint at https://host/file?..." in said and "worse" in said and "old way" in said
    assert "signature" not in said
    assert capfd.readouterr() == ("", "")


def test_a_log_that_cannot_be_written_is_done_without(logs, capfd):
    logs.write_text("")  # a file where the folder should be
    libraries.log_to(logs)
    logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 1s [Retry 1/5].")
    assert capfd.readouterr() == ("", "")


def test_the_log_stays_small(logs, monkeypatch):
    monkeypatch.setattr(libraries, "LARGEST_BYTES", 10_000)
    libraries.log_to(logs)
    for number in range(1000):
        logging.getLogger("chatty").warning("line %d of many", number)
    assert sum(path.stat().st_size for path in logs.iterdir()) <= 20_000


# The Hub


@pytest.mark.parametrize("words", [[], ["--dry-run"], ["verify"]], ids=" ".join)
def test_a_hub_that_cannot_be_reached_is_told_in_our_words(hub_machine, logs, words, capfd):
    hub_machine.publish(shards=2)
    hub_machine.hub.close()
    hub_machine.model.mkdir()
    # The library's own way to the screen, as in a process that has just started.
    logging.getLogger("huggingface_hub").addHandler(logging.StreamHandler(sys.stderr))
    done = hub_machine.call(*words)
    said = done.said + "".join(capfd.readouterr())
    assert done.code == Exit.REFUSED and not RAW.search(said), said
    assert said.count("; trying again in ") == 5 and "does not say what it holds" in said


def test_the_script_without_a_network_prints_nothing_of_a_library(tmp_path):
    """The whole way, in a process of its own; only our waits are cut, once libraries have spoken."""
    code = (
        "import sys; from launcher import __main__, libraries; libraries.hold_back();"
        "from launcher.weights import patience; patience.FIRST_WAIT_S = 0.01;"
        "sys.exit(__main__.main(['cluster', 'download.sh', 'weights', '--dry-run']))"
    )
    own = {"HF_ENDPOINT": CLOSED, "HF_HOME": str(tmp_path / "hf"), "MODEL_DIR": str(tmp_path / "model"),
           "RUN_DIR": str(tmp_path / "run"), "SPEC_METHOD": "none", "PYTHONPATH": str(REPOSITORY),
           "HF_HUB_VERBOSITY": "loud"}  # fmt: skip
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    done = subprocess.run([sys.executable, "-c", code], env=kept | own, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == Exit.REFUSED and not RAW.search(done.stdout + done.stderr), done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 7 and all("; trying again in " in line for line in lines[:5]), done.stderr
    assert "Unknown option HF_HUB_VERBOSITY=loud" in log_of(tmp_path / "run"), "it said so while it was imported"


# pip


SAID = {
    "no network": ("WARNING: Retrying (Retry(total=0, connect=None)) after connection broken by 'NewConnectionError'\n"
                   "ERROR: No matching distribution found for anyio==4.16.0", "the package index cannot be reached"),
    "no such package": ("ERROR: No matching distribution found for anyio==4.16.0",
                        "the package index has no anyio==4.16.0 for this Python and machine"),
    "another file": ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.", "not the one that"),
    "disk": ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "disk is full"),
    "no ensurepip": ("The virtual environment was not created successfully because ensurepip is not\navailable.",
                     "sudo apt-get install python3-venv"),
    "certificate": ("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed", "certificate"),
    "proxy": ("ProxyError('Cannot connect to proxy.', OSError('Tunnel connection failed: 403'))", "the proxy"),
    "login": ("ERROR: HTTP error 403 while getting https://index/simple", "refuses this user"),
    "other": ("Segmentation fault", pip_output.UNKNOWN),
}  # fmt: skip


@pytest.mark.parametrize("name", SAID)
def test_pip_is_told_in_our_words(name):
    text, reason = SAID[name]
    assert reason in pip_output.reason(text) and not RAW.search(pip_output.reason(text))


# One attempt: pip itself would try for half a minute.
WITHOUT_NETWORK = {"PIP_INDEX_URL": f"{CLOSED}/simple", "PIP_RETRIES": "1", "PIP_NO_CACHE_DIR": "1",
                   "PIP_CONFIG_FILE": "/dev/null"}  # fmt: skip
PIP = [sys.executable, "-m", "pip", "download", "no-such-package-of-ours", "--dest"]


@pytest.fixture
def without_network(monkeypatch):
    for name, value in WITHOUT_NETWORK.items():
        monkeypatch.setenv(name, value)


def test_a_first_start_without_a_network_is_one_sentence_and_a_log(without_network, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(bootstrap, "LOG", tmp_path / "run/bootstrap.log")
    monkeypatch.setattr(sys, "argv", ["bootstrap.py", "start.sh", "tp2", "plan", "--json"])
    with pytest.raises(SystemExit) as ended:
        bootstrap.must([*PIP, str(tmp_path)])
    said = capfd.readouterr()
    assert ended.value.code == Exit.SETUP and not RAW.search(said.out + said.err), said
    assert "the package index cannot be reached" in said.err and said.err.count("\n") == 1
    assert f"What was said is in {bootstrap.LOG}." in said.err and "Retrying" in bootstrap.LOG.read_text()
    assert read(said.out, Exit.SETUP)["error"]["message"] == said.err.strip()


def test_the_local_environment_without_a_network_is_told_in_our_words(without_network, tmp_path, capfd):
    with (tmp_path / "log").open("w") as log:
        installer = environment.Installer(Sources(), log, os.environ)
        with pytest.raises(LauncherError, match=r"step packages: .*the package index cannot be reached") as caught:
            installer.must([*PIP, str(tmp_path)], environment.console.Progress("packages"), "packages")
    said = capfd.readouterr()
    assert not RAW.search(said.out + said.err + str(caught.value)) and "Retrying" in (tmp_path / "log").read_text()


def test_a_bundle_without_a_network_is_told_in_our_words(without_network, tmp_path, logs, monkeypatch, capfd):
    (tmp_path / "lock").write_text("no-such-package-of-ours==1 --hash=sha256:" + "0" * 64 + "\n")
    monkeypatch.setattr(bundle, "LOCK", tmp_path / "lock")
    libraries.log_to(logs)
    with pytest.raises(LauncherError, match="the package index cannot be reached") as caught:
        bundle.collect_wheels(tmp_path / "wheels")
    said = capfd.readouterr()
    assert not RAW.search(said.out + said.err + str(caught.value)) and "Retrying" in log_of(logs)
