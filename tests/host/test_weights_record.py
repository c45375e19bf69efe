"""The record of what was verified: what it keeps, what it notices, and what it refuses to read."""

import json
import os
from dataclasses import replace

import pytest

from launcher.errors import LauncherError
from launcher.weights import record
from launcher.weights.record import FileEntry, FileStat, Manifest, Verified

DIGEST = "ab" * 32


@pytest.fixture
def folder(tmp_path):
    for name in ("one", "two", "sub/three"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


def verified(folder) -> Verified:
    names = ("one", "two", "sub/three")
    manifest = Manifest("owner/pack", "f" * 40, tuple(FileEntry(name, len(name), DIGEST) for name in names))
    return Verified(manifest, {name: FileStat.of(folder / name) for name in names})


def test_what_is_written_is_read_back(folder):
    assert record.read(folder) is None
    record.write(folder, verified(folder))
    assert record.read(folder) == verified(folder)
    assert record.changed(folder, record.read(folder)) == []
    assert sorted(path.name for path in folder.iterdir()) == [record.NAME, "one", "sub", "two"]
    record.remove(folder)
    record.remove(folder)
    assert record.read(folder) is None


def test_each_kind_of_change_is_named(folder):
    known = verified(folder)
    os.utime(folder / "one", ns=(1, 1))
    other = folder / "other"
    other.write_text("two")
    os.utime(other, ns=(known.stats["two"].mtime_ns,) * 2)
    other.replace(folder / "two")  # only the inode tells
    (folder / "sub/three").unlink()
    (folder / "sub/three").symlink_to("three")
    assert record.changed(folder, known) == ["one", "sub/three", "two"]


def test_a_link_to_the_same_file_is_the_same_file(folder):
    known = verified(folder)
    (folder / "one").rename(folder / "blob")
    (folder / "one").symlink_to("blob")
    assert record.changed(folder, known) == []


def change(**fields):
    return lambda raw: raw | fields


@pytest.mark.parametrize("name", ["../one", "/etc/passwd", "a//b", "", ".", "a\nb", 3])
def test_a_name_that_leaves_the_folder_is_refused(folder, name):
    raw = verified(folder).to_json()
    raw["manifest"]["files"] = [{"name": name, "bytes": 3, "sha256": DIGEST}]
    (folder / record.NAME).write_text(json.dumps(raw))
    with pytest.raises(LauncherError, match="no name of a file below the folder"):
        record.read(folder)


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: [],
        lambda raw: raw | {"format": 99},
        lambda raw: raw | {"stats": {}},
        lambda raw: raw | {"stats": {"one": {"bytes": 1}}},
        lambda raw: {key: value for key, value in raw.items() if key != "manifest"},
        lambda raw: raw | {"manifest": {"pack": "p", "revision": "r", "files": [{"name": "one", "bytes": 3,
                                                                                 "sha256": "AB"}]}},
        lambda raw: raw | {"manifest": raw["manifest"] | {"files": raw["manifest"]["files"] * 2}},
    ],
)  # fmt: skip
def test_a_damaged_record_is_named(folder, damage):
    (folder / record.NAME).write_text(json.dumps(damage(verified(folder).to_json())))
    with pytest.raises(LauncherError, match=rf"{folder}/{record.NAME}: not readable .* `./download.sh verify`"):
        record.read(folder)


def test_half_a_record_is_named(folder):
    (folder / record.NAME).write_bytes(verified(folder).to_bytes()[:300])
    with pytest.raises(LauncherError, match="JSONDecodeError"):
        record.read(folder)


def test_a_record_that_cannot_be_written_leaves_the_old_one(folder):
    record.write(folder, verified(folder))
    (folder / f"{record.NAME}.{os.getpid()}.partial").mkdir()
    with pytest.raises(LauncherError, match="could not be written"):
        record.write(folder, replace(verified(folder), stats={}))
    assert record.read(folder) == verified(folder)
