"""Nodes whose login shell says something of its own: it is told from answers, and a missing answer is no state."""

import json
import os
import shutil
import subprocess
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loopback import fill, settings

from launcher import facts, framing, preflight, remote, watch
from launcher.cluster_state import StartedUnit
from launcher.commands import Unit
from launcher.errors import LauncherError
from launcher.framing import Answer
from launcher.weights import agent, record, sync

THERE = remote.Node(1, "10.0.0.2")
MARK = "0123456789abcdef" * 2
ALIVE = json.dumps({"Running": True, "ExitCode": 0})

# The stream, whoever cut it into pieces


PART = st.binary(max_size=30) | st.sampled_from([b"", MARK[:9].encode(), f"{MARK} ".encode(), b"\n", b'{"Running": 0}'])


@given(before=PART, answer=PART, after=PART, code=st.integers(0, 255), cuts=st.lists(st.integers(0, 200), max_size=8))
def test_an_answer_is_told_from_noise_however_it_arrives(before, answer, after, code, cuts):
    stream = b"%s%s<%s%s>%d;%s" % (before, MARK.encode(), answer, MARK.encode(), code, after)
    heard, found = Answer(MARK), b""
    places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    for start, end in pairwise(places):
        found += heard.feed(stream[start:end])
    heard.finish()
    assert (found, heard.code, heard.noise) == (answer, code, before + after)


@given(line=st.binary(max_size=20))
def test_what_has_arrived_of_an_answer_is_passed_on_at_once(line):
    """A reply to a question, after which nothing comes until the next question."""
    heard = Answer(MARK)
    assert heard.feed(f"hello{MARK}<".encode() + line + b"\n") == line + b"\n"
    assert heard.feed(MARK[:5].encode()) == b"" and heard.feed(b"!") == MARK[:5].encode() + b"!"


def test_endless_noise_is_not_kept():
    heard = Answer(MARK)
    for _ in range(100):
        heard.feed(b"x" * 10_000)
    assert len(heard.noise) == framing.MOST_NOISE_BYTES and len(framing.shown(heard.noise)) < 70


@given(line=st.binary(max_size=40))
def test_a_line_becomes_one_word_that_every_shell_reads_alike(line):
    word = framing.word(line)
    assert word[:1] == word[-1:] == b"'" and not set(word[1:-1]) & set(b"'!\n\r\t\0")


# Shells. sshd gives the whole command to the user's own.

NASTY = ["", "two words", "it's", "a\\b\\\\", "line\nbreak\n", "$HOME `id` $(id) ${X:-y} !! !x", "*?[a-z] ~ # & | ;",
         "größe < >"]  # fmt: skip
SHELLS = [shell for shell in ("sh", "bash", "dash", "zsh", "fish", "tcsh", "csh") if shutil.which(shell)]


