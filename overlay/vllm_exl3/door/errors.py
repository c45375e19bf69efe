"""Refusals in the form that the client's library reads: OpenAI's everywhere, Anthropic's on /v1/messages."""

import json
from dataclasses import dataclass

MESSAGES = "/v1/messages"
# Anthropic's names by status; OpenAI's libraries tell errors apart by the status alone.
ANTHROPIC_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    408: "timeout_error", 413: "request_too_large", 503: "overloaded_error",
}  # fmt: skip


@dataclass(eq=False)  # not frozen: whoever passes an exception on writes its traceback
class Refusal(Exception):
    """`code` is OpenAI's machine-readable word, `param` the field of the request that is meant."""

    status: int
    code: str
    message: str
    param: str | None = None


def body_of(refusal: Refusal, path: str) -> bytes:
    """JSON. `path` decides whose form it has."""
    if path == MESSAGES or path.startswith(MESSAGES + "/"):
        kind = ANTHROPIC_TYPES.get(refusal.status, "api_error")
        return json.dumps({"type": "error", "error": {"type": kind, "message": refusal.message}}).encode()
    kind = "server_error" if refusal.status >= 500 else "invalid_request_error"
    error = {"message": refusal.message, "type": kind, "param": refusal.param, "code": refusal.code}
    return json.dumps({"error": error}).encode()


def headers_of(refusal: Refusal) -> dict[str, str]:
    """`close` always: what the client may still be sending is not read as the next request."""
    more = {401: {"www-authenticate": "Bearer"}, 503: {"retry-after": "5"}}.get(refusal.status, {})
    return {"content-type": "application/json", "connection": "close", **more}
