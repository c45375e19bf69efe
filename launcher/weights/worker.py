"""A node's side of a sync: holds the folder's lock, says what is there, changes what it is asked to. Sent as text.

Standard library only, Python 3.8 or newer. Reads requests, one JSON object a line, and answers each with one; ends, and
lets the lock go, when its input ends, however that comes about.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import socket
import stat
import sys
import time
from pathlib import Path

WORK = ".exl3-sync"  # what a sync needs beside the weights; gone when it is over
PARTIAL = "partial"
LOCK = "lock"
BEFORE = "before.json"  # the record of what is being replaced
# So long after a sync was killed, what it had started here is gone.
LOCK_WAIT_S = 15
TEMPORARY = re.compile(r"(.+)\.[A-Za-z0-9]{6}")  # rsync's name of what arrives, in a folder that is for that alone


class Refused(Exception):
    """Why something cannot be done, and what to do about it."""


class Folder:
    def __init__(self, path, record_name):
        self.path = Path(os.path.abspath(os.path.expanduser(path)))
        self.work = self.path / WORK
        self.record = self.path / record_name
        self.lock = None

    # Looking, which changes nothing

    def look(self, names):
        return {
            "folder": str(self.path),
            "record": text_or_none(self.record),
            "before": text_or_none(self.work / BEFORE),
            "stats": {name: stat_or_none(self.path / name) for name in names},
            "folders": [name for name in names if (self.path / name).is_dir()],
            "others": self.others(names),
            "programs": {name: shutil.which(name) or "" for name in ("rsync", "flock")},
            "mount": mount_of(self.path),
        }

    def others(self, names):
        """What is visible at the top and is none of these names, nor a folder of one."""
        names = {name.partition("/")[0] for name in names}
        try:
            found = sorted(os.listdir(str(self.path)))
        except OSError:
            return []
        return [name for name in found if name not in names and not name.startswith(".")]

    def place(self):
        """What a mount here would meet, and needs."""
        try:
            entries = [name for name in os.listdir(str(self.path)) if name != WORK]
        except OSError:
            entries = []
        system = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
        return {
            "folder": str(self.path),
            "is_mounted": os.path.ismount(str(self.path)),
            "mount": mount_of(self.path),
            "entries": len(entries),
            "has_nfs": bool(shutil.which("mount.nfs", path=system)),
            "user_id": os.getuid(),
        }

    # Changing

    def open(self, nonce):
        """Takes the lock. From now on a sync is under way here."""
        self.take_lock()
        self.salvage()
        fcntl.flock(self.lock, fcntl.LOCK_SH)  # rsync holds it, too, and may outlive us
        (self.work / nonce).touch()
        return {"work": str(self.work), **self.room()}

    def room(self):
        disk = os.statvfs(str(self.path))
        partial = sum(path.stat().st_size for path in self.kept() if path.is_file())
        return {"free_bytes": disk.f_bavail * disk.f_frsize, "partial_bytes": partial}

    def kept(self):
        """Beginnings of files, from which rsync goes on. It takes their folder away when it has used the last one."""
        try:
            return list((self.work / PARTIAL).iterdir())
        except FileNotFoundError:
            return []

    def take_lock(self):
        deadline = time.monotonic() + LOCK_WAIT_S
        while not self.try_lock():
            if time.monotonic() > deadline:
                who = text_or_none(self.work / LOCK)
                raise Refused(f"another sync writes to {self.path} ({who}); wait for its end")
            time.sleep(0.05)
        self.lock.truncate(0)
        self.lock.write(f"from {os.environ.get('SSH_CLIENT', 'here').split(' ')[0]}, "
                        f"since {time.strftime('%H:%M:%S')} on {socket.gethostname()}")  # fmt: skip
        self.lock.flush()

    def try_lock(self):
        try:
            (self.work / PARTIAL).mkdir(parents=True, exist_ok=True)
            self.lock = open(self.work / LOCK, "a")
        except FileNotFoundError:  # another sync, which ends just now, takes its folder away
            return False
        except OSError as error:
            raise Refused(f"{self.path} cannot be written ({error.strerror}); {what_to_do(error, self.path)}") from None
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Who ends a sync takes the file away; a lock on what is gone keeps nobody out.
            if os.fstat(self.lock.fileno()).st_ino == os.stat(self.work / LOCK).st_ino:
                return True
        except (BlockingIOError, FileNotFoundError):
            pass
        self.lock.close()
        self.lock = None
        return False

    def salvage(self):
        """What an rsync that was killed here had received, where the next one looks for it."""
        for path in list(self.work.iterdir()):
            found = TEMPORARY.fullmatch(path.name)
            if found and path.is_file():
                known = self.work / PARTIAL / found[1]
                if known.exists() and known.stat().st_size >= path.stat().st_size:
                    path.unlink()
                else:
                    path.replace(known)
            elif path.name.startswith("nonce-"):
                path.unlink()

    def let_go(self, names):
        """What has arrived goes to the disk and out of the page cache, so that the cache stays small all the while."""
        arrived = [path for path in (*self.work.iterdir(), *self.kept()) if path.name != LOCK]
        for path in (*arrived, *(self.path / name for name in names)):
            try:
                descriptor = os.open(str(path), os.O_RDONLY | os.O_NOFOLLOW)
            except OSError:  # not there yet, or at its own name by now
                continue
            try:
                if stat.S_ISREG(os.fstat(descriptor).st_mode):
                    os.fdatasync(descriptor)
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)

    def forget(self):
        """The record goes before anything else changes; which files were ours is remembered until it is over."""
        if self.record.exists():
            self.record.replace(self.work / BEFORE)
            sync_folder(self.path)

    def remove(self, names):
        """Only files, and only below the folder."""
        for name in names:
            path = self.path / name
            if path.is_symlink() or path.is_file():
                path.unlink()

    def keep(self, text):
        """Writes the record, whole or not at all, also when the power fails."""
        partial = self.work / "record"
        with open(partial, "w") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(self.record)
        sync_folder(self.path)

    def close(self):
        """Nothing is under way any more."""
        if self.lock is not None:
            shutil.rmtree(str(self.work), ignore_errors=True)
            self.lock.close()
            self.lock = None

    def leave(self):
        """The asker is gone, or gave up: what has arrived stays for the next time, and without that nothing does."""
        if self.lock is not None and not self.arrived():
            self.close()

    def arrived(self):
        return [path for path in (*self.work.iterdir(), *self.kept())
                if path.is_file() and path.name != LOCK and not path.name.startswith("nonce-")]  # fmt: skip


def sync_folder(path):
    descriptor = os.open(str(path), os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def what_to_do(error, path):
    if isinstance(error, PermissionError):
        return f"sudo mkdir -p {path} && sudo chown $USER {path} on that node"
    if isinstance(error, FileExistsError):
        return "something else has that name; move it away"
    return "see that its disk is mounted for writing, is not full, and that no link on the way leads nowhere"


def text_or_none(path):
    try:
        return path.read_text(errors="replace")
    except OSError:
        return None


def stat_or_none(path):
    """[bytes, mtime_ns, inode] of a regular file. A container cannot follow a link, so it counts as nothing."""
    try:
        found = os.lstat(str(path))
    except OSError:
        return None
    return [found.st_size, found.st_mtime_ns, found.st_ino] if stat.S_ISREG(found.st_mode) else None


def mount_of(path):
    """(kind, source) of the file system below a path, of the nearest folder that exists."""
    path = Path(os.path.realpath(str(path)))
    best, found = "", ["", ""]
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        source, target, kind = line.split(" ")[:3]
        target = target.replace("\\040", " ")
        if (target == "/" or str(path) == target or str(path).startswith(target + "/")) and len(target) >= len(best):
            best, found = target, [kind, source]
    return found


def answer(folder, request):
    name = request.pop("do")
    try:
        return getattr(folder, name)(**request) or {}
    except Refused as refused:
        return {"refused": str(refused)}
    except OSError as error:
        return {"refused": f"{error.filename or folder.path}: {error.strerror}; see that the disk is not full and that "
                           f"the user who logs in may write there"}  # fmt: skip


def main():
    folder = None
    for line in sys.stdin:
        request = json.loads(line)
        if folder is None:
            folder = Folder(request["folder"], request["record"])
            continue
        number = request.pop("number")
        # A line of its own, also behind half a line of somebody else's.
        print("\n" + json.dumps({**answer(folder, request), "number": number}), flush=True)
    if folder is not None:
        folder.leave()


if __name__ == "__main__":
    main()
