import os
import signal
import stat
import threading
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher import remote
from launcher.errors import Exit, LauncherError
from launcher.remote import Node, Result

HERE = Node(0, "10.0.0.1")
THERE = Node(1, "10.0.0.2", "spark", 2222, "~/.ssh/a key")

# What sshd does with the command: the login shell gets it as one argument.
FAKE_SSH = """\
#!/bin/sh
printf '%s\\n' "$@" > "$SSH_LOG"
for last; do :; done
exec sh -c "$last"
"""
PRINT_ARGUMENTS = ["sh", "-c", 'printf "%s\\0" "$@"', "sh"]


def write_program(folder, name, text):
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture(scope="module")
def ssh(tmp_path_factory):
    """A folder whose `ssh` runs the command on this machine; its arguments are in the file that is returned."""
    folder = tmp_path_factory.mktemp("ssh")
    write_program(folder, "ssh", FAKE_SSH)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        patch.setenv("SSH_LOG", str(folder / "log"))
        yield folder / "log"


def arguments_seen(node, arguments):
    result = remote.run(node, [*PRINT_ARGUMENTS, *arguments])
    assert result.ok, result.message
    return [part.decode() for part in result.stdout.split(b"\0")[:-1]]


NASTY = [
    "",
    " ",
    "two words",
    "it's",
    '"quoted"',
    '{"method": "dflash", "model": "/a b/c", "n": [1, 2]}',
    "line\nbreak\n",
    "tab\tand\\back\\\\slash",
    "$HOME `id` $(id) ${X:-y}",
    "*?[a-z] ~ # ! & | ; < > ( )",
    "-n",
    "--",
    "größe 模型 🐉",
    "'\"'\"'",
]


@pytest.mark.parametrize("node", [HERE, THERE], ids=["here", "ssh"])
def test_nasty_arguments_arrive_as_they_are(ssh, node):
    assert arguments_seen(node, NASTY) == NASTY


# A NUL cannot be in any argument, and single surrogates are no text.
TEXT = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"), max_size=40)


@settings(max_examples=150, deadline=None)
@given(arguments=st.lists(TEXT | st.sampled_from(NASTY), min_size=1, max_size=6))
def test_any_arguments_survive_ssh(ssh, arguments):
    assert arguments_seen(THERE, arguments) == arguments


def test_text_arrives_whatever_the_locale_is(ssh, monkeypatch):
    monkeypatch.setenv("LC_ALL", "C")
    assert arguments_seen(THERE, ["größe"]) == ["größe"]


@settings(max_examples=30, deadline=None)
@given(content=st.binary(max_size=200))
def test_stdin_arrives_as_it_is(ssh, content):
    assert remote.run(THERE, ["cat"], stdin=content).stdout == content


def test_ssh_is_called_so_that_it_never_waits_for_a_human(ssh):
    remote.run(THERE, ["true"])
    words = ssh.read_text().splitlines()
    assert words[-3:-1] == ["--", "spark@10.0.0.2"] and words[-1].endswith(" 'true'")
    options = [words[i + 1] for i, word in enumerate(words) if word == "-o"]
    assert {"BatchMode=yes", "ConnectTimeout=3", "IdentitiesOnly=yes"} <= set(options)
    assert not any(option.startswith("StrictHostKeyChecking") for option in options)
    assert words[words.index("-p") + 1] == "2222"
    assert words[words.index("-i") + 1] == os.path.expanduser("~/.ssh/a key")


def test_plain_node_leaves_user_port_and_key_to_the_configuration(ssh):
    remote.run(Node(1, "10.0.0.2"), ["true"])
    words = ssh.read_text().splitlines()
    assert "-p" not in words and "-i" not in words
    assert words[-2] == "10.0.0.2"


def test_first_rank_needs_no_ssh(ssh):
    ssh.unlink(missing_ok=True)
    assert remote.run(HERE, ["echo", "a b"]).stdout == b"a b\n"
    assert not ssh.exists()


def test_terminal_is_asked_for_on_other_nodes_only():
    assert remote.terminal_command(HERE, ["bash"]) == [b"bash"]
    assert remote.terminal_command(THERE, ["bash"])[:2] == [b"ssh", b"-t"]
    assert b"-t" not in remote.Call.to(THERE, ["bash"]).command


@pytest.mark.parametrize("node", [HERE, THERE], ids=["here", "ssh"])
def test_failing_command_is_a_result(ssh, node):
    result = remote.run(node, ["sh", "-c", "echo out; echo why >&2; exit 7"])
    assert result == Result(7, b"out\n", b"why\n")
    assert not result.ok
    assert result.message == "why"


def test_silent_failure_has_a_message():
    assert remote.run(HERE, ["false"]).message == "exit status 1, and it said nothing"


def test_missing_program_is_a_result(monkeypatch, tmp_path):
    result = remote.run(HERE, ["no-such-program"])
    assert (result.code, result.message) == (127, "no-such-program: command not found on this machine")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert remote.run(THERE, ["true"]).message == "ssh: command not found on this machine"


@pytest.mark.parametrize("node", [HERE, THERE], ids=["here", "ssh"])
def test_late_command_is_ended_with_its_children(ssh, node, tmp_path):
    script = f'(sleep 1; touch "{tmp_path}/late") & echo began; sleep 60'
    began = time.monotonic()
    result = remote.run(node, ["sh", "-c", script], timeout_s=0.5)
    assert time.monotonic() - began < 2
    assert result.code == remote.TIMED_OUT
    assert result.stdout == b"began\n"
    assert "no end after 0.5 s" in result.message
    time.sleep(1)
    assert not (tmp_path / "late").exists()


