"""The digest of everything in a checkout that goes into the image, for its label; also run inside the build.

python3 launcher/recipe.py [--expect DIGEST]        standard library only
"""

import argparse
import fnmatch
import hashlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# What the build may see; .dockerignore lets in the same, and a build compares (image/base.py).
PARTS = (
    "Dockerfile", ".dockerignore", "LICENSE", "image", "overlay", "requirements/image.txt",
    "requirements/image-build.txt", "launcher/recipe.py", "launcher/fabric_bind.c", "tools/gpu/exllamav3_ext",
)  # fmt: skip
# Made by builds, or brought along for one (image/wheels): wheels have names and hashes of their own.
NO_PART = ("*/__pycache__/*", "*.egg-info/*", "overlay/build/*", "overlay/vllm_exl3/_kernels.*", "image/wheels/*")


def files(root: Path = ROOT, parts: tuple[str, ...] = PARTS) -> list[str]:
    """Paths below root, in order."""
    found = []
    for part in parts:
        place = root / part
        found += [place] if place.is_file() else [path for path in place.rglob("*") if path.is_file()]
    names = (path.relative_to(root).as_posix() for path in found)
    return sorted(name for name in names if not any(fnmatch.fnmatch(name, pattern) for pattern in NO_PART))


def digest(root: Path = ROOT, parts: tuple[str, ...] = PARTS) -> str:
    """sha256 over names and contents."""
    total = hashlib.sha256()
    for name in files(root, parts):
        content = hashlib.sha256((root / name).read_bytes()).hexdigest()
        total.update(f"{content}  {name}\n".encode())
    return total.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--expect", default="")
    expected, found = parser.parse_args().expect, digest()
    print(f"recipe: {found}")
    if expected not in ("", found):
        sys.exit(f"recipe: the build was asked for {expected} and its files are {found}; something was changed while "
                 f"it began, or .dockerignore and launcher/recipe.py name different files. Build again.")  # fmt: skip


if __name__ == "__main__":
    main()
