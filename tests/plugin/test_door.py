"""The door of the API server, around vLLM's own app: who gets in, by every route and odd spelling of it."""

import json
import re
from pathlib import Path

import pytest
from door_app import KEY, TOKEN, door, make_app
from vllm_exl3 import service
from vllm_exl3.door import middleware, routes
from vllm_exl3.door.hosts import host_name
from vllm_exl3.door.rules import Rules

PAGE = Path(__file__).resolve().parents[2] / "docs/security.md"
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE")
PREFLIGHT = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
UPGRADE = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13",
           "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA=="}  # fmt: skip
# What must not be there however it is asked for, since it changes the engine or tells its insides.
ENGINE_ROUTES = {
    "/scale_elastic_ep", "/is_scaling_elastic_ep", "/sleep", "/wake_up", "/collective_rpc", "/pause", "/resume",
    "/reset_prefix_cache", "/server_info", "/inference/v1/generate", "/v1/chat/completions/render",
}  # fmt: skip


def spellings(path: str) -> list[str]:
    upper = path[0] + path[1:2].upper() + path[2:]
    return [
        path, "/" + path, path + "/", upper, path.replace("/", "/./", 1), path[:1] + "%2f" + path[1:],
        path[:1] + f"%{ord(path[1:2] or 'a'):02x}" + path[2:], "/health/.." + path, "/health/..;" + path,
        "/health;" + path, path + "?key=1", path + "%00", path + ";a=b", "/ping/../" + path[1:],
    ]  # fmt: skip


