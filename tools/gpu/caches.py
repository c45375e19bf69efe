#!/usr/bin/env python3
"""Keeps what a GPU machine without a network compiles at first use, so that the next such machine need not.

    python3 tools/gpu/caches.py save DIR     # writes DIR/caches.tar.xz.00, .01, ...
    python3 tools/gpu/caches.py load DIR     # unpacks them into the home folder

TileLang, Triton, torch.compile, vLLM, FlashInfer and the driver key these files by GPU, compiler and source: a wrong
one is not used.
"""

import argparse
import io
import lzma
import sys
import tarfile
from pathlib import Path

# DeepGEMM's kernels lie in vLLM's folder, what NVIDIA's driver compiles in .nv.
FOLDERS = (
    ".tilelang", ".triton", ".cache/tilelang", ".cache/vllm", ".cache/flashinfer", ".cache/inductor",
    ".nv/ComputeCache",
)  # fmt: skip
PIECE_BYTES = 15 * 2**20
NAME = "caches.tar.xz"


def save(home: Path, target: Path) -> list[Path]:
    """The pieces written. Raises FileNotFoundError where nothing was compiled."""
    found = [folder for folder in FOLDERS if (home / folder).is_dir()]
    if not found:
        raise FileNotFoundError(f"{home}: has none of {', '.join(FOLDERS)}; run the engine first")
    packed = io.BytesIO()
    with lzma.open(packed, "wb", preset=1) as stream, tarfile.open(fileobj=stream, mode="w|") as tar:
        for folder in found:
            tar.add(home / folder, arcname=folder)
    target.mkdir(parents=True, exist_ok=True)
    for old in target.glob(f"{NAME}.*"):
        old.unlink()
    data, pieces = packed.getvalue(), []
    for start in range(0, len(data), PIECE_BYTES):
        pieces.append(target / f"{NAME}.{len(pieces):02d}")
        pieces[-1].write_bytes(data[start : start + PIECE_BYTES])
    return pieces


def load(home: Path, source: Path) -> None:
    """Raises FileNotFoundError where there is nothing, and LZMAError, with nothing unpacked, where bytes are lost."""
    pieces = sorted(source.glob(f"{NAME}.*"))
    if not pieces:
        raise FileNotFoundError(f"{source}: has no {NAME}.00; make it with `save`")
    # All of it before the first file: tar stops ahead of the end of the stream, and would not miss that.
    unpacked = io.BytesIO(lzma.decompress(b"".join(piece.read_bytes() for piece in pieces)))
    with tarfile.open(fileobj=unpacked) as tar:
        # Pythons before 3.11.4 have no filters; what `save` packed is trusted there.
        tar.extractall(home, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("save", "load"))
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    try:
        if arguments.what == "load":
            load(Path.home(), arguments.folder)
        else:
            for piece in save(Path.home(), arguments.folder):
                print(f"{piece}: {piece.stat().st_size:,} bytes")
    except (OSError, lzma.LZMAError, tarfile.TarError) as error:
        sys.exit(f"{arguments.what}: {error}")


if __name__ == "__main__":
    main()
