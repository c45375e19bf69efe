"""The door itself: the outermost ASGI middleware of vLLM's app."""

import asyncio
import contextlib
from collections.abc import Callable

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from vllm_exl3.door import asked, connections, errors, hosts, keys, routes
from vllm_exl3.door.errors import Refusal
from vllm_exl3.door.grammars import GrammarTrials
from vllm_exl3.door.keys import Keys
from vllm_exl3.door.rules import Rules

# A client that is refused may still be sending; its answer is lost if the connection ends meanwhile.
DRAIN_S, DRAIN_BYTES = 5, 64 << 20
METHODS = ("GET", "POST", "DELETE")
HEADERS = ("authorization", "content-type", "x-api-key", "anthropic-version", "anthropic-beta")


class Door:
    """`client_keys` are the server's API keys, none: everyone on this machine may ask. `owner_token` is the launcher's,
    made for one start: it opens all that a key opens, and is the only one that opens the plugin's own routes."""

    def __init__(
        self, app, rules: Rules, client_keys: list[str], owner_token: str, trials: GrammarTrials | None
    ) -> None:
        self.app, self.rules, self.trials = app, rules, trials
        self.client_key = client_keys[0] if client_keys else ""
        self.keys = Keys([*client_keys, owner_token] if client_keys else [])
        self.hosts = (*hosts.machine_names(), *(name.lower() for name in rules.allowed_hosts))

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] == "lifespan":
            self._begin(scope["app"])
            await self.app(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        body = Body(scope, receive, self.rules)
        try:
            self._let_in(scope, path)
            if scope["type"] == "http":
                await self._check(scope, body)
        except Refusal as refusal:
            await refuse(refusal, path, scope, body, send)
            return
        await self.app(scope, body.receive, send)

    def _begin(self, app: FastAPI) -> None:
        server = getattr(app.state, "server", None)
        if server is not None:
            connections.guard(server.config, self.rules)
        if self.trials:
            self.trials.start()

    def _let_in(self, scope, path: str) -> None:
        if path in routes.OPEN:
            return
        if not self.keys:
            hosts.refuse_strange(scope["headers"], self.hosts, self.rules.cors_origins)
        elif routes.asks_for_key(path, self.rules) and not self.keys.open_with(scope["headers"]):
            raise Refusal(
                401, "invalid_api_key",
                "This server asks for its API key: send it as `Authorization: Bearer KEY` or as `x-api-key: KEY`.",
            )  # fmt: skip
        elif not path.startswith(routes.OWN_PREFIX):
            scope["headers"] = keys.with_bearer(scope["headers"], self.client_key)

    async def _check(self, scope, body: "Body") -> None:
        said = asked.read(await body.read())
        if said is None:
            return
        asked.refuse_too_much(said, self.rules)
        if parts := asked.grammars_of(said):
            if self.trials is None:
                raise Refusal(400, "no_grammars", "This server takes no grammars: it runs without a tokenizer.")
            await self.trials.check(parts)


class Body:
    """A request's body, read whole within its limits, and given on as if it had just come."""

    def __init__(self, scope, receive, rules: Rules) -> None:
        self.source, self.rules = receive, rules
        headers = {name.lower(): value for name, value in scope["headers"]}
        declared = headers.get(b"content-length", b"")
        self.declared = int(declared) if declared.isdigit() else 0
        self.waits_for_word = headers.get(b"expect", b"").lower() == b"100-continue"
        self.is_over = scope["type"] != "http"  # of a websocket, nothing is read here
        self.is_gone = False
        self.content: bytes | None = None

    async def read(self) -> bytes:
        """Raises Refusal for a body that is too large or too slow."""
        limit = self.rules.receive_timeout_s
        try:
            self.content = await asyncio.wait_for(self._read(), limit)
        except asyncio.TimeoutError:
            raise Refusal(
                408, "request_timeout",
                f"The body did not come within {limit} s; send it faster, or raise RECEIVE_TIMEOUT_S.",
            ) from None  # fmt: skip
        return self.content

    async def _read(self) -> bytes:
        pieces, size = [], 0
        while True:
            if max(size, self.declared) > self.rules.max_body_bytes:
                raise Refusal(
                    413, "request_too_large",
                    f"The body is larger than {self.rules.max_body_mib} MiB; send less, or raise MAX_BODY_MIB.",
                )  # fmt: skip
            if self.is_over:
                return b"".join(pieces)
            pieces.append(await self._next())
            size += len(pieces[-1])

    async def _next(self) -> bytes:
        message = await self.source()
        self.is_gone = message["type"] == "http.disconnect"
        self.is_over = self.is_gone or not message.get("more_body", False)
        return message.get("body", b"")

    async def receive(self) -> dict:
        if self.is_gone:
            return {"type": "http.disconnect"}
        if self.content is None:
            return await self.source()
        content, self.content = self.content, None
        return {"type": "http.request", "body": content, "more_body": False}

    async def drain(self) -> None:
        """Throws away what a refused client still sends, for a while and up to a size."""
        if not self.waits_for_word:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._drain(), DRAIN_S)

    async def _drain(self) -> None:
        size = 0
        while not self.is_over and size <= DRAIN_BYTES:
            size += len(await self._next())


async def refuse(refusal: Refusal, path: str, scope, body: Body, send) -> None:
    content = errors.body_of(refusal, path)
    kind = "http.response"
    if scope["type"] == "websocket":
        if "websocket.http.response" not in scope.get("extensions", {}):
            await send({"type": "websocket.close", "code": 1008})
            return
        kind = "websocket.http.response"
    else:
        await body.drain()
    named = {**errors.headers_of(refusal), "content-length": str(len(content))}
    headers = [(name.encode(), value.encode()) for name, value in named.items()]
    await send({"type": f"{kind}.start", "status": refusal.status, "headers": headers})
    await send({"type": f"{kind}.body", "body": b"" if scope.get("method") == "HEAD" else content})


def install(
    app: FastAPI, rules: Rules, client_keys: list[str], owner_token: str, tokenizer: Callable[[], str] | None
) -> list[str]:
    """Closes the app once all its routes and middleware are there, before it serves. The paths that it took out."""
    removed = routes.remove_others(rules, app)
    trials = GrammarTrials(tokenizer, rules) if tokenizer else None
    # vLLM's SageMaker layer has put the middleware together; nothing went through it, and the next call does it anew.
    app.middleware_stack = None
    app.add_middleware(Door, rules=rules, client_keys=client_keys, owner_token=owner_token, trials=trials)
    if rules.cors_origins:
        # Outside of the door: a browser's question whether it may ask carries no key.
        app.add_middleware(
            CORSMiddleware, allow_origins=list(rules.cors_origins), allow_methods=METHODS, allow_headers=HEADERS
        )
    return removed
