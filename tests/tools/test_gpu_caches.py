"""What a GPU machine compiled comes back as it was, in pieces."""

import pytest

from tools.gpu import caches


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


def test_a_lost_piece_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(caches, "PIECE_BYTES", 100)
    (tmp_path / ".triton").mkdir()
    (tmp_path / ".triton/k").write_bytes(bytes(range(256)) * 40)
    caches.save(tmp_path, tmp_path / "pieces")[-1].unlink()
    with pytest.raises((EOFError, caches.tarfile.TarError, caches.lzma.LZMAError)):
        caches.load(tmp_path / "new", tmp_path / "pieces")
