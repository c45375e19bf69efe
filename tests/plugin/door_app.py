"""vLLM's own app with all its routes, behind the door and behind uvicorn, without an engine: for what never gets in."""

import http.client
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm_exl3 import service
from vllm_exl3.door import middleware
from vllm_exl3.door.rules import Rules

MODEL = Path(__file__).resolve().parents[2] / "models/local"
TASKS = ("generate", "render", "transcription", "realtime")
KEY, TOKEN = "sk-of-a-client", "0123456789abcdef" * 4
HOST = "127.0.0.1"


def make_app() -> FastAPI:
    """Every route that vLLM has for a model that generates and hears, in developer mode also those."""
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", str(MODEL)])
    app = build_app(args, TASKS)
    app.state.log_stats, app.state.engine_client = False, None
    app.add_api_route(service.RESET_PATH, lambda: {"reached": True}, methods=["POST"])
    return app


class Served:
    def __init__(self, app: FastAPI, port: int) -> None:
        self.app, self.port = app, port

    def ask(self, method: str, path: str, key: str = "", body: bytes = b"", **headers: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=30)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if key:
            named["Authorization"] = f"Bearer {key}"
        try:
            connection.putrequest(method, path, skip_host="Host" in named)
            for name, value in named.items():
                connection.putheader(name, value)
            if body:
                connection.putheader("Content-Type", "application/json")
                connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body or None)
            answer = connection.getresponse()
            self.headers = answer.headers
            return answer.status, answer.read()
        finally:
            connection.close()

    def raw(self, sent: bytes, timeout_s: float = 10) -> bytes:
        """Everything that comes back until the server ends the connection or is silent."""
        with socket.create_connection((HOST, self.port), timeout_s) as one:
            one.sendall(sent)
            received = b""
            try:
                while piece := one.recv(65536):
                    received += piece
            except (TimeoutError, ConnectionResetError):
                pass
            return received

    def connect(self) -> socket.socket:
        return socket.create_connection((HOST, self.port), 10)


@contextmanager
def serving(app: FastAPI) -> Iterator[Served]:
    """Under uvicorn as vLLM starts it: on a socket of its own, with the server in the app's state."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((HOST, 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", access_log=False))
        app.state.server = server
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive(), "uvicorn has ended"
            time.sleep(0.01)
        try:
            yield Served(app, listener.getsockname()[1])
        finally:
            server.should_exit = True
            thread.join(20)


@contextmanager
def door(rules: Rules | None = None, keys: tuple[str, ...] = (KEY,)) -> Iterator[Served]:
    app = make_app()
    middleware.install(app, rules or Rules(), list(keys), TOKEN, None)
    with serving(app) as served:
        yield served
