"""First step of the start scripts: finds or makes the launcher's own small environment, then goes on inside it.

Runs as a plain file under whatever python3 the machine has, so it uses the standard library only, Python 3.8. An
environment stays in use as long as its own interpreter works and the lock is the one it was made from, whichever
python3 comes first on the PATH.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # not the folder of this file

from launcher import pip_output, venvs  # noqa: E402

STORE = ROOT / ".venvs"
KIND = "launcher"
ELSEWHERE = ROOT / ".venv-launcher"  # where an older checkout made its only one
LOCK = ROOT / "requirements" / "launcher.txt"
LOG = ROOT / ".run" / "bootstrap.log"
OLDEST = (3, 10)
REFUSED, SETUP, INTERRUPTED = 3, 4, 130  # as launcher.errors.Exit has them

# As launcher.cluster.OF_WHAT_RUNS has them. They wait for no package: what runs must be stoppable at any time.
WITHOUT_PACKAGES = ("stop", "status", "logs", "cache")

# -I: neither the user's folder nor its PYTHON* variables take part; then our own root comes first.
START = "import runpy, sys; sys.path.insert(0, sys.argv.pop(1)); runpy.run_module('launcher', run_name='__main__')"
VERSION = "import sys; print(sys.version_info[:2])"


# Finding


def existing():
    return [folder for folder in (*venvs.folders(STORE, KIND), ELSEWHERE) if folder.is_dir()]


def usable():
    """(an environment, "") or (None, why there is none)."""
    why = "none has been made yet"
    for folder in existing():
        why = problem_of(folder)
        if not why:
            return folder, ""
    return None, why


def problem_of(folder):
    """Empty where the environment can be used."""
    stamp = venvs.read_stamp(folder)
    if not isinstance(stamp, dict) or not {"folder", "python", "version", "lock"} <= set(stamp):
        return "making it was broken off"
    if stamp["folder"] != str(folder):
        return "the checkout was moved"
    if stamp["lock"] != hash_of_lock():
        return f"requirements/{LOCK.name} has changed since it was made"
    if not runs(folder, stamp):
        return "its Python {} is gone, or is another one now".format(stamp["python"])
    return ""


def runs(folder, stamp):
    """Whether its interpreter is there and still of the version that its packages were made for."""
    wanted = tuple(stamp["version"][:2])
    if os.path.realpath(str(python_of(folder))) == os.path.realpath(sys.executable):
        return sys.version_info[:2] == wanted
    try:
        done = subprocess.run(
            [str(python_of(folder)), "-I", "-S", "-c", VERSION], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
    except OSError:
        return False
    return done.returncode == 0 and done.stdout.decode().strip() == str(wanted)


def python_of(folder):
    return folder / "bin" / "python"


def hash_of_lock():
    return hashlib.sha256(LOCK.read_bytes()).hexdigest()


# Making


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


def make(source):
    """An environment beside those that are there, or the one that another start has made meanwhile."""
    with venvs.locked(STORE / (KIND + ".lock"), waiting=lambda: say("waits for another start, which sets it up ...")):
        folder, _ = usable()
        if folder is None:
            venvs.tidy(other for other in existing() if venvs.read_stamp(other) is None)
            folder = build(venvs.new_folder(STORE, KIND), source)
    return folder


def build(folder, source):
    say("Setting up the launcher's own Python packages (once, a few seconds) ...")
    try:
        must([sys.executable, "-m", "venv", str(folder)])
        pip = [str(python_of(folder)), "-m", "pip", "--disable-pip-version-check", "--quiet"]
        must([*pip, "install", "--no-deps", "--require-hashes", "--only-binary", ":all:", *source, "-r", str(LOCK)])
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    python, version = os.path.realpath(str(python_of(folder))), list(sys.version_info[:3])
    venvs.write_stamp(folder, {"folder": str(folder), "python": python, "version": version, "lock": hash_of_lock()})
    return folder


def must(command):
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        LOG.parent.mkdir(parents=True, exist_ok=True)
        LOG.write_bytes(done.stdout)
        reason = pip_output.reason(done.stdout.decode(errors="replace"))
        refuse(
            f"launcher: its Python environment in {STORE} could not be made: {reason}. Without a network, "
            f"./download.sh --from DIR makes it from a bundle. What was said is in {LOG}.", SETUP,
        )  # fmt: skip


def tidy(used):
    """Removes what nobody uses. Where another start is making one, or the checkout is not ours, it waits its turn."""
    others = [folder for folder in existing() if folder != used]
    if others:
        try:
            with venvs.locked(STORE / (KIND + ".lock")):
                venvs.tidy(others)
        except OSError:
            pass


# Going on


def say(text):
    print(text, file=sys.stderr, flush=True)


def refuse(text, code):
    say(text)
    if "--json" in sys.argv and sys.version_info >= OLDEST:
        from launcher import errors, reports

        reports.tell_error(text, errors.Exit(code), sys.argv)
    sys.exit(code)


def refuse_old_python():
    if sys.version_info < OLDEST:
        found = ".".join(map(str, sys.version_info[:3]))
        refuse(f"python3 is {found} here, the launcher needs 3.10 or newer; install one.", REFUSED)


def go_on(python, flags, arguments):
    os.execv(python, [python, *flags, "-c", START, str(ROOT), "cluster", *arguments])


def asks_about_us(words):
    """Help, version and completion are printed without any package, also before the first set-up."""
    return bool({"-h", "--help"} & set(words)) or words[:1] in (["--version"], ["completion"], ["help"])


def main(arguments):
    if asks_about_us(arguments[2:]):
        refuse_old_python()
        go_on(sys.executable, ["-I", "-S"], arguments)
    folder, why = usable()
    if folder is None:
        refuse_old_python()
        if arguments[1:2] != ["weights"] and arguments[2:3] and arguments[2] in WITHOUT_PACKAGES:
            say(f"Note: `{arguments[2]}` runs without the launcher's Python environment: {why}.")
            # -S: packages that happen to be on this machine are not those of the lock.
            go_on(sys.executable, ["-I", "-S"], arguments)
        folder = make(wheels_of(arguments))
    held = venvs.hold(folder)
    if held is None:  # removed since by another start, which made a new one
        return main(arguments)
    if held >= 0:
        os.set_inheritable(held, True)
    tidy(folder)
    go_on(str(python_of(folder)), ["-I"], arguments)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        refuse("\nInterrupted.", INTERRUPTED)
    except OSError as error:
        refuse(f"launcher: its Python environment in {STORE} could not be made: {error}.", SETUP)
