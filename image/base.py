"""What the base image holds: taken down before anything is installed, and compared with what is there afterwards.

python3 image/base.py take FILE       refuses a base that the plugin is not made for
python3 image/base.py compare FILE    refuses any change of the base's packages

FILE is JSON: {"packages": {name: version}, "guarded": {name: {path: sha256}}, "complaints": [lines of pip check]}.
Standard library only.
"""

import argparse
import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# No byte of these may change, and no file be added; flashinfer's kernels come in packages of their own.
GUARDED = re.compile(r"torch|vllm|transformers|flashinfer(-.*)?")
# Package -> the variable that holds its version, and why no other one will do.
NEEDED = {
    "vllm": ("VLLM", "the plugin's overrides are made for that source"),
    "flashinfer-python": ("FLASHINFER", "others hang in sparse attention or mix up its rows"),
    "torch": ("", "vLLM brings it"),
    "transformers": ("", "vLLM brings it"),
    "pip": ("", "it installs what is added"),
}
OURS = ("ray", "vllm-exl3", "exllamav3-ext")  # the image brings its own, whatever the base has


class BaseError(RuntimeError):
    """The base cannot be used, or was changed; the message says what and where."""


def take() -> dict:
    """Raises BaseError where a package is missing or another one."""
    installed = distributions()
    check_needed({name: one.version for name, one in installed.items()})
    return {
        "packages": {name: one.version for name, one in sorted(installed.items())},
        "guarded": {name: hashes(name, one) for name, one in sorted(installed.items()) if GUARDED.fullmatch(name)},
        "complaints": complaints(),
    }


def compare(before: dict) -> list[str]:
    """What is different now, a sentence each."""
    installed = distributions()
    packages = {name: one.version for name, one in installed.items()}
    wrong = [
        f"{name}: was {version} in the base and is {packages.get(name, 'gone')} after the installation"
        for name, version in before["packages"].items()
        if name not in OURS and packages.get(name) != version
    ]
    for name, old in before["guarded"].items():
        new = hashes(name, installed[name]) if name in installed else {}
        wrong += [f"{name}: {path} of the base was {word}" for path, word in sorted(changes(old, new).items())]
    wrong += [f"pip check: {line}" for line in complaints() if line not in before["complaints"]]
    return wrong


def changes(old: dict[str, str], new: dict[str, str]) -> dict[str, str]:
    words = {path: "removed" if path not in new else "changed" for path in old if new.get(path) != old[path]}
    return words | {path: "added" for path in new if path not in old}


def check_needed(packages: dict[str, str]) -> None:
    for name, (variable, reason) in NEEDED.items():
        found, wanted = packages.get(name), os.environ.get(variable, "")
        if found is None or (wanted and found.partition("+")[0] != wanted):
            raise BaseError(
                f"base image: {name} is {found or 'missing'}, needed is {wanted or 'any release'}: {reason}. Build on "
                f"vllm/vllm-openai:v{os.environ.get('VLLM', '')} (--build-arg BASE=...)"
            )


# What is installed


def distributions() -> dict[str, importlib.metadata.Distribution]:
    """By normalised name; of two the first on the path, which is the one that is imported."""
    found: dict[str, importlib.metadata.Distribution] = {}
    for one in importlib.metadata.distributions():
        found.setdefault(normalised(one.metadata["Name"] or ""), one)
    found.pop("", None)
    return found


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def hashes(name: str, distribution: importlib.metadata.Distribution) -> dict[str, str]:
    """Path -> sha256 of every file that RECORD names, and of every other one in the same top folders."""
    if not distribution.files:
        raise BaseError(f"base image: {name} has no RECORD, so that a change of its files could not be seen")
    root = Path(str(distribution.locate_file("")))
    paths = {root / file for file in distribution.files}
    for top in {file.parts[0] for file in distribution.files if len(file.parts) > 1 and file.parts[0] != ".."}:
        paths.update((root / top).rglob("*"))
    wanted = sorted(path for path in paths if path.is_file() and path.suffix != ".pyc")
    with ThreadPoolExecutor() as pool:
        return dict(zip((os.path.relpath(path, root) for path in wanted), pool.map(hash_of, wanted), strict=True))


def hash_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def complaints() -> list[str]:
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True)
    lines = (done.stdout + done.stderr).splitlines() if done.returncode else []
    return sorted(line for line in lines if line.strip() and not line.startswith("WARNING"))


def constraints(packages: dict[str, str]) -> str:
    """For pip: what the base has stays as it is."""
    return "".join(f"{name}=={version}\n" for name, version in packages.items() if name not in OURS)


# The command


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("take", "compare"))
    parser.add_argument("file", type=Path)
    args = parser.parse_args()
    try:
        if args.what == "take":
            tell(found := take())
            args.file.parent.mkdir(parents=True, exist_ok=True)
            args.file.write_text(json.dumps(found, indent=1))
        elif wrong := compare(json.loads(args.file.read_text())):
            raise BaseError("\n".join([*wrong[:20], *([f"... and {len(wrong) - 20} more"] if wrong[20:] else [])]))
    except BaseError as error:
        sys.exit(str(error))


def tell(found: dict) -> None:
    counts = ", ".join(f"{name} {found['packages'][name]} ({len(files)} files)"
                       for name, files in found["guarded"].items())  # fmt: skip
    print(f"base image: {len(found['packages'])} packages; guarded: {counts}")
    for line in found["complaints"]:
        print(f"base image: pip check already says: {line}")


if __name__ == "__main__":
    main()
