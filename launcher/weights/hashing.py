"""SHA-256 of large files, several at once, in little memory, leaving no pages in the page cache.

Standard library only, Python 3.8 or newer: also sent to the other nodes as text (`python3 - '{"folder": ...}'`).
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

BUFFER_BYTES = 4 << 20
# Pages behind the reader are dropped in pieces of this size: memory stays bounded and calls are few.
DROP_BYTES = 64 << 20
REPORT_S = 0.25


class ChangedWhileRead(OSError):
    """The file was written to while it was hashed, so that its digest means nothing."""


def usual_workers():
    """As many as there are processors for this process; more only make a disk seek."""
    return min(16, len(os.sched_getaffinity(0)))


def hash_files(paths, workers, on_bytes=lambda count: None):
    """path -> SHA-256 in hex, of each path. `on_bytes(count)` is told of what was read, one call at a time.

    Content that was not yet on the disk is there when this returns. The first OSError ends it all and is raised.
    """
    return {path: digest for path, (digest, _) in digests_and_stats(paths, workers, on_bytes).items()}


def digests_and_stats(paths, workers, on_bytes=lambda count: None):
    """path -> (SHA-256 in hex, os.stat_result from before its first byte was read)."""
    paths = list(dict.fromkeys(Path(path) for path in paths))
    lock, stop = threading.Lock(), threading.Event()

    def tell(count):
        with lock:
            on_bytes(count)

    # The largest first: the last to end is then a small one.
    order = sorted(paths, key=size_or_zero, reverse=True)
    with ThreadPoolExecutor(max(1, min(workers, len(paths) or 1))) as pool:
        futures = {path: pool.submit(hash_file, path, tell, stop) for path in order}
        try:
            wait(futures.values(), return_when=FIRST_EXCEPTION)
            failed = [future for future in futures.values() if future.done() and future.exception()]
            if failed:
                raise failed[0].exception()
        finally:  # also on Ctrl-C
            stop.set()
    return {path: futures[path].result() for path in paths}


def size_or_zero(path):
    try:
        return path.stat().st_size
    except OSError:
        return 0


def hash_file(path, tell, stop):
    digest, buffer = hashlib.sha256(), memoryview(bytearray(BUFFER_BYTES))
    with open(path, "rb", buffering=0) as stream:
        descriptor = stream.fileno()
        before = os.fstat(descriptor)
        flush(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        offset = dropped = 0
        while not stop.is_set():
            count = stream.readinto(buffer)
            if not count:
                break
            digest.update(buffer[:count])
            offset += count
            if offset - dropped >= DROP_BYTES:
                os.posix_fadvise(descriptor, dropped, offset - dropped, os.POSIX_FADV_DONTNEED)
                dropped = offset
            tell(count)
        # The whole file: reading ahead, and pages on the border of two pieces, leave some behind.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        after = os.fstat(descriptor)
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise ChangedWhileRead(0, "it was written to while it was read", str(path))
    return digest.hexdigest(), before


def flush(descriptor):
    """Pages that are not yet on the disk cannot be dropped, and must not be called verified."""
    try:
        os.fsync(descriptor)
    except OSError:  # some network file systems refuse it to a reader; what they show is the server's
        pass


def drop_pages(paths):
    """Takes the files out of the page cache. Those that are gone are passed over."""
    for path in paths:
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError:
            continue
        try:
            flush(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


# Sent to a node


class Report:
    """Says about twice a second how much was read: {"read": bytes} lines."""

    def __init__(self):
        self.read = 0
        self.said = time.monotonic()

    def add(self, count):
        self.read += count
        if time.monotonic() - self.said > REPORT_S:
            self.said = time.monotonic()
            print("\n" + json.dumps({"read": self.read}), flush=True)


def found(path, tell, stop):
    """What a file is like, in JSON; never raises for the file's own sake."""
    try:
        digest, stat = hash_file(path, tell, stop)
    except OSError as error:
        return {"error": error.strerror or str(error)}
    return {"sha256": digest, "bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns, "inode": stat.st_ino}


def main(text):
    """Hashes {"folder", "names"}; prints {"read": bytes} as it goes, at last {"files": {name: what was found}}."""
    request = json.loads(text)
    folder, names = Path(os.path.expanduser(request["folder"])), request["names"]
    report, lock, stop = Report(), threading.Lock(), threading.Event()

    def tell(count):
        with lock:
            report.add(count)

    order = sorted(names, key=lambda name: size_or_zero(folder / name), reverse=True)
    with ThreadPoolExecutor(request.get("workers") or usual_workers()) as pool:
        futures = {name: pool.submit(found, folder / name, tell, stop) for name in order}
    print("\n" + json.dumps({"files": {name: futures[name].result() for name in names}}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
