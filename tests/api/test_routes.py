"""Every route declares its policy, and the policy is enforced."""

from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from emberline.accounts.account_service import AccountService
from emberline.accounts.audit_log import Actor
from emberline.api.batch_loader import BatchService
from emberline.api.http.errors import CODES, Dialect
from emberline.api.http.router import Policy, Route
from emberline.api.playground import assets
from emberline.api.routes import ROUTES
from emberline.gateway.gateways import GatewayService
from emberline.jobs.webhooks.service import WebhookService
from emberline.protocol.errors import EmberlineError
from tests.api.fake_service import KEY, MODEL, FakeService, client_of

OPEN = {"/", "/assets/{asset}", "/operations", "/favicon.ico", "/health", "/openapi.json"} | {
    "/api/cluster/challenge",  # a worker proves itself by its join key
    "/api/cluster/announce",
}


PUSHED_MODELS = {f"/api/models/{act}" for act in ("push", "versions", "rollback", "remove", "logs")}


def url(route: Route) -> str:
    asset = f"{assets.load().digest}/app.js"
    path = route.path.replace("{asset}", asset)
    path = path.replace("{gateway}", "default").replace("{rest}", "compat/models")
    return path.replace("{account}", "acme").replace("{model}", MODEL).replace("{id}", "resp_1")


def test_open_routes() -> None:
    """A new open route must be added here too."""
    assert {route.path for route in ROUTES if route.policy is Policy.OPEN} == OPEN


async def test_the_policy_holds(
    service: FakeService,
    webhooks: WebhookService,
    batches: BatchService,
    accounts: AccountService,
    gateways: GatewayService,
) -> None:
    """Of every route: without a key, with a wrong one, a tenant's and the admin's."""
    tenant = await accounts.create_key(Actor("test"), "acme")
    wrong = [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": KEY},
        {"x-api-key": KEY[:-1]},
        {"x-api-key": KEY + "x"},
        {"x-api-key": tenant.key.text[:-1]},
    ]
    async with client_of(service, KEY, webhooks, batches, accounts, gateways) as client:
        for route in ROUTES:
            where = f"{route.method} {route.path}"
            is_open = route.policy is Policy.OPEN
            for headers in wrong:
                answer = await client.request(route.method, url(route), headers=headers, json={})
                assert (answer.status_code == 401) is not is_open, (where, answer.text)
                assert MODEL not in answer.text
            answer = await client.request(route.method, url(route), headers={"x-api-key": tenant.key.text}, json={})
            is_off = route.path in PUSHED_MODELS  # by default, also for an operator
            assert (answer.status_code == 403) is (route.policy is Policy.ADMIN or is_off), (where, answer.text)
            answer = await client.request(route.method, url(route), headers={"authorization": f"Bearer {KEY}"}, json={})
            assert answer.status_code == 403 if is_off else answer.status_code not in (401, 403), where


async def test_other_methods(
    service: FakeService,
    webhooks: WebhookService,
    batches: BatchService,
    accounts: AccountService,
    gateways: GatewayService,
) -> None:
    async with client_of(service, KEY, webhooks, batches, accounts, gateways) as client:
        client.headers["authorization"] = f"Bearer {KEY}"
        for route in ROUTES:
            await check_other_methods(client, route)


async def check_other_methods(client: httpx.AsyncClient, route: Route) -> None:
    others = {"GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"} - {r.method for r in ROUTES if r.path == route.path}
    for method in others:
        answer = await client.request(method, url(route))
        assert answer.status_code == 405, (method, route.path)
        assert route.method in answer.headers["allow"]
        found = answer.json()
        if route.path.startswith("/client"):
            assert found["errors"][0]["code"] == 7001
        native = route.dialect in (Dialect.NATIVE, Dialect.BINDING)
        assert ("error" in found) is not native
        if route.dialect in (Dialect.OPENAI, Dialect.OPENAI_ENVELOPED):
            assert found["error"]["code"] == "method_not_allowed"
        elif route.dialect is Dialect.OLLAMA:
            assert found == {"error": f"Method {method} not available for that URI."}
        elif route.dialect is Dialect.BINDING:
            assert (found["name"], found["internalCode"], found["httpCode"]) == ("AiError", 7001, 405)
        elif route.dialect is Dialect.GATEWAY:
            assert found["error"][0]["code"] == 7001
        elif not native:
            assert (found["type"], found["error"]["type"]) == ("error", "invalid_request_error")
    if route.method == "GET":
        found = {404} if "{id}" in route.path or "/gateways/" in route.path else {200, 204, 400}
        found = {426} if route.opens_websocket else {403} if route.path in PUSHED_MODELS else found
        assert (await client.head(url(route))).status_code in found, route.path


