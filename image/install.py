"""Installs the wheels of the build stage without touching what the base has, and writes down what the image is.

python3 image/install.py BASE OUT     BASE as image/base.py took it, OUT as image/wheels.py filled it

Reads the Dockerfile's arguments BASE, BASE_DIGEST, CUDA_ARCHS and EXLLAMAV3. Standard library only.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "launcher"), str(ROOT / "image")]

import base  # noqa: E402
import recipe  # noqa: E402

RECORD = Path("/usr/local/share/exl3/image.json")  # read by vllm_exl3.selfcheck
FABRIC_BIND = Path("/usr/local/lib/exl3")  # read by launcher/fabric_bind.py


def install(wheels: list[Path], packages: dict[str, str]) -> None:
    """The constraints keep pip from replacing a package of the base, also one that nobody thought of."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write(base.constraints(packages))
        constraints.flush()
        done = subprocess.run(
            [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-cache-dir", "--no-index",
             "--no-deps", "--root-user-action", "ignore", "--constraint", constraints.name, *map(str, wheels)],
            env={**os.environ, "PIP_BREAK_SYSTEM_PACKAGES": "1"},
        )  # fmt: skip
    if done.returncode:
        sys.exit("install: pip refused a wheel, see above; nothing of the base may be replaced")


def record(before: dict, wheels: list[Path]) -> dict:
    name, digest = os.environ.get("BASE", ""), os.environ.get("BASE_DIGEST", "")
    return {
        "recipe": recipe.digest(ROOT),
        "base": name,
        "base_digest": digest or name.partition("@")[2] or "not given",
        "base_packages": {one: before["packages"][one] for one in before["guarded"]},
        "architectures": os.environ.get("CUDA_ARCHS", ""),
        "exllamav3": "skipped" if os.environ.get("EXLLAMAV3") == "skip" else os.environ.get("EXLLAMAV3", ""),
        "wheels": {path.name: base.hash_of(path) for path in wheels},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    before, wheels = json.loads(args.base.read_text()), sorted((args.out / "wheels").glob("*.whl"))
    install(wheels, before["packages"])
    if wrong := base.compare(before):
        sys.exit("\n".join(wrong[:20]))
    FABRIC_BIND.mkdir(parents=True, exist_ok=True)
    for source in (args.out / "fabric_bind.so", ROOT / "launcher/fabric_bind.c"):
        shutil.copy(source, FABRIC_BIND)
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    written = record(before, wheels)
    RECORD.write_text(json.dumps(written, indent=1) + "\n")
    print(f"base: {written['base']}, digest {written['base_digest']}; its packages are unchanged")


if __name__ == "__main__":
    main()
