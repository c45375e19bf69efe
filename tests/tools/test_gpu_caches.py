"""What a GPU machine compiled comes back as it was, in pieces."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu" / "engine"))

import arm
from torch._inductor.runtime.cache_dir_utils import cache_dir

from tools.gpu import caches


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The home folder, in an environment that a test may change."""
    monkeypatch.setattr(os, "environ", {"HOME": str(tmp_path / "home")})
    return tmp_path / "home"


def test_what_an_engine_compiles_with_torch_is_kept(home, tmp_path):
    arm.settle_environment()
    kernel = Path(cache_dir()) / "ab" / "kernel.py"
    kernel.parent.mkdir(parents=True)
    kernel.write_text("compiled")
    caches.save(home, tmp_path / "pieces")
    caches.load(tmp_path / "other", tmp_path / "pieces")
    assert (tmp_path / "other" / kernel.relative_to(home)).read_text() == "compiled"


def test_a_cache_that_the_caller_named_stays(home):
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = "/cache/inductor"
    arm.settle_environment()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/cache/inductor"
    assert arm.ENVIRONMENT.items() <= os.environ.items()


def test_pieces_give_the_same_files(tmp_path, monkeypatch):
    monkeypatch.setattr(caches, "PIECE_BYTES", 100)
    home, other = tmp_path / "home", tmp_path / "other"
    wanted = {".triton/a/k.cubin": bytes(range(256)) * 9, ".cache/vllm/x.json": b"{}"}
    for name, content in wanted.items():
        (home / name).parent.mkdir(parents=True)
        (home / name).write_bytes(content)
    (home / "private").write_bytes(b"stays")
    assert len(caches.save(home, tmp_path / "pieces")) > 1
    other.mkdir()
    caches.load(other, tmp_path / "pieces")
    found = {str(path.relative_to(other)): path.read_bytes() for path in other.rglob("*") if path.is_file()}
    assert found == wanted


def test_nothing_to_save_or_load_is_said(tmp_path):
    with pytest.raises(FileNotFoundError, match="run the engine first"):
        caches.save(tmp_path, tmp_path / "pieces")
    with pytest.raises(FileNotFoundError, match="make it with `save`"):
        caches.load(tmp_path, tmp_path)


@pytest.mark.parametrize("lost", ["piece", "byte"])
def test_what_was_lost_is_noticed_before_anything_is_unpacked(tmp_path, monkeypatch, lost):
    monkeypatch.setattr(caches, "PIECE_BYTES", 100)
    (tmp_path / ".triton").mkdir()
    (tmp_path / ".triton/k").write_bytes(bytes(range(256)) * 40)
    *_, whole, last = caches.save(tmp_path, tmp_path / "pieces")
    if lost == "piece":
        whole.unlink()
    else:
        last.write_bytes(last.read_bytes()[:-1])
    with pytest.raises(caches.lzma.LZMAError):
        caches.load(tmp_path / "new", tmp_path / "pieces")
    assert not (tmp_path / "new").exists()
