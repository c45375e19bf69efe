"""The header pass: what is refused before a byte of weights is read, and what the headers say of memory."""

import json
import subprocess
import sys

import full_size
import pytest
from header_damage import DAMAGE, EXPERT, LOCAL, copy_local, drop, read, set_entry, shard_of, write

from launcher.errors import LauncherError
from launcher.settings import REPOSITORY
from launcher.weights import contents, record
from launcher.weights.contents import Share
from launcher.weights.record import FileEntry, FileStat, Manifest, Verified

GIB = 1 << 30


def test_the_local_model_passes():
    found = contents.read(LOCAL)
    assert found.rates == {4: 72} and found.codebooks == {"mcg": 72}
    assert found.layers == (1, 2, 3) and found.dense == 0
    everything = sum(path.stat().st_size for path in LOCAL.glob("*.safetensors"))
    assert 0 < everything - sum(found.bytes.values()) < 100_000  # the headers
    assert found.bytes_of_rank(1, expert_parallel=False, mtp=True, vision=True) == sum(found.bytes.values())


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_refused_by_tensor_or_file(tmp_path, name):
    damage, said = DAMAGE[name]
    folder = copy_local(tmp_path / "model")
    damage(folder)
    with pytest.raises(LauncherError, match=said) as caught:
        contents.read(folder)
    assert "\n" not in str(caught.value)


MORE = {  # that the plugin sees only when it loads, or never
    "a gap between tensors": (set_entry("model.norm.weight", data_offsets=[0, 256]), "belongs at"),
    "a shape that its bytes do not fill": (set_entry("model.norm.weight", shape=[64]), "belongs at"),
    "a type that is none": (set_entry("model.norm.weight", dtype="F17"), "no usable entry for model.norm.weight"),
    "a shape that is none": (set_entry("model.norm.weight", shape="x"), "no usable entry for model.norm.weight"),
    "an expert too few": (drop(f"{EXPERT}.trellis"), "is missing beside"),
}


@pytest.mark.parametrize("name", MORE)
def test_what_no_file_of_this_format_says_is_refused(tmp_path, name):
    damage, said = MORE[name]
    folder = copy_local(tmp_path / "model")
    damage(folder)
    with pytest.raises(LauncherError, match=said):
        contents.read(folder)


def test_a_layer_without_one_of_its_experts_is_refused(tmp_path):
    folder = copy_local(tmp_path / "model")
    for part in ("trellis", "suh", "svh", "mcg"):
        drop(f"{EXPERT}.{part}")(folder)
    with pytest.raises(LauncherError, match=r"layers.1.mlp.experts has 23 of 24 EXL3 matrices, 0.gate_proj"):
        contents.read(folder)


def test_experts_of_another_size_than_config_says_are_refused(tmp_path):
    folder = copy_local(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["moe_intermediate_size"] = 512
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(LauncherError, match=r"is 256 x 128, config.json wants 512 x 128|is 128 x 256, .*128 x 512"):
        contents.read(folder)


def test_whether_gate_and_up_share_suh_is_told(tmp_path):
    folder = copy_local(tmp_path / "model")
    found = contents.read(folder)
    assert (found.shared_suh, found.sampled) == (True, 6)  # three layers, first and last expert
    up = "model.layers.2.mlp.experts.7.up_proj.suh"
    shard = shard_of(folder, up)
    header, data = read(shard)
    start = header[up]["data_offsets"][0]
    write(shard, header, data[:start] + bytes([data[start] ^ 1]) + data[start + 1 :])
    assert contents.read(folder).shared_suh is False


@pytest.mark.parametrize("ranks, expert_parallel, share", [
    (2, False, 0.5), (4, False, 0.25), (3, False, 6 / 16), (3, True, 1 / 3),
])  # fmt: skip
def test_the_fullest_rank_counts(ranks, expert_parallel, share):
    assert Share("main", 16, 288).of_rank(ranks, expert_parallel=expert_parallel) == pytest.approx(share)
    assert Share("main", 1).of_rank(ranks, expert_parallel=expert_parallel) == 1


# The full size


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    folder = tmp_path_factory.mktemp("full") / "model"
    full_size.write(folder, ledger=True)
    return folder


MEASURE = """
import json, re, sys
from pathlib import Path
from launcher.weights import contents
found = contents.read(Path(sys.argv[1]))
args = [(2, False, False), (4, False, False), (3, True, False), (2, False, True)]
print(json.dumps({
    "text": found.describe(),
    "ranks": [found.bytes_of_rank(n, expert_parallel=ep, mtp=mtp, vision=True) for n, ep, mtp in args],
    "experts": sum(size / 2 if share.units > 1 else size for share, size in found.bytes.items()
                   if share.experts and share.part == "main"),
    "peak": int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10,
}))
"""


def test_the_full_size_is_read_in_little_memory_and_agrees_with_what_owners_report(full):
    command = [sys.executable, "-c", MEASURE, full]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["peak"] < 300_000_000
    assert "37152 EXL3 matrices at 4 bits (mcg), experts of layers 3-45" in found["text"]
    assert found["experts"] / GIB == pytest.approx(71.22, abs=0.005)
    two, four, three, with_mtp = (size / GIB for size in found["ranks"])
    # Reported with the draft model's part: 82.06 GiB on two nodes, about 55.75 on three.
    assert 79 < two < 82.06 and 52 < three < 55.75 and four < two * 0.52
    assert 1.7 < with_mtp - two < 2.2


def test_what_was_found_is_kept_for_the_next_start(tmp_path, monkeypatch):
    folder = copy_local(tmp_path / "model")
    found = contents.read(folder)
    names = [path.name for path in sorted(folder.iterdir()) if not path.name.startswith(".")]
    files = tuple(FileEntry(name, (folder / name).stat().st_size, "a" * 64) for name in names)
    verified = Verified(Manifest("x/y", "r", files), {name: FileStat.of(folder / name) for name in names})
    record.write(folder, verified)
    contents.keep(folder, found, verified)
    with monkeypatch.context() as patch:
        patch.setattr(contents, "read", None)  # the headers are not read again
        assert contents.of(folder) == found
    (folder / "config.json").touch()
    with pytest.raises(TypeError), monkeypatch.context() as patch:
        patch.setattr(contents, "read", None)
        contents.of(folder)  # but they are when a file has changed
