"""Sharing the weights over NFS: what root is told to do, and what becomes of it. A stand-in mounts."""

import os
import subprocess

import pytest
from loopback import fill, settings

from launcher import cluster
from launcher.errors import Exit, LauncherError
from launcher.remote import Node
from launcher.weights import record, share
from launcher.weights.share import Place
from launcher.weights.sync import Source

HEAD, ONE, TWO = (Node(rank, f"10.0.0.{rank + 1}") for rank in range(3))


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setattr(share, "EXPORTS", tmp_path / "exports.d")
    verified = fill(tmp_path / "a model", shards=1, size=1000)
    return Source("MODEL_DIR", tmp_path / "a model", verified.manifest)


def place(node: Node, source: Source, **changes) -> Place:
    usual = {"folder": "/home/spark/a model", "mounted": "", "entries": 0, "has_nfs": True, "user_id": 1000}
    return Place(node, source, **(usual | changes))


def test_the_folder_goes_to_the_fabric_addresses_read_only_and_root_is_nobody(source):
    found = share.commands(HEAD, [place(ONE, source), place(TWO, source, has_nfs=False)], "tp3", True)
    owner = source.folder.stat()
    options = f"(ro,all_squash,anonuid={owner.st_uid},anongid={owner.st_gid},no_subtree_check)"
    assert found[1].stdin == f'"{source.folder}" 10.0.0.2{options} 10.0.0.3{options}\n'
    assert [(command.node.rank, command.argv[:3]) for command in found] == [
        (0, ("mkdir", "-p", str(share.EXPORTS))),
        (0, ("tee", str(share.EXPORTS / "glm53-exl3-tp3.exports"))),
        (0, ("exportfs", "-ra")),
        (1, ("mkdir", "-p", "/home/spark/a model")),
        (1, ("mount", "-t", "nfs")),
        (2, ("apt-get", "install", "--yes")),
        (2, ("mkdir", "-p", "/home/spark/a model")),
        (2, ("mount", "-t", "nfs")),
    ]
    assert str(found[4]) == (
        f"sudo mount -t nfs -o {share.MOUNT_OPTIONS} '10.0.0.1:{source.folder}' '/home/spark/a model'"
    )  # fmt: skip
    assert share.MOUNT_OPTIONS.startswith("ro,")


def test_a_head_without_a_server_gets_one_first(source):
    first = share.commands(HEAD, [place(ONE, source)], "tp2", False)[0]
    assert str(first) == "sudo apt-get install --yes nfs-kernel-server"


def test_what_a_mount_would_hide_is_refused(source):
    with pytest.raises(LauncherError, match=r"node 1 \(10.0.0.2\): /home/spark/a model holds 121 files that a mount"):
        share.commands(HEAD, [place(ONE, source, entries=121)], "tp2", True)
    with pytest.raises(LauncherError, match="is a mount of nas:/models already"):
        share.commands(HEAD, [place(ONE, source, mounted="nas:/models")], "tp2", True)


def test_what_is_shared_already_needs_nothing_and_only_that_is_taken_back(source):
    mine = place(ONE, source, mounted=f"10.0.0.1:{source.folder}", entries=121)
    other = place(TWO, source, mounted="nas:/models")
    assert share.commands(HEAD, [mine], "tp2", True) == []
    assert [str(command) for command in share.undo(HEAD, [mine, other], "tp2")] == ["sudo umount '/home/spark/a model'"]
    share.EXPORTS.mkdir()
    share.exports_file("tp2").touch()
    assert [command.argv[0] for command in share.undo(HEAD, [mine], "tp2")] == ["umount", "rm", "exportfs"]


# With a node


MOUNT = """#!/bin/sh
for target; do source=$last last=$target; done
echo "$0 $*" >> {calls}
exec /bin/mount --bind "${{source#*:}}" "$target"
"""
BOOK = '#!/bin/sh\necho "$0 $*" >> {calls}\n'


