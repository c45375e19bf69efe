"""The Hub: what a pack holds at its revision, and one file's bytes into a part that a later run goes on with.

huggingface_hub lists, signs in, follows mirrors and proxies and knows the Hub's errors. Its own download of a file
begins anew after every interruption, so the stream is written here, from where the part ends.
"""

from __future__ import annotations

import errno
import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
from huggingface_hub import HfApi, constants, hf_hub_url, set_client_factory
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from launcher.errors import LauncherError
from launcher.libraries import without_queries
from launcher.weights import patience, record
from launcher.weights.packs import Pack
from launcher.weights.patience import Passing, Stopped, patiently, seen_waiting, wait_of

GONE = (401, 403, 404, 410, 451)
PASSING = (408, 425, 429, 500, 502, 503, 504)
SKIPPED = (".gitattributes",)  # of git's own use


class Gone(Exception):
    """The pack, or its revision, is not to be had from the Hub for this user; the words say what the Hub said."""


@dataclass(frozen=True)
class Wanted:
    """A file as it has to be, as far as its source says: one of the two hashes is known."""

    name: str
    bytes: int
    sha256: str = ""
    git_sha1: str = ""  # of small files, which the Hub keeps in git itself


def is_offline() -> bool:
    return constants.is_offline_mode()


def endpoint() -> str:
    return constants.ENDPOINT


def files_of(pack: Pack) -> list[Wanted]:
    """Every file of the pack. Raises Gone, or LauncherError where the Hub cannot be asked."""
    entries: list = []

    def attempt() -> None:
        with errors_named():
            entries[:] = HfApi().list_repo_tree(pack.id, recursive=True, revision=pack.revision)

    stop, attempts = threading.Event(), patience.LIST_ATTEMPTS
    try:
        own_patience()
        seen_waiting("list", lambda: patiently(pack.id, attempt, stop, lambda: 0, attempts))
    except Passing as error:
        if error.status:
            raise given_up(pack.id, error, attempts) from error
        raise LauncherError(
            f"{pack.id}: {endpoint()} does not say what it holds ({error}); look at the network and at HF_ENDPOINT, or "
            f"bring the weights from a disk: ./download.sh --from DIR."
        ) from error
    finally:
        stop.set()
    try:
        files = [wanted_of(entry) for entry in entries if hasattr(entry, "size") and entry.path not in SKIPPED]
    except ValueError as error:
        raise LauncherError(f"{pack.id}: the Hub lists a file that cannot be used: {error}.") from error
    if not files:
        raise Gone("its list of files is empty")
    return files


def wanted_of(entry) -> Wanted:
    name = record.checked_name(entry.path)
    if entry.lfs:
        return Wanted(name, entry.lfs.size, sha256=record.checked_digest(entry.lfs.sha256))
    return Wanted(name, entry.size, git_sha1=entry.blob_id)


def fetch(pack: Pack, wanted: Wanted, part: Path, on_bytes: Callable[[int], None], stop: threading.Event) -> bool:
    """The file's bytes into `part`, from where it ends. `on_bytes` is told of each gain, and of a loss when the server
    begins anew. Raises Gone, Stopped, OSError, or LauncherError when it is not to be had."""

    def attempt() -> None:
        with errors_named():
            stream(pack, wanted, part, on_bytes, stop)

    own_patience()
    try:
        patiently(wanted.name, attempt, stop, lambda: size_of(part), patience.ATTEMPTS)
    except Passing as error:
        raise given_up(wanted.name, error, patience.ATTEMPTS) from error
    return True


