"""Runs a command whose wildcard sockets listen on the fabric address: fabric_bind.py LIBRARY COMMAND...

Sent to the nodes together with fabric_bind.c. Our image has the library; elsewhere, or where the image's is of another
source, it is compiled once. Standard library only, Python 3.8 or newer.
"""

import filecmp
import os
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).with_name("fabric_bind.c")
COMPILERS = ("cc", "gcc", "clang")
BUILT = Path("/usr/local/lib/exl3/fabric_bind.so")  # by image/install.py, its source beside it


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


def is_built():
    source = BUILT.with_suffix(".c")
    return BUILT.is_file() and source.is_file() and filecmp.cmp(str(source), str(SOURCE), shallow=False)


def main(library, command):
    if is_built():
        library = str(BUILT)
    elif not os.path.exists(library) or os.stat(library).st_mtime < SOURCE.stat().st_mtime:
        compile_library(library)
    os.environ["LD_PRELOAD"] = library
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"fabric_bind: cannot start {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
