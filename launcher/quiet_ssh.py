"""Stands between rsync and ssh, and keeps what the node's login shell says out of rsync's protocol. Run as a file.

Its arguments are ours up to the second `--`: ssh's own and the login; then HOST COMMAND... as rsync adds them.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from launcher import remote


def main(arguments: list[str]) -> int:
    ours = arguments.index("--") + 2
    command = " ".join(arguments[ours + 2 :]).encode("utf-8", "surrogateescape")
    # What is sent goes straight from rsync to ssh; only what comes back, which is little, passes through here.
    return remote.show_marked(remote.Call.of_line("rsync", arguments[:ours], command), stdin=None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