@pytest.fixture(scope="module")
def all_routes():
    """vLLM's, in developer mode too, and before the door takes any out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        patch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
        patch.setenv("VLLM_TORCH_PROFILER_DIR", "/tmp")
        app = make_app()
    paths = {re.sub(r"\{.*?\}", "x", route.path) for route in app.router.routes}
    assert paths > ENGINE_ROUTES
    return sorted(paths)


@pytest.fixture(scope="module")
def keyed():
    with door() as served:
        yield served


@pytest.fixture(scope="module")
def keyless():
    with door(Rules(cors_origins=("http://ui.example",), allowed_hosts=("gateway.lan",)), keys=()) as served:
        yield served


def is_open(path: str) -> bool:
    return path in ("/health", "/ping")


@pytest.mark.parametrize("key", ["", "wrong", KEY + "x", KEY[:-1], KEY.upper()])
def test_no_route_answers_without_the_key(keyed, all_routes, key):
    for path in all_routes:
        for method in ("GET", "POST") if key else METHODS:
            status, said = keyed.ask(method, path, key)
            assert (status != 401) is is_open(path), (method, path, status, said[:200])


def test_no_spelling_of_a_route_answers_without_the_key(keyed, all_routes):
    for path in all_routes:
        for spelling in spellings(path):
            for method in ("GET", "POST"):
                status, said = keyed.ask(method, spelling)
                assert status in (400, 401) or is_open(spelling.partition("?")[0]) or is_open(decoded(spelling)), (
                    spelling, status, said[:200]
                )  # fmt: skip


def decoded(spelling: str) -> str:
    return re.sub("%([0-9a-f]{2})", lambda found: chr(int(found[1], 16)), spelling.partition("?")[0])


def test_neither_a_preflight_nor_an_upgrade_gets_in_without_the_key(keyed, all_routes):
    for path in [*all_routes, "/v1/realtime"]:
        if not is_open(path):
            assert keyed.ask("OPTIONS", path, **PREFLIGHT)[0] == 401, path
            assert keyed.ask("GET", path, **UPGRADE)[0] == 401, path
    assert "access-control-allow-origin" not in keyed.headers


def test_an_absolute_target_and_a_second_request_ask_for_the_key(keyed):
    absolute = keyed.raw(b"GET http://127.0.0.1/v1/models HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
    two = keyed.raw(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\nGET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n")
    assert absolute.startswith(b"HTTP/1.1 401")
    assert re.findall(rb"HTTP/1.1 (\d+)", two)[-1] == b"401"


@pytest.mark.parametrize("headers", [
    {"Authorization": f"Bearer {KEY}"}, {"Authorization": f"bearer {KEY}"}, {"x-api-key": KEY}, {"X-API-Key": KEY},
    {"Authorization": "Bearer old", "x-api-key": KEY}, {"Authorization": f"Bearer {TOKEN}"},
])  # fmt: skip
def test_the_key_opens_in_either_header(keyed, headers):
    status, _ = keyed.ask("GET", "/v1/models", **headers)
    assert status != 401


@pytest.mark.parametrize("headers", [
    {"Authorization": KEY}, {"Authorization": f"Basic {KEY}"}, {"Cookie": f"key={KEY}"}, {"Authorization": "Bearer "},
    {"x-api-key": ""}, {"X-Forwarded-For": "127.0.0.1"},
])  # fmt: skip
def test_nothing_else_opens(keyed, headers):
    assert keyed.ask("GET", "/v1/models", **headers)[0] == 401
    assert keyed.ask("GET", f"/v1/models?api_key={KEY}")[0] == 401


def test_a_refusal_has_the_form_that_the_clients_library_reads(keyed):
    status, said = keyed.ask("POST", "/v1/chat/completions", body=b"{}")
    error = json.loads(said)["error"]
    assert (status, error["type"], error["code"]) == (401, "invalid_request_error", "invalid_api_key")
    assert keyed.headers["www-authenticate"] == "Bearer" and "VLLM" not in error["message"]
    status, said = keyed.ask("POST", "/v1/messages/count_tokens", body=b"{}")
    assert (status, json.loads(said)["type"]) == (401, "error")
    assert json.loads(said)["error"]["type"] == "authentication_error"


def test_routes_that_change_the_engine_are_not_there(keyed, all_routes):
    served = {route.path for route in keyed.app.router.routes}
    assert served == {path for path in routes.CLIENT_ROUTES if path in served} | {service.RESET_PATH}
    for path in [*ENGINE_ROUTES, *routes.DOCS]:
        assert keyed.ask("POST", path, KEY)[0] == keyed.ask("GET", path, KEY)[0] == 404, path


@pytest.mark.parametrize("rules, path, there", [
    (Rules(engine_routes=True), "/scale_elastic_ep", True), (Rules(engine_routes=True), "/docs", False),
    (Rules(api_docs=True), "/docs", True), (Rules(api_docs=True), "/scale_elastic_ep", False),
])  # fmt: skip
def test_settings_bring_them_back_one_kind_at_a_time(rules, path, there):
    app = make_app()
    removed = middleware.install(app, rules, [KEY], TOKEN, None)
    assert (path in {route.path for route in app.router.routes}) is there is (path not in removed)


def test_metrics_are_open_by_a_setting_only(keyed):
    assert keyed.ask("GET", "/metrics")[0] == 401
    assert keyed.ask("GET", "/metrics", KEY)[0] == 200
    with door(Rules(metrics="open")) as served:
        assert served.ask("GET", "/metrics")[0] == 200
        assert [served.ask("GET", path)[0] for path in ("/metricsx", "/metrics/x", "/v1/models")] == [401] * 3


# Without a key


@pytest.mark.parametrize("host", [
    "127.0.0.1", "127.0.0.1:8888", "localhost", "LOCALHOST:8888", "[::1]:8888", "192.168.7.5", "gateway.lan:80",
])  # fmt: skip
def test_a_keyless_server_answers_to_addresses_and_known_names(keyless, host):
    assert keyless.ask("GET", "/v1/models", Host=host)[0] not in (401, 403)


@pytest.mark.parametrize("host", [
    "rebound.example", "rebound.example:8888", "localhost.evil.example", "127.0.0.1.nip.io", "2130706433", "",
    "127.0.0.1@evil.example", "evil.example:80@127.0.0.1x",
])  # fmt: skip
def test_a_turned_name_is_refused(keyless, host):
    status, said = keyless.ask("POST", "/v1/completions", body=b"{}", Host=host)
    assert (status, json.loads(said)["error"]["code"]) == (403, "host_not_allowed"), host
    assert keyless.ask("GET", "/health", Host=host)[0] != 403


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:3000", "file://"])
def test_pages_of_others_may_not_ask_a_keyless_server(keyless, origin):
    status, said = keyless.ask("POST", "/v1/completions", body=b"{}", Origin=origin)
    assert (status, json.loads(said)["error"]["code"]) == (403, "origin_not_allowed")
    assert "access-control-allow-origin" not in keyless.headers


def test_a_page_that_is_allowed_may_ask_and_read(keyless):
    asked = {"Origin": "http://ui.example", "Access-Control-Request-Method": "POST",
             "Access-Control-Request-Headers": "authorization,content-type"}  # fmt: skip
    assert keyless.ask("OPTIONS", "/v1/chat/completions", **asked)[0] == 200
    assert keyless.headers["access-control-allow-origin"] == "http://ui.example"
    assert keyless.ask("GET", "/v1/models", Origin="http://ui.example")[0] != 403


def test_the_own_routes_of_a_keyless_server_refuse_strange_pages(keyless):
    assert keyless.ask("POST", service.RESET_PATH, TOKEN, Origin="http://evil.example")[0] == 403
    assert keyless.ask("POST", service.RESET_PATH, TOKEN)[0] == 200


@pytest.mark.parametrize("host, name", [("a.b:1", "a.b"), ("[::1]:5", "::1"), ("A.", "a"), ("[bad", ""), ("", "")])
def test_a_host_is_read_as_a_browser_writes_it(host, name):
    assert host_name(host) == name


# The page


def test_the_page_lists_every_route_that_is_served(keyed):
    listed = set(re.findall(r"^\| `(/[^`]*)`", PAGE.read_text(), re.MULTILINE))
    assert listed == routes.CLIENT_ROUTES | {service.RESET_PATH}
