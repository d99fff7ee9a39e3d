"""Health, metrics, loaded models, the OpenAPI document."""

import httpx
import jsonschema_rs
import pytest

from emberline import __version__
from emberline.api.routes import ROUTES
from tests.api.fake_service import KEY, MODEL, FakeService, client_of


async def test_health(client: httpx.AsyncClient, service: FakeService) -> None:
    answer = await client.get("/health")
    assert (answer.status_code, answer.json()["status"]) == (200, "ok")
    assert answer.json()["detail"]["engines"][0]["name"] == "smollm2-0"
    service.ok = False
    answer = await client.get("/health")
    assert (answer.status_code, answer.json()["status"]) == (503, "unavailable")
    assert answer.headers["retry-after"] == "1"


async def test_metrics(client: httpx.AsyncClient) -> None:
    answer = await client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "emberline_requests_total 1.0" in answer.text


async def test_ps(client: httpx.AsyncClient) -> None:
    found = (await client.get("/api/ps")).json()
    assert found["version"] == __version__
    assert found["ok"] is True
    assert found["models"][0]["id"] == MODEL
    assert found["engines"][0]["load"]["running"] == 1


async def test_health_details_need_a_key(service: FakeService) -> None:
    async with client_of(service, KEY) as client:
        assert MODEL not in (await client.get("/health")).text
        assert "smollm2-0" not in (await client.get("/health")).text
        trusted = await client.get("/health", headers={"authorization": f"Bearer {KEY}"})
        assert "smollm2-0" in trusted.text


async def test_favicon(client: httpx.AsyncClient) -> None:
    assert (await client.get("/favicon.ico")).status_code == 204


async def test_the_document_has_every_route(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert described == {(route.method, route.path) for route in ROUTES}
    jsonschema_rs.meta.validate({"$defs": document["components"]["schemas"]})


async def test_probes_are_logged_at_debug_level(client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        for path in ("/health", "/metrics", "/api/ps", "/v1/models"):
            await client.get(path)
    lines = [record.getMessage() for record in caplog.records if record.name == "emberline.api.app"]
    assert lines == ["GET /v1/models"]


async def test_a_request_whose_task_has_a_line_is_logged_once(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
    with caplog.at_level("DEBUG", logger="emberline.api.app"):
        for given, headers in ((body, {}), (body, {"x-request-id": "theirs"}), ({**body, "n": -1}, {})):
            await client.post("/v1/chat/completions", json=given, headers=headers)
    found = [(record.levelname, record.status) for record in caplog.records if record.name == "emberline.api.app"]
    assert found == [("DEBUG", 200), ("INFO", 200), ("INFO", 400)]
