"""Which GPU architectures a compiled library holds, read from its fat binaries. No CUDA tool is needed."""

import struct
from pathlib import Path

_FATBIN = struct.pack("<I", 0xBA55ED50)
_FATBIN_HEADER = struct.Struct("<IHHQ")  # magic, version, header bytes, bytes of all entries
_ENTRY_HEADER = struct.Struct("<HHIQ12xI8xQ")  # kind, version, header bytes, payload bytes, architecture, flags
_MACHINE_CODE = 2  # the other kind is PTX, which a driver would compile at first use
_SUFFIXES = ((1 << 20, "a"), (1 << 21, "f"))  # architecture- and family-specific code


def architectures(library: Path) -> tuple[str, ...]:
    """Compute capabilities with machine code, in order: ('9.0', '12.1a')."""
    data = library.read_bytes()
    found = {name for start in _fatbins(data) for name in _entries(data, start)}
    return tuple(sorted(found, key=lambda name: (float(name.rstrip("af")), name)))


def _fatbins(data: bytes):
    start = data.find(_FATBIN)
    while start >= 0:
        if _FATBIN_HEADER.unpack_from(data, start)[1] == 1:
            yield start
        start = data.find(_FATBIN, start + 4)


def _entries(data: bytes, start: int):
    _, _, header, size = _FATBIN_HEADER.unpack_from(data, start)
    place, end = start + header, min(start + header + size, len(data) - _ENTRY_HEADER.size)
    while place < end:
        kind, _, header, payload, number, flags = _ENTRY_HEADER.unpack_from(data, place)
        if kind == _MACHINE_CODE:
            suffix = next((letter for bit, letter in _SUFFIXES if flags & bit), "")
            yield f"{number // 10}.{number % 10}{suffix}"
        place += max(header + payload, _ENTRY_HEADER.size)
