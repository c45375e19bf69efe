"""A Hub on this machine, as far as huggingface_hub needs one, that counts what it sends and fails as it is told."""

import hashlib
import json
import re
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

SECRET = "X-Signature=do-not-print"
PIECE = 16 << 10


def git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def is_large(name: str) -> bool:
    """Whether the Hub would keep it outside of git."""
    return name.endswith(".safetensors")


@dataclass
class Fault:
    """What goes wrong with requests whose path matches, `times` times. One of the fields below says what."""

    path: str
    times: int = 1
    status: int = 0  # this answer instead
    headers: dict = field(default_factory=dict)
    cut: int = -1  # the connection ends after so many bytes of the body
    short: int = 0  # the body is so many bytes shorter, and says so
    longer: int = 0  # the body goes on with so many zeros
    wrong_at: int = -1  # the byte there is another one
    commit: str = ""  # the revision that the answer claims
    stall_s: float = 0  # a pause before the body, in which nothing comes
    no_ranges: bool = False  # every body from its beginning

    def takes(self, path: str) -> bool:
        if self.times <= 0 or not re.search(self.path, path):
            return False
        self.times -= 1
        return True


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_):
        """A client that was killed is no news."""


class HubServer:
    """`repos`: {repository: {revision: {name: bytes}}}. `sent`: bytes of bodies by name."""

    def __init__(self):
        self.repos: dict[str, dict[str, dict[str, bytes]]] = {}
        self.faults: list[Fault] = []
        self.sent: Counter[str] = Counter()
        self.requests: list[str] = []
        self.asked: list[tuple[str, int]] = []  # (name, first byte) of every body
        self.tokens: set[str] = set()
        self.bytes_per_s = 0  # of each stream; 0: as fast as it goes
        self.mutex = threading.Lock()
        self.server = Server(("127.0.0.1", 0), self.handler())
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def blob(self, digest: str) -> tuple[str, bytes]:
        return next((name, content) for revisions in self.repos.values() for files in revisions.values()
                    for name, content in files.items() if sha256(content) == digest)  # fmt: skip

    def fault(self, path: str) -> Fault | None:
        with self.mutex:
            return next((fault for fault in self.faults if fault.takes(path)), None)

    def handler(self):
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                try:
                    answer(hub, self)
                except (BrokenPipeError, ConnectionResetError):
                    self.close_connection = True

            do_HEAD = do_GET

            def log_message(self, *_):
                pass

        return Handler


def answer(hub: HubServer, request) -> None:
    path = unquote(request.path)
    with hub.mutex:
        hub.requests.append(path)
        hub.tokens.add(request.headers.get("Authorization", ""))
    fault = hub.fault(path)
    if fault and fault.status:
        return reply(request, fault.status, fault.headers)
    if found := re.match(r"/api/models/([^/]+/[^/]+)/tree/([^/?]+)", path):
        return tree(hub, request, *found.groups())
    if found := re.match(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
        return resolve(hub, request, *found.groups(), fault)
    if found := re.match(r"/lfs/([0-9a-f]{64})", path):
        name, content = hub.blob(found[1])
        return body(hub, request, name, content, {"ETag": f'"{found[1]}"'}, fault)
    return reply(request, 404, {})


def reply(request, status: int, headers: dict, content: bytes = b"") -> None:
    request.send_response(status)
    for name, value in {"Content-Length": str(len(content)), **headers}.items():
        request.send_header(name, value)
    request.end_headers()
    request.wfile.write(content)


def files_at(hub, request, repo: str, revision: str) -> dict[str, bytes] | None:
    """The files, or None after the answer that the Hub gives for what it does not have."""
    if repo not in hub.repos:
        reply(request, 404, {"X-Error-Code": "RepoNotFound"})
    elif revision not in hub.repos[repo]:
        reply(request, 404, {"X-Error-Code": "RevisionNotFound"})
    else:
        return hub.repos[repo][revision]
    return None


def tree(hub, request, repo: str, revision: str) -> None:
    files = files_at(hub, request, repo, revision)
    if files is None:
        return
    entries = []
    for name, content in files.items():
        entry = {"type": "file", "path": name, "size": len(content), "oid": git_sha1(content)}
        if is_large(name):
            entry["lfs"] = {"oid": sha256(content), "size": len(content), "pointerSize": 134}
        entries.append(entry)
    reply(request, 200, {"Content-Type": "application/json"}, json.dumps(entries).encode())


def resolve(hub, request, repo: str, revision: str, name: str, fault: Fault | None) -> None:
    files = files_at(hub, request, repo, revision)
    if files is None:
        return
    if name not in files:
        reply(request, 404, {"X-Error-Code": "EntryNotFound"})
        return
    headers = {"X-Repo-Commit": fault.commit if fault and fault.commit else revision}
    content = files[name]
    if is_large(name):
        headers |= {"Location": f"/lfs/{sha256(content)}?{SECRET}", "X-Linked-Etag": f'"{sha256(content)}"',
                    "X-Linked-Size": str(len(content)), "ETag": f'"{git_sha1(content)}"'}  # fmt: skip
        reply(request, 302, headers)
    else:
        body(hub, request, name, content, {**headers, "ETag": f'"{git_sha1(content)}"'}, fault)


def body(hub, request, name: str, content: bytes, headers: dict, fault: Fault | None) -> None:
    fault = fault or Fault("", 0)
    if fault.wrong_at >= 0:
        content = content[: fault.wrong_at] + bytes([content[fault.wrong_at] ^ 1]) + content[fault.wrong_at + 1 :]
    content = content[: len(content) - fault.short] + bytes(fault.longer)
    asked = re.fullmatch(r"bytes=(\d+)-", request.headers.get("Range", ""))
    start = int(asked[1]) if asked and not fault.no_ranges else 0
    if start and start >= len(content):
        return reply(request, 416, {"Content-Range": f"bytes */{len(content)}"})
    if start:
        headers = {**headers, "Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"}
    request.send_response(206 if start else 200)
    for key, value in {**headers, "Content-Length": str(len(content) - start), "Accept-Ranges": "bytes"}.items():
        request.send_header(key, value)
    request.end_headers()
    if request.command == "GET":
        with hub.mutex:
            hub.asked.append((name, start))
        send(hub, request, name, content[start:], fault)
    return None


def send(hub, request, name: str, content: bytes, fault: Fault) -> None:
    end = len(content) if fault.cut < 0 else min(fault.cut, len(content))
    time.sleep(fault.stall_s)
    for position in range(0, end, PIECE):
        piece = content[position : min(end, position + PIECE)]
        request.wfile.write(piece)
        with hub.mutex:
            hub.sent[name] += len(piece)
        if hub.bytes_per_s:
            time.sleep(len(piece) / hub.bytes_per_s)
    if end < len(content):
        request.close_connection = True
