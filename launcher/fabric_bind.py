"""Runs a command whose wildcard sockets listen on the fabric address: fabric_bind.py LIBRARY COMMAND...

Sent to the nodes together with fabric_bind.c, which it compiles once; standard library only, Python 3.8 or newer.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).with_name("fabric_bind.c")
COMPILERS = ("cc", "gcc", "clang")


def compile_library(library):
    """Whole or not at all: two commands may start at the same time."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        sys.exit("fabric_bind: no C compiler (cc, gcc or clang), which closes the cluster's ports to other networks; "
                 "install one, on Debian or Ubuntu with: sudo apt-get install gcc")  # fmt: skip
    partial = f"{library}.{os.getpid()}"
    done = subprocess.run(
        [compiler, "-shared", "-fPIC", "-O2", "-o", partial, str(SOURCE), "-ldl"],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if done.returncode:
        sys.exit("fabric_bind: {} failed: {}".format(compiler, done.stdout.decode(errors="replace").strip()))
    os.replace(partial, library)


def main(library, command):
    if not os.path.exists(library) or os.stat(library).st_mtime < SOURCE.stat().st_mtime:
        compile_library(library)
    os.environ["LD_PRELOAD"] = library
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"fabric_bind: cannot start {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