def pretend_ssh(folder, monkeypatch, text: str) -> None:
    (folder / "ssh").write_text(f'#!/bin/sh\nfor last; do :; done\n{text}\n')
    (folder / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.parametrize("shell", SHELLS)
def test_any_login_shell_passes_the_command_on(tmp_path, monkeypatch, shell):
    pretend_ssh(tmp_path, monkeypatch, f'exec {shell} -c "$last"')
    content = bytes(range(256)) * 500
    script = 'printf "%s|" "$@" >&2; cat; exit 7'
    result = remote.run(THERE, ["sh", "-c", script, "sh", *NASTY], stdin=content)
    assert result == remote.Result(7, content, "".join(f"{one}|" for one in NASTY).encode())
    plain = subprocess.run(remote.terminal_command(THERE, ["printf", "%s|", *NASTY]), capture_output=True, check=True)
    assert plain.stdout.decode() == "".join(f"{one}|" for one in NASTY)


NOISE = {
    "before": ("echo Welcome; echo banner >&2", ""),
    "without a line's end": ("printf Welcome; printf banner >&2", ""),
    "after": ("", "; echo bye; echo bye >&2"),
    "like an answer": (f"echo '{ALIVE}'; echo '{{}}'", f"; echo '{ALIVE}'"),
    "binary": (r"printf '\377\000\033[2J'", r"; printf '\377'"),
    "much": ("head -c 300000 /dev/zero", "; head -c 300000 /dev/zero"),
}


@pytest.mark.parametrize("before, after", NOISE.values(), ids=NOISE)
def test_noise_is_no_part_of_the_answer(tmp_path, monkeypatch, before, after):
    pretend_ssh(tmp_path, monkeypatch, f'{before}\nsh -c "$last"\ncode=$?{after}\nexit $code')
    result = remote.run(THERE, ["sh", "-c", "echo out; echo why >&2; exit 255"])
    assert (result.code, result.stdout, result.message, result.unreached) == (255, b"out\n", "why", False)
    assert result.noise
    assert remote.run(THERE, ["false"]).message == "exit status 1, and it said nothing"


def test_a_line_in_between_is_no_part_of_a_state(tmp_path, monkeypatch):
    pretend_ssh(tmp_path, monkeypatch, 'exec sh -c "$last"')
    said = f"echo; echo '{ALIVE}'; echo 'Updates: 3'; echo '{{\"n\": 1}}'"
    assert watch.state_of(unit("sh", "-c", said)) == json.loads(ALIVE)
    assert watch.state_of(unit("echo", "Updates: 3")) is None
    assert watch.state_of(unit("false")) == {}


def unit(*state: str, node: remote.Node = THERE) -> StartedUnit:
    return StartedUnit(node, Unit("ray", (), state, (), (), ()))


SILENT = {
    "nologin": ("echo This account is not available.; exit 1", 'said "This account is not available."'),
    "an exit in .bashrc": ("exit 0", "ended with exit status 0"),
    "on stderr": ("echo no such shell >&2; exit 127", 'said "no such shell"'),
    "another command": (f"echo '{ALIVE}'", 'said "{"Running": true, "ExitCode": 0}"'),
}


@pytest.mark.parametrize("text, said", SILENT.values(), ids=SILENT)
def test_a_missing_answer_is_told_and_is_no_state(tmp_path, monkeypatch, capfd, text, said):
    pretend_ssh(tmp_path, monkeypatch, text)
    sentence = f"the node's login shell {said} instead of an answer"
    result = remote.run(THERE, ["true"])
    assert (result.ok, result.unreached, result.message) == (False, True, sentence)
    assert watch.state_of(unit("true")) is None
    assert facts.gather([THERE], {})[0].unreached == sentence
    assert remote.pipe(["echo", "x"], THERE, ["cat"], lambda count: True).message == sentence
    with pytest.raises(LauncherError, match=r"node 1 \(10.0.0.2\): the connection ended \(the node's login shell"):
        agent.Agent(THERE, "/x").ask("place")
    assert remote.show(THERE, ["true"]) != 0
    assert sentence in capfd.readouterr().err


def test_ssh_s_own_words_are_kept(tmp_path, monkeypatch):
    pretend_ssh(tmp_path, monkeypatch, "echo 'Connection refused' >&2; exit 255")
    result = remote.run(THERE, ["true"])
    assert (result.code, result.message, result.unreached) == (255, "Connection refused", True)


def test_a_connection_lost_on_the_way_is_no_answer(tmp_path, monkeypatch):
    pretend_ssh(tmp_path, monkeypatch, "sh -c \"$last\" | head -c 40; exit 255")
    result = remote.run(THERE, ["echo", ALIVE])
    assert (result.ok, result.unreached, result.message) == (False, True, "the connection ended before the answer did")
    assert watch.state_of(unit("echo", ALIVE)) is None


def test_an_ssh_that_hangs_is_not_reached(tmp_path, monkeypatch):
    pretend_ssh(tmp_path, monkeypatch, "exec sleep 60")
    result = remote.run(THERE, ["true"], timeout_s=0.3)
    assert (result.code, result.unreached, result.message) == (remote.TIMED_OUT, True, "no end after 0.3 s")
    monkeypatch.setattr(facts, "GATHER_TIMEOUT_S", 0.3)
    assert facts.gather([THERE], {})[0].unreached == "no end after 0.3 s"


def test_what_is_shown_to_the_user_is_the_command_s_alone(tmp_path, monkeypatch, capfd):
    pretend_ssh(tmp_path, monkeypatch, 'echo Welcome; echo banner >&2; sh -c "$last"; code=$?; echo bye; exit $code')
    assert remote.show(THERE, ["sh", "-c", "echo out; echo why >&2; exit 3"]) == 3
    assert capfd.readouterr() == ("out\n", "why\n")


# A real sshd, and a shell that reads its startup file

BASHRC = """\
echo '{"Running": false, "errors": {}, "number": 1}'
printf 'You have mail. '
echo 'a banner' >&2
trap 'echo bye' EXIT
"""
IN_BETWEEN = """(for i in 1 2 3 4 5 6; do sleep 0.05; echo '{"n": 1}'; printf 'half a line'; done) &\n"""


@pytest.fixture
def noisy(pair):
    (pair.worker / ".bashrc").write_text(BASHRC)
    node = remote.nodes_of(settings(pair))[1]
    if not remote.run(node, ["true"], timeout_s=60).noise:
        pytest.skip("the login shell of this user is no bash, or reads no .bashrc")
    return pair, node


def test_a_noisy_node_is_looked_at_and_told_once(noisy):
    pair, node = noisy
    (pair.worker / ".bashrc").write_text(BASHRC + IN_BETWEEN)
    config = settings(pair)
    found = facts.gather([remote.nodes_of(config)[0], node], preflight.request(config))
    assert found[1].looked_at and found[1].host.home == str(pair.worker)
    context = preflight.context(config, remote.nodes_of(config), found)
    findings = [one for one in preflight.run_checks(context, []) if "You have mail" in one.seen]
    assert [(one.check, one.node, one.level) for one in findings] == [("clean-shell", 1, "WARN")]


def test_a_live_worker_behind_a_noisy_shell_is_alive(noisy):
    pair, node = noisy
    assert watch.state_of(unit("echo", ALIVE, node=node))["Running"]
    (pair.worker / ".bashrc").write_text(BASHRC + IN_BETWEEN)
    state = ("sh", "-c", f"sleep 0.2; echo; echo '{ALIVE}'; sleep 0.2")
    assert watch.state_of(unit(*state, node=node))["Running"]


def test_a_dialogue_goes_on_through_noise(noisy):
    pair, node = noisy
    fill(pair.worker / "model", shards=1)
    (pair.worker / ".bashrc").write_text(BASHRC + IN_BETWEEN)
    with agent.Agent(node, "~/model") as there:
        for _ in range(4):
            assert there.look(["config.json"]).stats["config.json"]
            time.sleep(0.06)


def test_files_and_streams_reach_a_noisy_node(noisy):
    pair, node = noisy
    remote.write_file(node, "~/a folder/file", bytes(range(256)))
    assert (pair.worker / "a folder" / "file").read_bytes() == bytes(range(256))
    result = remote.pipe(["head", "-c", "3000000", "/dev/zero"], node, ["wc", "-c"], lambda count: True)
    assert (result.code, result.stdout.strip()) == (0, b"3000000")


def test_weights_reach_a_noisy_node_and_are_hashed_there(noisy):
    pair, _ = noisy
    verified = fill(pair.head / "model", shards=2)
    said: list[str] = []
    sync.tell(sync.sync(settings(pair)), said.append)
    assert said == ["node 1 (10.0.0.2): MODEL_DIR 3 of 3 files copied (2.0 MiB), all hashed there and right."]
    assert record.read(pair.worker / "model").manifest == verified.manifest
    for entry in verified.manifest.files:
        assert (pair.worker / "model" / entry.name).read_bytes() == (pair.head / "model" / entry.name).read_bytes()


def test_rsync_without_its_guard_fails_on_such_a_node(noisy, monkeypatch):
    """What quiet_ssh.py is for: the day on which this fails it can go."""
    pair, _ = noisy
    fill(pair.head / "model", shards=1)
    bare = lambda node: ["--rsh", " ".join(remote.ssh_arguments(node)[:-2])]
    monkeypatch.setattr(remote, "rsync_transport", bare)
    with pytest.raises(LauncherError, match=r"rsync to .* ended with"):
        sync.sync(settings(pair))
