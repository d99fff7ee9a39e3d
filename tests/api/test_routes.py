"""Every route declares its policy, and the policy is enforced."""

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
            assert (answer.status_code == 403) is (route.policy is Policy.ADMIN), (where, answer.text)
            answer = await client.request(route.method, url(route), headers={"authorization": f"Bearer {KEY}"}, json={})
            assert answer.status_code not in (401, 403), where


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
    assert other.json()["error"]["message"] == "No route for that URI"