@pytest.mark.parametrize(
    "path", ["/v1", "/v1/", "/v1/nope", "/v1/models/", "/metrics/", "/health/x", "/api", "/docs", "/v1/chat"]
)
async def test_no_route(service: FakeService, path: str) -> None:
    async with client_of(service) as client:
        answer = await client.get(path)
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "unknown_url"


def test_every_kind_of_error_has_codes() -> None:
    def kinds(cls: type[EmberlineError]) -> set[str]:
        return {cls.kind}.union(*(kinds(sub) for sub in cls.__subclasses__()))

    assert kinds(EmberlineError) <= set(CODES)


@pytest.mark.parametrize("path", ["videos", "images/variations", "score"])
async def test_apis_of_others_are_named_in_the_refusal(client: httpx.AsyncClient, path: str) -> None:
    for base in ("/v1", "/client/v4/accounts/a/ai/v1"):
        answer = await client.post(f"{base}/{path}", json={"model": MODEL, "input": "x"})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (404, "unknown_url")
        assert error["message"].startswith("This server has no ")
        assert ("errors" in answer.json()) is (base != "/v1")
    other = await client.post("/v1/nothing", json={})
    message = other.json()["error"]["message"]
    assert message == "No route for that URI: /v1/nothing; `GET /openapi.json` lists the routes."


@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/api/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/v1/embedding", "/v1/embeddings"),
        ("/api/chatz", "/api/chat"),
        ("/client/v4/accounts/acme/ai/models/serch", "/client/v4/accounts/{account}/ai/models/search"),
    ],
)
async def test_a_path_without_a_route_names_the_nearest(client: httpx.AsyncClient, path: str, nearest: str) -> None:
    answer = await client.post(path, json={})
    assert answer.status_code == 404
    assert f"did you mean `{nearest}`?" in answer.text


async def test_a_long_path_is_cut(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/chat/" + "%0d%0a" * 1000, json={})
    assert answer.status_code == 404
    assert len(answer.content) < 500


def choices_of(schema: Mapping[str, Any]) -> bool:
    return "enum" in schema or schema.get("type") == "boolean"


@pytest.mark.parametrize(
    "route", [route for route in ROUTES if any(map(choices_of, (route.query or {}).values()))], ids=lambda one: one.path
)
async def test_the_choices_of_a_query_are_enforced(
    service: FakeService,
    webhooks: WebhookService,
    batches: BatchService,
    accounts: AccountService,
    gateways: GatewayService,
    route: Route,
) -> None:
    async with client_of(service, KEY, webhooks, batches, accounts, gateways) as client:
        client.headers["authorization"] = f"Bearer {KEY}"
        for name in [name for name, schema in (route.query or {}).items() if choices_of(schema)]:
            body = None if route.method == "GET" else {}
            answer = await client.request(route.method, url(route), params={name: "bogus"}, json=body)
            assert answer.status_code == 400, (name, answer.text)
            assert f"`{name}` must be" in answer.text


async def test_the_document_names_models_to_those_who_may_use_them(service: FakeService) -> None:
    async with client_of(service, KEY) as client:
        assert MODEL not in (await client.get("/openapi.json")).text
        answer = await client.get("/openapi.json", headers={"authorization": f"Bearer {KEY}"})
    schemas = answer.json()["components"]["schemas"]
    assert MODEL in schemas["ChatRequest"]["properties"]["model"]["enum"]
    paths = answer.json()["paths"]
    reply = paths["/v1/chat/completions"]["post"]["responses"]["200"]["content"]
    assert reply["application/json"]["schema"] == {"$ref": "#/components/schemas/ChatCompletion"}
    assert "multipart/form-data" in paths["/v1/files"]["post"]["requestBody"]["content"]