def test_command_that_reads_nothing_does_not_break_a_large_input(ssh):
    assert remote.run(THERE, ["true"], stdin=b"x" * 1_000_000).ok


def test_nul_is_refused():
    with pytest.raises(LauncherError, match="NUL character"):
        remote.run(THERE, ["echo", "a\0b"])


def test_too_long_a_command_is_refused_with_what_to_do():
    with pytest.raises(LauncherError, match=r"120\d\d\d bytes long .* shorten EXTRA_ARGS"):
        remote.run(THERE, ["echo", "x" * 120_000])


def test_longest_command_passes(ssh):
    text = "x" * (remote.LONGEST_COMMAND_BYTES - 200)
    assert arguments_seen(THERE, [text]) == [text]


# Several nodes


def test_nodes_are_asked_at_once_and_answer_in_order():
    together = threading.Barrier(4, timeout=5)

    def answer(node):
        together.wait()
        time.sleep(0.05 * (4 - node.rank))
        return node.rank

    assert remote.on_all([Node(rank, "a") for rank in range(4)], answer) == [0, 1, 2, 3]
    assert remote.on_all([], answer) == []


def test_all_nodes_finish_before_the_first_exception_is_raised():
    finished = []

    def answer(node):
        if node.rank == 0:
            raise LauncherError("first")
        time.sleep(0.1)
        finished.append(node.rank)

    with pytest.raises(LauncherError, match="first"):
        remote.on_all([Node(rank, "a") for rank in range(3)], answer)
    assert sorted(finished) == [1, 2]


def test_interrupt_waits_for_what_has_begun():
    finished = []

    def answer(node):
        time.sleep(0.4)
        finished.append(node.rank)

    # Who was started in the background has Ctrl-C ignored; the launcher sets its own handler too.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            remote.on_all([Node(rank, "a") for rank in range(2)], answer)
    finally:
        signal.signal(signal.SIGINT, before)
    assert sorted(finished) == [0, 1]


# Files


@pytest.mark.parametrize("node", [HERE, THERE], ids=["here", "ssh"])
@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_file_arrives_with_its_mode(ssh, tmp_path, node, mode):
    path = tmp_path / "new folder" / "it's a file"
    remote.write_file(node, str(path), b"KEY=se\0cret\n", mode)
    assert path.read_bytes() == b"KEY=se\0cret\n"
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    remote.write_file(node, str(path), b"", mode)
    assert path.read_bytes() == b""
    assert os.listdir(path.parent) == ["it's a file"]


def test_secret_is_in_no_argument(ssh, tmp_path):
    remote.write_file(THERE, str(tmp_path / "f"), b"hunter2", 0o600)
    assert "hunter2" not in ssh.read_text()


def test_tilde_is_the_home_over_there(ssh, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    remote.write_file(THERE, "~/.exl3/environment", b"x", 0o600)
    assert (tmp_path / ".exl3/environment").read_bytes() == b"x"


def test_broken_connection_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_text("old")
    write_program(tmp_path, "ssh", '#!/bin/sh\nfor last; do :; done\nhead -c 3 | sh -c "$last"\n')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(LauncherError, match="only 3 of 9 bytes arrived") as raised:
        remote.write_file(THERE, str(path), b"new bytes", 0o600)
    assert raised.value.code == Exit.SETUP
    assert str(raised.value).startswith(f"node 1 (10.0.0.2): {path} could not be written")
    assert path.read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["file", "ssh"]


def test_folder_that_is_a_file_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LauncherError, match=r"could not be written \(mkdir"):
        remote.write_file(HERE, str(tmp_path / "file/below"), b"x", 0o600)


def test_nodes_come_from_the_settings():
    from cluster_settings import settings as made

    nodes = remote.nodes_of(made("tp2", SSH_USER="spark", SSH_PORT=2222))
    assert nodes == [Node(0, "10.10.0.1", "spark", 2222), Node(1, "10.10.0.2", "spark", 2222)]
    assert replace(nodes[1], user="").login == "10.10.0.2"


# Pipes


HERE = remote.Node(0, "10.0.0.1")


def pipe(source: str, target: str, moved=lambda count: True) -> remote.Result:
    return remote.pipe(["sh", "-c", source], HERE, ["sh", "-c", target], moved)


def test_pipe_moves_every_byte_and_tells_how_many():
    counts = []
    result = pipe("head -c 5000000 /dev/zero", "wc -c", lambda count: counts.append(count) or True)
    assert result.ok and int(result.stdout) == sum(counts) == 5_000_000


def test_pipe_gives_what_the_failing_side_said():
    assert pipe("echo half; echo no disk >&2; exit 3", "cat").message == "no disk"
    assert pipe("head -c 5000000 /dev/zero", "echo full >&2; exit 4").message == "full"
    late = pipe("echo x", "cat >/dev/null; echo bad; exit 5")
    assert (late.code, late.message) == (5, "bad")


def test_pipe_never_lets_half_of_it_pass_for_the_whole(tmp_path):
    """A failing source ends the other side before that sees the end of its input."""
    done = tmp_path / "done"
    assert not pipe("echo half; exit 1", f"cat >/dev/null; sleep 0.2; touch {done}").ok
    assert not pipe("sleep 0.1; echo x; sleep 9", f"cat >/dev/null; touch {done}", lambda count: False).ok
    assert not done.exists()
