"""What the tests need of the system: which program, which Debian package brings it, which suites use it.

As a program it installs what is missing where it may, and says so: tests/needs.py [what tests/run was given].
It runs before any environment is there: standard library only, Python 3.8.
"""

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass

SYSTEM_FOLDERS = "/usr/sbin:/sbin"  # where a user's PATH does not lead
RUNS_SYSTEMD = "/run/systemd/system"
DEBIAN_KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"


@dataclass(frozen=True)
class Need:
    """A program, a file or a right. `package` is empty where no package brings it."""

    name: str
    package: str
    suites: tuple  # folders of tests/; none: all of them

    @property
    def is_met(self) -> bool:
        if self.name in RIGHTS:
            return RIGHTS[self.name]()
        if self.name.startswith("/"):
            return os.path.exists(self.name)
        return find(self.name) is not None


def find(program):
    return shutil.which(program) or shutil.which(program, path=SYSTEM_FOLDERS)


def may_make_namespaces():
    """A container's root may not."""
    namespaces = ["unshare", "--mount", "--net", "--pid", "--uts", "--ipc", "--fork"]
    return os.geteuid() == 0 and bool(find("unshare")) and works([*namespaces, "mount", "-t", "tmpfs", "none", "/mnt"])


def has_temporary_disk():
    """Not in memory, as /tmp is on many systems: what lies there is never out of the page cache."""
    folder = os.path.realpath(tempfile.gettempdir())
    with open("/proc/mounts") as mounts:
        kinds = {place: kind for _, place, kind, *_ in map(str.split, mounts)}
    while folder not in kinds:
        folder = os.path.dirname(folder)
    return kinds[folder] not in ("tmpfs", "ramfs")


def has_libnuma():
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError:
        return False
    return True


def works(command):
    return run(command).returncode == 0


def run(command):
    return subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


RIGHTS = {
    "Python's ensurepip": lambda: importlib.util.find_spec("ensurepip") is not None,
    "libnuma.so.1": has_libnuma,
    "root": lambda: os.geteuid() == 0,
    "namespaces": may_make_namespaces,
    "TMPDIR on a disk": has_temporary_disk,
}

NEEDS = {
    need.name: need
    for need in (
        Need("Python's ensurepip", "python3-venv", ()),
        Need("cc", "gcc", ("host", "image", "plugin", "local")),
        Need("/usr/include/stdio.h", "libc6-dev", ("host", "image", "plugin", "local")),
        Need("readelf", "binutils", ("plugin",)),
        Need("shellcheck", "shellcheck", ("host",)),
        Need("ip", "iproute2", ("host", "cluster")),
        Need("ps", "procps", ("cluster",)),
        Need("curl", "curl", ("cluster",)),
        Need("unshare", "util-linux", ("host", "cluster")),
        Need("setpriv", "util-linux", ("host", "cluster")),
        Need("mount", "mount", ("host", "cluster", "image")),
        Need("ssh", "openssh-client", ("host", "cluster")),
        Need("sshd", "openssh-server", ("host", "cluster")),
        Need("rsync", "rsync", ("host", "cluster")),
        Need("buildah", "buildah", ("image",)),
        Need("debootstrap", "debootstrap", ("image",)),
        Need(DEBIAN_KEYS, "debian-archive-keyring", ("image",)),
        Need("git", "git", ("host",)),
        Need("libnuma.so.1", "libnuma1", ("plugin", "soak", "local", "cluster")),
        Need("root", "", ("host", "cluster", "image")),
        Need("namespaces", "", ("host", "cluster", "image")),
        Need("TMPDIR on a disk", "", ("host",)),
    )
}


def unmet(*names):
    return [NEEDS[name] for name in names if not NEEDS[name].is_met]


def reason(*names):
    """Why a test that needs these cannot run here; empty if it can."""
    missing = unmet(*names)
    packages = sorted({need.package for need in missing if need.package})
    bring = f" (Debian: {' '.join(packages)})" if packages else ""
    return f"missing: {', '.join(need.name for need in missing)}{bring}" if missing else ""


# Installing


def chosen_suites(arguments):
    """The suites that pytest's arguments name; none: all."""
    return {word.split("/")[1].split("::")[0] for word in arguments if word.startswith("tests/") and word != "tests/"}


def missing_packages(arguments):
    suites = chosen_suites(arguments)
    needed = [need for need in NEEDS.values() if not (need.suites and suites) or suites & set(need.suites)]
    return sorted({need.package for need in needed if need.package and not need.is_met})


def installing(packages, has_systemd):
    """The commands. What came for the tests alone does not go on listening: Debian starts sshd with its package."""
    quietly = ["env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-qq"]
    return [
        [*quietly, "update"],
        [*quietly, "install", "-y", "--no-install-recommends", *packages],
        *([["systemctl", "disable", "--now", "ssh"]] if has_systemd and "openssh-server" in packages else []),
    ]


def way_to_root():
    """What a command is put behind to run as root; None where root cannot be had without a password."""
    if os.geteuid() == 0:
        return []
    sudo = ["sudo", "-n"]
    return sudo if shutil.which("sudo") and works([*sudo, "true"]) else None


def say(text):
    print(text, file=sys.stderr, flush=True)


def main(arguments):
    packages = missing_packages(arguments)
    if not packages:
        return
    by_hand = "sudo apt-get install " + " ".join(packages)
    root = way_to_root()
    if root is None or not shutil.which("apt-get"):
        say(f"Some tests will be skipped for lack of system packages; `{by_hand}` brings them.")
        return
    say(f"Installing system packages that the tests need: {' '.join(packages)}")
    for command in installing(packages, os.path.isdir(RUNS_SYSTEMD)):
        done = run([*root, *command])
        if done.returncode:
            said = done.stdout.decode(errors="replace").strip().splitlines()[-5:]
            say("\n".join("    " + line for line in said))
            say(f"That failed, so tests that need these packages will be skipped; `{by_hand}` shows why.")
            return


if __name__ == "__main__":
    main(sys.argv[1:])