def stream(pack: Pack, wanted: Wanted, part: Path, on_bytes, stop: threading.Event) -> None:
    offset = size_of(part)
    if offset > wanted.bytes:
        os.truncate(part, 0)
        on_bytes(-offset)
        offset = 0
    if offset == wanted.bytes and part.exists():
        return
    headers = {**build_hf_headers(), "Accept-Encoding": "identity", **({"Range": f"bytes={offset}-"} if offset else {})}
    url = hf_hub_url(pack.id, wanted.name, revision=pack.revision, endpoint=endpoint())
    timeout = httpx2.Timeout(constants.HF_HUB_DOWNLOAD_TIMEOUT)
    with get_session().stream("GET", url, headers=headers, timeout=timeout, follow_redirects=True) as response:
        hf_raise_for_status(response)
        for one in (*response.history, response):
            check_origin(pack, wanted, one.headers)
        with part.open("ab") as file:
            if offset and response.status_code != 206:
                file.truncate(0)
                on_bytes(-offset)
                offset = 0
            for chunk in response.iter_bytes():  # as it comes: what would be gathered first is lost with a connection
                if offset + len(chunk) > wanted.bytes:
                    raise Passing(f"more than its {wanted.bytes} bytes were sent")
                file.write(chunk)
                offset += len(chunk)
                on_bytes(len(chunk))
                if stop.is_set():
                    raise Stopped
    if offset < wanted.bytes:
        raise Passing(f"the stream ended at {offset} of {wanted.bytes} bytes")


def check_origin(pack: Pack, wanted: Wanted, headers) -> None:
    """The revision is a commit, which cannot move; a mirror or proxy that answers for another one is refused."""
    commit = headers.get(constants.HUGGINGFACE_HEADER_X_REPO_COMMIT)
    if commit and commit != pack.revision:
        raise LauncherError(
            f"{wanted.name}: {endpoint()} answered with revision {commit[:12]} of {pack.id}, {pack.revision[:12]} was "
            f"asked for; nothing of it was kept. Use another endpoint (HF_ENDPOINT) or try later."
        )


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


# Errors and patience


@contextmanager
def errors_named() -> Iterator[None]:
    """What the library raises, as Gone, Passing or LauncherError."""
    try:
        yield
    except OfflineModeIsEnabled as error:
        raise LauncherError(
            "HF_HUB_OFFLINE is set, so the Hub is not asked, and not everything is there; unset it, or bring the "
            "weights from a disk: ./download.sh --from DIR."
        ) from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in GONE:
            raise Gone(f"HTTP {status} {error.response.headers.get('X-Error-Code', '')}".strip()) from error
        if status == 416:
            raise Passing(f"HTTP {status}") from error
        where = without_secrets(str(error.response.url))
        raise LauncherError(f"HTTP {status} from {where}; what has arrived is kept. Try again later.") from error
    except httpx2.TransportError as error:
        raise lost(error) from error


def lost(error: httpx2.TransportError) -> Passing:
    return Passing(without_secrets(type(error).__name__ + (f" ({error})" if str(error) else "")))


class Client(httpx2.Client):
    """What may pass leaves the library at once, which would itself wait, for as long as a header says, in silence."""

    def send(self, request, **more):
        if is_offline():
            raise OfflineModeIsEnabled(f"{without_secrets(str(request.url))} was not asked")
        try:
            response = super().send(request, **more)
        except httpx2.TransportError as error:
            raise lost(error) from error
        if response.status_code in PASSING:
            response.close()
            raise Passing(
                f"HTTP {response.status_code}", response.status_code, wait_of(response.status_code, response.headers)
            )
        return response


@functools.cache
def own_patience() -> None:
    """Gives the library a client that leaves all waiting to patience.py."""
    set_client_factory(lambda: Client(follow_redirects=True, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT))


def given_up(what: str, error: Passing, attempts: int) -> LauncherError:
    """The end of the patience, with what it was about: a server that refuses is no fault of the network."""
    after = f"{what}: {error}, after {attempts} attempts at {endpoint()}; what has arrived is kept."
    again = "run ./download.sh again: it goes on where it stopped."
    if error.status == 429:
        return LauncherError(
            f"{after} The Hub limits how often you may ask, and more often with a login (HF_TOKEN, or `hf auth "
            f"login`); wait some minutes, then {again}"
        )
    if error.status:
        return LauncherError(f"{after} The server there is busy or broken; wait some minutes, then {again}")
    return LauncherError(f"{after} Look at the network and {again}")


def without_secrets(text: str) -> str:
    """One line; addresses lose their queries."""
    return without_queries(" ".join(text.split()))


def is_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT)
