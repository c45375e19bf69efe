"""Keys of requests: `Authorization: Bearer` and `x-api-key`, compared in constant time."""

import hashlib
import secrets
from collections.abc import Iterable, Sequence

Headers = Sequence[tuple[bytes, bytes]]


def digest(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()


def given(headers: Headers) -> list[bytes]:
    """Every key that a request carries, in any header that may carry one."""
    keys = []
    for name, value in headers:
        name = name.lower()
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            if scheme.lower() == b"bearer":
                keys.append(key.strip())
        elif name == b"x-api-key":
            keys.append(value.strip())
    return keys


class Keys:
    """The digests of keys that open the door; takes as long whichever of them is given."""

    def __init__(self, keys: Iterable[str]) -> None:
        self.digests = [digest(key.encode()) for key in keys if key]

    def __bool__(self) -> bool:
        return bool(self.digests)

    def open_with(self, headers: Headers) -> bool:
        matched = False
        for key in map(digest, given(headers)):
            for known in self.digests:
                matched |= secrets.compare_digest(key, known)
        return matched


def with_bearer(headers: Headers, key: str) -> list[tuple[bytes, bytes]]:
    """The headers of a request that the door let in, as vLLM's own guard wants them."""
    others = [(name, value) for name, value in headers if name.lower() not in (b"authorization", b"x-api-key")]
    return [*others, (b"authorization", b"Bearer " + key.encode())]
