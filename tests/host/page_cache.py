"""How much of a file is in the page cache, by mincore(2)."""

import ctypes
import mmap
import os
from pathlib import Path

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
LIBC.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def resident_bytes(*paths: Path) -> int:
    return sum(map(resident_bytes_of, paths))


def resident_bytes_of(path: Path) -> int:
    size = path.stat().st_size
    if size == 0:
        return 0
    descriptor = os.open(path, os.O_RDONLY)
    try:
        address = LIBC.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    finally:
        os.close(descriptor)
    assert address not in (None, ctypes.c_void_p(-1).value), os.strerror(ctypes.get_errno())
    pages = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
    failed = LIBC.mincore(address, size, pages)
    LIBC.munmap(address, size)
    assert not failed, os.strerror(ctypes.get_errno())
    return sum(page & 1 for page in pages.raw) * mmap.PAGESIZE
