"""Host and Origin checks: DNS rebinding and foreign origins are refused, configured origins are allowed."""

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.api.http.guard import Guard
from emberline.protocol.errors import Forbidden
from tests.api.fake_service import KEY, MODEL, FakeService, Wire, app_of, client_of
from tests.examples import n_examples

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
PAGE = "http://open-webui.example:3000"


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:8686",
        "127.0.0.1:1",
        "127.1.2.3",
        "[::1]:8686",
        "[::1]",
        "app.localhost",
        "localhost.:80",
        "ember.lan",
    ],
)
async def test_allowed_hosts(service: FakeService, host: str) -> None:
    async with client_of(service, hosts=("Ember.LAN",)) as client:
        assert (await client.get("/health", headers={"host": host})).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "xlocalhost", "", "a/b", "localhost/x",
     "user@localhost", "8.8.8.8", "[::2]", "0x7f.1", "localhost, evil.example", "localhost\tx"],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/health", "/", "/v1/models", "/client/v4/accounts/a/ai/models/search", "/nowhere"])
async def test_refused_hosts(client: httpx.AsyncClient, host: str, path: str) -> None:
    answer = await client.get(path, headers={"host": host})
    assert answer.status_code == 403
    assert MODEL not in answer.text


async def test_the_address_of_the_connection_is_allowed(service: FakeService) -> None:
    wire = Wire(app_of(service), "/health", b"", "GET", host="10.0.0.7:8686")
    wire.scope["server"] = ("10.0.0.7", 8686)
    await wire.task
    assert wire.sent[0]["status"] == 200


async def test_several_host_headers_are_refused(service: FakeService) -> None:
    wire = Wire(app_of(service), "/health", b"", "GET")
    wire.scope["headers"].append((b"host", b"evil.example"))
    await wire.task
    assert wire.sent[0]["status"] == 403


@settings(max_examples=n_examples(200), deadline=None)
@given(st.text(st.characters(codec="latin-1"), max_size=40))
def test_no_host_bypasses_authentication(host: str) -> None:
    """A Host header is either allowed or refused; no value raises another exception."""
    scope = {"headers": [(b"host", host.encode("latin-1"))], "server": ("127.0.0.1", 80)}
    try:
        assert Guard().check(scope) is None
    except Forbidden:
        return
    assert host.lower().rstrip(".").partition(":")[0].rstrip(".").endswith("localhost") or host.startswith(
        ("127.", "[")
    )


@pytest.mark.parametrize(
    "path", ["/v1/models", "//v1/models", "/v1/models/..", "/V1/models", "/v1/models?x=/health", "/health/../v1/models"]
)
@pytest.mark.parametrize("host", ["localhost", "localhost:8686/health?", "localhost#/health", "/health"])
async def test_the_host_never_decides_the_route(service: FakeService, path: str, host: str) -> None:
    async with client_of(service, KEY) as client:
        answer = await client.get(httpx.URL("http://127.0.0.1:8686", raw_path=path.encode()), headers={"host": host})
        assert answer.status_code in (401, 403, 404)
        assert MODEL not in answer.text


async def test_foreign_origins_are_refused(service: FakeService) -> None:
    async with client_of(service, origins=(PAGE,)) as client:
        for origin in ("http://evil.example", "null", "http://open-webui.example", PAGE + ".evil.example", ""):
            for method in ("GET", "POST", "OPTIONS"):
                answer = await client.request(method, "/v1/chat/completions", headers={"origin": origin}, json=CHAT)
                assert answer.status_code == 403, origin
                assert "access-control-allow-origin" not in answer.headers
    assert service.requests == []


async def test_own_origin_is_allowed(client: httpx.AsyncClient) -> None:
    headers = {"origin": "http://127.0.0.1:8686"}
    assert (await client.post("/v1/chat/completions", json=CHAT, headers=headers)).status_code == 200


async def test_configured_origins_are_allowed(service: FakeService) -> None:
    async with client_of(service, KEY, origins=(PAGE + "/",)) as client:
        asked = {
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
        }
        preflight = await client.options("/v1/chat/completions", headers={"origin": PAGE} | asked)
        assert preflight.status_code == 204
        assert preflight.headers["access-control-allow-origin"] == PAGE
        assert "POST" in preflight.headers["access-control-allow-methods"]
        assert preflight.headers["access-control-allow-headers"] == "authorization,content-type"
        for key, status in ((KEY, 200), ("wrong", 401)):  # a page reads its errors too
            headers = {"origin": PAGE, "authorization": f"Bearer {key}"}
            answer = await client.post("/v1/chat/completions", json=CHAT, headers=headers)
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == PAGE
            assert answer.headers["vary"] == "Origin"


async def test_refusals_can_be_read_by_an_allowed_page(service: FakeService) -> None:
    page = {"origin": "https://app.example"}
    async with client_of(service, KEY, origins=("https://app.example",)) as client:
        refused_host = await client.get("/v1/models", headers=page | {"host": "rebound.example"})
        no_key = await client.get("/v1/models", headers=page)
        no_route = await client.post("/v1/moderations", headers=page)
        preflight = page | {"host": "rebound.example", "access-control-request-method": "POST"}
        refused_preflight = await client.options("/v1/models", headers=preflight)
        foreign = await client.get("/v1/models", headers={"origin": "https://evil.example"})
    for answer, status in ((refused_host, 403), (no_key, 401), (no_route, 404), (refused_preflight, 403)):
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
    assert "--allowed-host" in refused_preflight.text
    assert (foreign.status_code, foreign.headers.get("access-control-allow-origin")) == (403, None)


async def test_any(service: FakeService) -> None:
    async with client_of(service, hosts=("*",), origins=("*",)) as client:
        headers = {"host": "evil.example", "origin": "http://evil.example"}
        assert (await client.get("/health", headers=headers)).status_code == 200
