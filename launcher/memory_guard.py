"""Ends a rank before its node runs out of memory: memory_guard.py FLOOR_BYTES COMMAND...

A Spark's GPU shares the memory of its host, which freezes without ending any process when nothing is available. So
when less than the floor is available twice in a row, the command runs, which ends the rank. Sent to the nodes;
standard library only, Python 3.8 or newer.
"""

import subprocess
import sys
import time

EVERY_S = 1
ENDED_THE_RANK = 3


def available_bytes(meminfo):
    with open(meminfo) as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise SystemExit(f"memory guard: {meminfo} does not tell MemAvailable")


def main(floor_bytes, command, meminfo="/proc/meminfo"):
    below = 0
    while below < 2:
        time.sleep(EVERY_S)
        available = available_bytes(meminfo)
        below = below + 1 if available < floor_bytes else 0
    print(
        f"memory guard: {available / 2**30:.2f} GiB available, less than the {floor_bytes / 2**30:.2f} GiB of "
        f"MEMORY_GUARD_GIB: ending this rank. A shorter MAX_MODEL_LEN or a smaller KV_CACHE_GIB leaves more.",
        flush=True,
    )
    subprocess.run(command, stdin=subprocess.DEVNULL)
    return ENDED_THE_RANK


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
