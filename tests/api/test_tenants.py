"""What belongs to one account is invisible to every other: 404, as if it did not exist."""

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from emberline.accounts.account_service import AccountService, KeyGrant
from emberline.accounts.audit_log import Actor
from emberline.api.batch_loader import BatchService
from emberline.api.http.router import ANY_API, Policy
from emberline.api.routes import ROUTES
from emberline.jobs.webhooks.service import WebhookService
from emberline.protocol.errors import ErrorInfo
from tests.api.batch_fixtures import OWNER, run_all
from tests.api.fake_service import KEY, MODEL, FakeService, client_of
from tests.jobs.queue.helpers import new_batch, new_jobs
from tests.jobs.webhooks.helpers import emit_event

TEST = Actor("test")
AI = "/client/v4/accounts/alice/ai"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
LINE = {"custom_id": "c0", "method": "POST", "url": "/v1/chat/completions", "body": CHAT}


class Tenants:
    def __init__(self, client: httpx.AsyncClient, keys: dict[str, str]) -> None:
        self._client = client
        self._keys = keys

    async def ask(self, who: str, method: str, path: str, **content: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {self._keys[who]}", **content.pop("headers", {})}
        return await self._client.request(method, path, headers=headers, **content)

    async def post(self, who: str, path: str, body: Any = None, **content: Any) -> dict[str, Any]:
        answer = await self.ask(who, "POST", path, json=body, **content)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def get(self, who: str, path: str) -> dict[str, Any]:
        answer = await self.ask(who, "GET", path)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def hidden(self, method: str, path: str, body: Any = None) -> None:
        """Bob cannot see or change what alice has, by her id or under her path."""
        content = {} if body is None else {"json": body}
        answer = await self.ask("bob", method, path, **content)
        assert answer.status_code == 404, (method, path, answer.text)
        missing = await self.ask("bob", method, _other_id(path), **json.loads(_other_id(json.dumps(content))))
        assert _without_ids(answer) == _without_ids(missing), "an id of alice is answered as one that nobody has"


_ID = re.compile(r"[0-9a-f-]{12,}")


def _other_id(text: str) -> str:
    """The text with ids of the same form that nobody has."""
    others = str.maketrans("0123456789abcdef", "123456789abcdef0")
    return _ID.sub(lambda found: found[0].translate(others), text)


def _without_ids(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, _ID.sub("ID", answer.text)


@pytest.fixture
async def tenants(
    service: FakeService, webhooks: WebhookService, batches: BatchService, accounts: AccountService
) -> AsyncIterator[Tenants]:
    keys = {who: (await accounts.create_key(TEST, who)).key.text for who in ("alice", "bob")}
    keys["admin"] = KEY
    async with client_of(service, KEY, webhooks, batches, accounts) as client:
        yield Tenants(client, keys)


async def upload(tenants: Tenants) -> dict[str, Any]:
    file = {"file": ("in.jsonl", json.dumps(LINE).encode() + b"\n")}
    return await tenants.post("alice", "/v1/files", files=file, data={"purpose": "batch"})


async def test_files(tenants: Tenants) -> None:
    file = await upload(tenants)
    for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        await tenants.hidden(method, f"/v1/files/{file['id']}{path}")
    assert (await tenants.get("bob", "/v1/files"))["data"] == []
    assert [found["id"] for found in (await tenants.get("alice", "/v1/files"))["data"]] == [file["id"]]


async def test_batches_and_their_results(tenants: Tenants, batches: BatchService, service: FakeService) -> None:
    file = await upload(tenants)
    body = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    stolen = await tenants.ask("bob", "POST", "/v1/batches", json=body)
    assert stolen.status_code in (400, 404)
    assert "hi" not in stolen.text
    batch = await tenants.post("alice", "/v1/batches", body)
    await batches.queue.batch("alice", batch["id"])
    while not await run_all(batches.queue, service):
        await batches.queue.sweep()
    done = await tenants.get("alice", f"/v1/batches/{batch['id']}")
    for method, path in (("GET", ""), ("POST", "/cancel"), ("DELETE", "")):
        await tenants.hidden(method, f"/v1/batches/{batch['id']}{path}")
        await tenants.hidden(method, f"/v1/messages/batches/{batch['id']}{path}")
    await tenants.hidden("GET", f"/v1/files/{done['output_file_id']}/content")
    assert (await tenants.get("bob", "/v1/batches"))["data"] == []


async def test_message_batches(tenants: Tenants) -> None:
    message = {"model": MODEL, "max_tokens": 5, "messages": CHAT["messages"]}
    batch = await tenants.post("alice", "/v1/messages/batches", {"requests": [{"custom_id": "a", "params": message}]})
    for method, path in (("GET", ""), ("GET", "/results"), ("POST", "/cancel"), ("DELETE", "")):
        await tenants.hidden(method, f"/v1/messages/batches/{batch['id']}{path}")
    assert (await tenants.get("bob", "/v1/messages/batches"))["data"] == []


async def test_queued_runs(tenants: Tenants) -> None:
    run = await tenants.post("alice", f"{AI}/run/{MODEL}?queueRequest=true", {"requests": [{"prompt": "hi"}]})
    request_id = run["result"]["request_id"]
    own = "/client/v4/accounts/bob/ai"
    answer = await tenants.ask("bob", "POST", f"{own}/run/{MODEL}?queueRequest=true", json={"request_id": request_id})
    assert answer.status_code in (400, 404), answer.text
    assert "hi" not in answer.text


async def test_stored_responses(tenants: Tenants) -> None:
    stored = await tenants.post("alice", "/v1/responses", {"model": MODEL, "input": "hi", "store": True})
    background = await tenants.post("alice", "/v1/responses", {"model": MODEL, "input": "hi", "background": True})
    for found in (stored, background):
        path = f"/v1/responses/{found['id']}"
        for method, rest in (("GET", ""), ("GET", "/input_items"), ("POST", "/cancel"), ("DELETE", "")):
            await tenants.hidden(method, path + rest)
        body = {"model": MODEL, "input": "more", "previous_response_id": found["id"]}
        answer = await tenants.ask("bob", "POST", "/v1/responses", json=body)
        assert answer.json()["error"]["code"] == "previous_response_not_found"


async def test_webhooks_and_event_subscriptions(tenants: Tenants) -> None:
    endpoint = await tenants.post("alice", "/v1/webhook_endpoints", {"url": "http://127.0.0.1:1/"})
    path = f"/v1/webhook_endpoints/{endpoint['id']}"
    for method, rest, body in (
        *(("GET", "", None), ("GET", "/deliveries", None), ("DELETE", "", None)),
        *(("POST", "", {"enabled": False}), ("POST", "/replay", {}), ("POST", "/rotate", {})),
    ):
        await tenants.hidden(method, path + rest, body)
    assert (await tenants.get("bob", "/v1/webhook_endpoints"))["data"] == []
    assert (await tenants.get("alice", path))["enabled"]


async def test_events(tenants: Tenants, webhooks: WebhookService) -> None:
    await emit_event(webhooks._db, "batch_1", account="alice")
    assert len((await tenants.get("alice", "/v1/events"))["data"]) == 1
    assert (await tenants.get("bob", "/v1/events"))["data"] == []


async def test_dead_letters(tenants: Tenants, batches: BatchService) -> None:
    queue = batches.queue
    batch = await queue.submit(new_batch("alice"), new_jobs(1))
    for alone in (False, False, True):
        await queue._store.write("UPDATE lines SET ready_us = 0")
        (lease,) = await queue.claim(OWNER, "m", 1, quarantined=alone)
        await queue.fail(lease, ErrorInfo("unavailable", "gone"), retry=True, killed=True)
    mine, hers, all_of_them = [await tenants.get(who, "/api/queue") for who in ("bob", "alice", "admin")]
    assert (mine["n_dead"], mine["dead"], mine["waiting"]) == (0, [], [])
    assert hers["n_dead"] == all_of_them["n_dead"] == len(hers["dead"]) == 1
    await tenants.hidden("POST", "/api/queue/replay", {"batch": batch.id})
    assert (await tenants.post("alice", "/api/queue/replay", {"batch": batch.id}))["replayed"] == 1
    assert (await tenants.get("bob", "/api/queue"))["waiting"] == []
    assert len((await tenants.get("alice", "/api/queue"))["waiting"]) == 1


async def test_idempotency_keys(tenants: Tenants) -> None:
    key = {"headers": {"idempotency-key": "same"}}
    message = {"model": MODEL, "max_tokens": 5, "messages": CHAT["messages"]}
    body = {"requests": [{"custom_id": "a", "params": message}]}
    hers = await tenants.post("alice", "/v1/messages/batches", body, **key)
    his = await tenants.post("bob", "/v1/messages/batches", body, **key)
    assert hers["id"] != his["id"]


async def test_sessions(tenants: Tenants, service: FakeService) -> None:
    """A session id belongs to an account: the service gets both, and routes and caches by both."""
    for who in ("alice", "bob"):
        await tenants.post(who, "/v1/chat/completions", CHAT, headers={"x-session-affinity": "shared-name"})
    hers, his = service.principals
    assert (hers.account, his.account) == ("alice", "bob")
    assert hers.salt != his.salt
    assert {request.session for request in service.requests} == {"shared-name"}


async def test_a_path_says_me_for_the_account_of_the_key(tenants: Tenants, service: FakeService) -> None:
    for who in ("alice", "bob"):
        answer = await tenants.post(who, f"/client/v4/accounts/me/ai/run/{MODEL}", {"prompt": "hello"})
        assert answer["success"], answer
    assert [principal.account for principal in service.principals] == ["alice", "bob"]


async def test_the_path_of_another_account_is_refused(tenants: Tenants, service: FakeService) -> None:
    for route in ROUTES:
        if "{account}" not in route.path:
            continue
        path = route.path.replace("{account}", "alice").replace("{model}", MODEL).replace("{id}", "x")
        answer = await tenants.ask("bob", route.method, path, json={})
        assert answer.status_code == 403, path
        assert "belongs to account bob and may not act for account alice" in answer.text
        for other in ("bob%2f..%2falice", "bob/../alice", "Bob", "%62ob/"):
            tricked = await tenants.ask("bob", route.method, path.replace("alice", other), json={})
            assert tricked.status_code in (400, 403, 404, 405), other
    assert service.requests == []


async def test_the_keys_account_applies_without_one_in_the_path(tenants: Tenants, service: FakeService) -> None:
    await tenants.post("alice", "/v1/chat/completions", CHAT)
    assert service.principals[-1].account == "alice"


async def test_every_key_route_declares_its_api(tenants: Tenants, accounts: AccountService) -> None:
    """A key with a scope gets exactly the routes of that API."""
    limited = await accounts.create_key(TEST, "alice", KeyGrant(apis=("files",)))
    tenants._keys["limited"] = limited.key.text
    for route in ROUTES:
        if route.policy is Policy.OPEN:
            continue
        assert (route.api != "") == (route.policy is Policy.KEY), route.path
        if route.api == ANY_API:  # its endpoint checks which API a request leads to
            continue
        path = route.path.replace("{account}", "alice").replace("{model}", MODEL).replace("{id}", "x")
        answer = await tenants.ask("limited", route.method, path, json={})
        assert (answer.status_code == 403) == (route.api != "files"), route.path


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "localhost:1"},
        {"x-forwarded-host": "admin", "x-forwarded-for": "127.0.0.1", "x-forwarded-proto": "https"},
        {"forwarded": "for=127.0.0.1;host=localhost"},
        {"x-original-url": "/health", "x-rewrite-url": "/health"},
        {"x-auth-email": "root@example.org"},
        {"x-account": "alice", "cf-access-client-id": "x"},
        {"x-http-method-override": "GET", "x-method-override": "GET"},
    ],
)
async def test_no_header_but_the_key_lets_anybody_in(
    service: FakeService, accounts: AccountService, headers: dict[str, str]
) -> None:
    async with client_of(service, KEY, accounts=accounts) as client:
        for path in ("/metrics", "/api/ps", "/v1/models", "/api/keys"):
            assert (await client.get(path, headers=headers)).status_code == 401
        for path in ("/health/../api/ps", "//api/ps", "/api/ps?x=/health", "/api/ps#/health", "/API/PS", "/api/ps/"):
            assert (await client.get(path, headers=headers)).status_code in (401, 404)
    assert service.requests == []
