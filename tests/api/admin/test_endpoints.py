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
