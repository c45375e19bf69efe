#!/usr/bin/env python3
"""Runs tests/run on a machine that has nothing but Python: a bare Debian in a folder, where hidden needs show.

    sudo tests/bare_machine.py [--user] [--folder DIR] [what tests/run is given]

As root, tests/run installs what it needs; with --user somebody runs it who may not. Needs root and debootstrap.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
SUITE = "bookworm"
CHECKOUT = Path("/home/tester/checkout")
# How this machine reaches its package indexes is the bare one's way too; what is not here is passed over.
SHARED = ("/etc/resolv.conf", "/etc/pip.conf", "/etc/xdg/pip", "/etc/ssl/certs", "/root/.cache/pip")
PASSED_ON = re.compile(r"PIP_|SSL_|(HTTPS?|NO)_PROXY$|LANG$", re.IGNORECASE)
# In namespaces of their own, so that every mount and every process ends with the run.
APART = ("unshare", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child")
ENTER = """
root=$1; shift
mount --bind "$root" "$root"  # what is no mount has no propagation to change, as unshare does
mount --rbind /dev "$root/dev"
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
while [ "$1" != -- ]; do mount --bind "$1" "$root$1"; shift; done
shift
# The root of the namespace itself, unlike after chroot: namespaces that the tests make begin there, too.
cd "$root"
mkdir -p .old
pivot_root . .old
exec chroot . sh -euc 'umount -l /.old; exec "$@"' sh "$@"
"""


def make_root(root: Path, packages: list[str]) -> None:
    """debootstrap's smallest system, and a user who may not become root."""
    command = ["debootstrap", "--variant=minbase", f"--include={','.join(packages)}", SUITE, root]
    subprocess.run(command, check=True, stdout=sys.stderr)
    subprocess.run(["chroot", root, "useradd", "--create-home", "tester"], check=True)


def copy_checkout(root: Path) -> None:
    """As git would clone it, with what is not committed yet; environments that an earlier run made stay."""
    names = subprocess.run(
        ["git", "-C", REPOSITORY, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    target = root / CHECKOUT.relative_to("/")
    for old in (*target.glob("[!.]*"), *target.glob(".[!v]*")):
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    for name in filter(None, names.split("\0")):
        if (REPOSITORY / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, target / name, follow_symlinks=False)
    subprocess.run(["chroot", root, "chown", "--recursive", "tester:", CHECKOUT], check=True)


def shared_paths() -> list[str]:
    """With the folders that pip is told to look into."""
    told = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    folders = [path for path in re.findall(r"(?:'|\s|://)(/[\w./-]+)", told) if os.path.isdir(path)]
    return [path for path in dict.fromkeys([*SHARED, *folders]) if os.path.exists(path)]


def make_places(root: Path, paths: list[str]) -> None:
    """Something to mount on."""
    for path in paths:
        place = root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        if os.path.isdir(path):
            place.mkdir(exist_ok=True)
        elif not place.exists():
            place.touch()


def run(root: Path, user: str, arguments: list[str]) -> int:
    paths = shared_paths()
    make_places(root, paths)
    settings = [f"{name}={value}" for name, value in os.environ.items() if PASSED_ON.match(name)]
    home = "/root" if user == "root" else f"/home/{user}"
    environment = ["env", "-i", f"HOME={home}", f"PATH={os.defpath}:/usr/sbin:/sbin", *settings]
    as_user = ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups"]
    command = [*environment, *as_user, CHECKOUT / "tests/run", *arguments]
    return subprocess.run([*APART, "sh", "-euc", ENTER, "sh", root, *paths, "--", *command]).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--user", action="store_true", help="run as somebody who may not install anything")
    parser.add_argument("--with", dest="packages", default="python3,python3-venv,ca-certificates", metavar="PACKAGES",
                        help="Debian packages that the machine has (%(default)s)")  # fmt: skip
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp/bare-machine"),
                        help="where it is made and stays; one that is there is used again (%(default)s)")  # fmt: skip
    options, arguments = parser.parse_known_args()
    root = options.folder.resolve()
    if not (root / "etc/debian_version").exists():
        make_root(root, options.packages.split(","))
    copy_checkout(root)
    return run(root, "tester" if options.user else "root", arguments)


if __name__ == "__main__":
    sys.exit(main())
