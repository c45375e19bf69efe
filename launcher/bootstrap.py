"""First step of the start scripts: makes the launcher's own small environment once, then goes on inside it.

Runs as a plain file under whatever python3 the machine has, so it uses the standard library only.
"""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from launcher import pip_output  # noqa: E402 - found in the checkout, not beside this file

FOLDER = ROOT / ".venv-launcher"
LOCK = ROOT / "requirements" / "launcher.txt"
LOG = ROOT / ".run" / "bootstrap.log"
OLDEST = (3, 10)
REFUSED, SETUP = 3, 4  # as launcher.errors.Exit has them

# -I: neither the user's folder nor its PYTHON* variables take part; then our own root comes first.
START = "import runpy, sys; sys.path.insert(0, sys.argv.pop(1)); runpy.run_module('launcher', run_name='__main__')"


def wanted_stamp():
    return {
        "folder": str(FOLDER),
        "python": os.path.realpath(sys.executable),
        "version": list(sys.version_info[:3]),
        "lock": hashlib.sha256(LOCK.read_bytes()).hexdigest(),
    }


def is_complete(stamp):
    try:
        return json.loads((FOLDER / "complete.json").read_text()) == stamp
    except (OSError, ValueError):
        return False


def wheels_of(arguments):
    """pip's flags for the packages of a bundle (./download.sh --from DIR), which stands in for the package index."""
    for i, word in enumerate(arguments):
        bundle = word[len("--from=") :] if word.startswith("--from=") else ""
        if word == "--from" and i + 1 < len(arguments):
            bundle = arguments[i + 1]
        wheels = Path(bundle, "wheels")
        if bundle and wheels.is_dir():
            return ["--no-index", "--find-links", str(wheels.resolve())]
    return []


def make(stamp, source):
    """The stamp is written last: what was broken off is made anew."""
    print("Setting up the launcher's own Python packages (once, a few seconds) ...", file=sys.stderr, flush=True)
    must([sys.executable, "-m", "venv", "--clear", str(FOLDER)])
    pip = [str(FOLDER / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    must([*pip, "install", "--no-deps", "--require-hashes", "--only-binary", ":all:", *source, "-r", str(LOCK)])
    (FOLDER / "complete.json").write_text(json.dumps(stamp) + "\n")


def must(command):
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        LOG.parent.mkdir(parents=True, exist_ok=True)
        LOG.write_bytes(done.stdout)
        reason = pip_output.reason(done.stdout.decode(errors="replace"))
        refuse(
            f"launcher: its Python environment {FOLDER} could not be made: {reason}. Without a network, "
            f"./download.sh --from DIR makes it from a bundle. What was said is in {LOG}.", SETUP,
        )  # fmt: skip


def refuse(text, code):
    print(text, file=sys.stderr)
    if "--json" in sys.argv and sys.version_info >= OLDEST:
        from launcher import errors, reports

        reports.tell_error(text, errors.Exit(code), sys.argv)
    sys.exit(code)


def main(arguments):
    if sys.version_info < OLDEST:
        found = ".".join(map(str, sys.version_info[:3]))
        refuse(f"python3 is {found} here, the launcher needs 3.10 or newer; install one.", REFUSED)
    if asks_about_us(arguments[2:]):
        # -S: packages that happen to be on this machine are not those of the lock.
        go_on(sys.executable, ["-I", "-S"], arguments)
    stamp = wanted_stamp()
    if not is_complete(stamp):
        make(stamp, wheels_of(arguments))
    go_on(str(FOLDER / "bin" / "python"), ["-I"], arguments)


def asks_about_us(words):
    """Help, version and completion are printed without any package, also before the first set-up."""
    return bool({"-h", "--help"} & set(words)) or words[:1] in (["--version"], ["completion"], ["help"])


def go_on(python, flags, arguments):
    os.execv(python, [python, *flags, "-c", START, str(ROOT), "cluster", *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
