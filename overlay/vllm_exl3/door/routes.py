"""Which routes of vLLM's app exist, and which of them ask for no key."""

from fastapi import FastAPI

from vllm_exl3.door.rules import Rules

# With any key set, the only ones that ask for none: a balancer has none.
OPEN = ("/health", "/ping")
METRICS = "/metrics"
DOCS = ("/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json")

# What clients ask. All else, such as what scales, pauses, sleeps, loads adapters or profiles, and whatever a later vLLM
# adds, is taken out of the app.
CLIENT_ROUTES = frozenset({
    *OPEN, METRICS, "/load", "/version", "/v1/models",
    "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/completions", "/invocations",
    "/v1/responses", "/v1/responses/{response_id}", "/v1/responses/{response_id}/cancel",
    "/v1/messages", "/v1/messages/count_tokens", "/tokenize", "/detokenize",
})  # fmt: skip
OWN_PREFIX = "/exl3/"


def paths_of(rules: Rules, app: FastAPI) -> frozenset[str]:
    """Paths that stay in the app."""
    paths = {getattr(route, "path", "") for route in app.router.routes}
    own = {path for path in paths if path.startswith(OWN_PREFIX)}
    docs = set(DOCS) if rules.api_docs else set()
    others = paths - set(DOCS) if rules.engine_routes else set()
    return CLIENT_ROUTES | own | docs | others


def remove_others(rules: Rules, app: FastAPI) -> list[str]:
    """Takes every route out that the rules do not name; their paths."""
    kept = paths_of(rules, app)
    removed = [getattr(route, "path", repr(route)) for route in app.router.routes
               if getattr(route, "path", "") not in kept]  # fmt: skip
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", "") in kept]
    if not rules.api_docs:
        app.openapi_url = None
    return sorted(set(removed))


def asks_for_key(path: str, rules: Rules) -> bool:
    """`path` without the app's root path. Only exact spellings are open."""
    if path in OPEN:
        return False
    return not (rules.metrics == "open" and path in (METRICS, METRICS + "/"))