@pytest.fixture
def stand_ins(pair, tmp_path, monkeypatch, need):
    """Programs of NFS that keep books; to mount is to bind, which this machine can do for itself."""
    need("root", "namespaces", "mount")
    calls = tmp_path / "calls"
    calls.touch()
    programs = {pair.folder / "bin/exportfs": BOOK, pair.folder / "worker-bin/mount": MOUNT,
                pair.folder / "worker-bin/mount.nfs": BOOK}  # fmt: skip
    for path, text in programs.items():
        path.write_text(text.format(calls=calls))
        path.chmod(0o755)
    monkeypatch.setattr(share, "EXPORTS", tmp_path / "exports.d")
    yield calls
    for path in programs:
        path.unlink()
    subprocess.run(["umount", "--lazy", str(pair.worker / "model")], stderr=subprocess.DEVNULL, check=False)


def command(pair, *words: str) -> Exit:
    return cluster.main(["start.sh", "tp2", *words], pair.settings)


def test_share_alone_prints_and_changes_nothing(pair, stand_ins, capsys):
    fill(pair.head / "model")
    assert command(pair, "share") == Exit.OK
    said = capsys.readouterr().out
    assert said.startswith("Nothing was changed. Root has to do this, in this order:\n\n  on node 0 (10.0.0.1)\n")
    assert f"sudo mount -t nfs -o {share.MOUNT_OPTIONS} 10.0.0.1:{pair.head}/model {pair.worker}/model\n" in said
    assert "`./start.sh share --yes` does exactly this" in said and "The way back: `./start.sh share --undo`" in said
    assert not stand_ins.read_text() and not share.EXPORTS.exists() and not (pair.worker / "model").exists()


def test_share_yes_mounts_verifies_and_is_taken_back(pair, stand_ins, capsys):
    fill(pair.head / "model")
    assert command(pair, "share", "--yes") == Exit.OK
    assert share.exports_file("tp2").read_text().startswith(f'"{pair.head}/model" 10.0.0.2(ro,all_squash,')
    assert "exportfs -ra" in stand_ins.read_text()
    assert record.read(pair.worker / "model") == record.read(pair.head / "model")
    assert "is 10.0.0.1:" in capsys.readouterr().out
    # What is shared is not copied, and stays what it is.
    assert command(pair, "sync") == Exit.OK
    assert "was there and verified already" in capsys.readouterr().out


def test_a_mount_of_something_else_is_no_success(pair, stand_ins, tmp_path):
    fill(pair.head / "model")
    other = tmp_path / "other"
    fill(other)
    script = pair.folder / "worker-bin/mount"
    script.write_text(f'#!/bin/sh\nfor target; do :; done\nexec /bin/mount --bind {other} "$target"\n')
    with pytest.raises(LauncherError, match=r"model-00001-of-00004.safetensors is not the file of node 0"):
        command(pair, "share", "--yes")


def test_a_command_that_fails_is_named(pair, stand_ins):
    fill(pair.head / "model")
    (pair.folder / "worker-bin/mount").write_text("#!/bin/sh\necho access denied by server >&2\nexit 32\n")
    with pytest.raises(LauncherError, match=r"node 1 .*`sudo mount -t nfs .*` failed \(access denied by server\)"):
        command(pair, "share", "--yes")


def test_undo_asks_for_nothing_where_nothing_is_shared(pair, stand_ins, capsys):
    fill(pair.head / "model")
    assert command(pair, "share", "--undo") == Exit.OK
    assert "Nothing was shared." in capsys.readouterr().out
    assert settings(pair)["MODEL_DIR"] == "~/model"


def test_undo_ends_the_mount_and_the_export(pair, stand_ins, capsys):
    """The kernel's table tells whose mount it is; here, of a disk with that name."""
    folder = pair.worker / "model"
    fill(pair.head / "model")
    folder.mkdir()
    share.EXPORTS.mkdir()
    share.exports_file("tp2").touch()
    subprocess.run(["/bin/mount", "-t", "tmpfs", f"10.0.0.1:{pair.head}/model", str(folder)], check=True)
    assert command(pair, "share", "--undo") == Exit.OK
    said = capsys.readouterr().out
    assert f"sudo umount {folder}\n" in said and "`./start.sh share --undo --yes` does exactly this" in said
    assert os.path.ismount(folder)
    assert command(pair, "share", "--undo", "--yes") == Exit.OK
    assert not os.path.ismount(folder) and not share.exports_file("tp2").exists()
    assert "Nothing is shared any more." in capsys.readouterr().out
