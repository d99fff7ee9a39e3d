"""The admin API for accounts, keys and the audit log."""

import time
from collections.abc import AsyncIterator

import httpx
import pytest

from emberline.accounts.account_service import AccountService
from emberline.accounts.api_key import is_well_formed
from emberline.api.http.router import Policy
from emberline.api.routes import ROUTES
from tests.api.fake_service import KEY, MODEL, FakeService, client_of

ADMIN = {"authorization": f"Bearer {KEY}"}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def admin(service: FakeService, accounts: AccountService) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(service, KEY, accounts=accounts) as client:
        client.headers.update(ADMIN)
        yield client


async def create(admin: httpx.AsyncClient, **fields: object) -> dict[str, str]:
    answer = await admin.post("/api/keys", json={"account": "acme", **fields})
    assert answer.status_code == 200, answer.text
    created: dict[str, str] = answer.json()
    return created


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_a_key_is_shown_once_and_works(admin: httpx.AsyncClient) -> None:
    created = await create(admin, name="laptop", requests_per_minute=60, budget="12.50", budget_period="month")
    key = created.pop("key")
    assert is_well_formed(key)
    assert (created["account"], created["budget"], created["requests_per_minute"]) == ("acme", "12.50", 60)
    for path in ("/api/keys", f"/api/keys/{created['id']}", "/api/audit", "/api/accounts"):
        answer = await admin.get(path)
        assert answer.status_code == 200
        assert key not in answer.text
        assert key[10:40] not in answer.text
    assert (await admin.get(f"/api/keys/{created['id']}")).json() == created
    answer = await admin.post("/v1/chat/completions", json=CHAT, headers=bearer(key))
    assert answer.status_code == 200


async def test_a_tenant_cannot_use_the_admin_routes(admin: httpx.AsyncClient) -> None:
    key = (await create(admin))["key"]
    for route in ROUTES:
        if route.policy is Policy.ADMIN:
            path = route.path.replace("{id}", "x").replace("{model}", MODEL)
            answer = await admin.request(route.method, path, json={}, headers=bearer(key))
            assert answer.status_code == 403, path
            assert "admin key" in answer.text


async def test_rotation_and_revocation(admin: httpx.AsyncClient) -> None:
    created = await create(admin)
    path = f"/api/keys/{created['id']}"
    rotated = (await admin.post(f"{path}/rotate", json={"overlap_s": 60})).json()
    for key in (created["key"], rotated["key"]):
        assert (await admin.get("/v1/models", headers=bearer(key))).status_code == 200
    assert (await admin.post(f"{path}/rotate", json={"overlap_s": -1})).status_code == 400
    revoked = (await admin.post(f"{path}/revoke")).json()
    assert abs(revoked["revoked_at"] - time.time()) < 600
    for key in (created["key"], rotated["key"]):
        answer = await admin.get("/v1/models", headers=bearer(key))
        assert (answer.status_code, answer.json()["error"]["message"]) == (401, "this API key was revoked")
    assert (await admin.post(f"{path}/rotate")).status_code == 409


async def test_scope_of_apis_and_models(admin: httpx.AsyncClient, service: FakeService) -> None:
    created = await create(admin, apis=["models"])
    key = bearer(created["key"])
    answer = await admin.post("/v1/chat/completions", json=CHAT, headers=key)
    assert answer.status_code == 403
    assert "may not use the API 'chat'" in answer.json()["error"]["message"]
    assert (await admin.get("/v1/models", headers=key)).status_code == 200
    path = f"/api/keys/{created['id']}"
    changed = (await admin.patch(path, json={"apis": [], "models": ["other/*"], "concurrency": 3})).json()
    assert (changed["apis"], changed["models"], changed["concurrency"]) == ([], ["other/*"], 3)
    await admin.post("/v1/chat/completions", json=CHAT, headers=key)
    assert service.principals[-1].models == ("other/*",)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"account": "../x"}, "account"),
        ({}, "account"),
        ({"account": "a", "apis": ["everything"]}, "apis"),
        ({"account": "a", "models": ["m"] * 65}, "models"),
        ({"account": "a", "models": ["m" * 1_000_000]}, "models"),
        ({"account": "a", "requests_per_minute": 0}, "requests_per_minute"),
        ({"account": "a", "requests_per_minute": 1 << 63}, "requests_per_minute"),
        ({"account": "a", "budget": "-1"}, "budget"),
        ({"account": "a", "budget": "1e99"}, "budget"),
        ({"account": "a", "budget_period": "week"}, "budget_period"),
        ({"account": "a", "expires_at": "yesterday"}, "expires_at"),
        ({"account": "a", "expires_at": 1}, "expires_at"),
        ({"account": "a", "expires_at": 1 << 62}, "expires_at"),
        ({"account": "a", "role": "root"}, "role"),
        ({"account": "a", "name": "a\nb"}, "name"),
        ({"account": "a", "rpm": 5}, "rpm"),
    ],
)
async def test_bad_keys_are_refused_by_field(admin: httpx.AsyncClient, body: dict[str, object], field: str) -> None:
    answer = await admin.post("/api/keys", json=body)
    assert answer.status_code == 400
    assert field in answer.text
    assert (await admin.get("/api/keys")).json()["data"] == []


async def test_accounts(admin: httpx.AsyncClient) -> None:
    created = await admin.post("/api/accounts", json={"id": "acme", "tokens_per_minute": 1000, "budget": "5"})
    assert created.json()["budget"] == "5.00"
    assert (await admin.post("/api/accounts", json={"id": "acme"})).status_code == 409
    key = bearer((await create(admin))["key"])
    changed = await admin.patch("/api/accounts/acme", json={"budget": None, "disabled": True})
    assert (changed.json()["budget"], changed.json()["tokens_per_minute"]) == (None, 1000)
    answer = await admin.get("/v1/models", headers=key)
    assert (answer.status_code, answer.json()["error"]["message"]) == (403, "account acme is disabled")
    await admin.patch("/api/accounts/acme", json={"disabled": False})
    assert (await admin.get("/v1/models", headers=key)).status_code == 200
    assert [account["id"] for account in (await admin.get("/api/accounts")).json()["data"]] == ["acme"]
    assert (await admin.get("/api/accounts/none")).status_code == 404


async def test_lists_have_pages(admin: httpx.AsyncClient) -> None:
    ids = {(await create(admin))["id"] for _ in range(5)}
    seen, after = set(), ""
    while True:
        page = (await admin.get("/api/keys", params={"account": "acme", "limit": 2, "after": after})).json()
        seen |= {key["id"] for key in page["data"]}
        if not page["has_more"]:
            break
        after = page["last_id"]
    assert seen == ids
    assert (await admin.get("/api/keys?account=other")).json()["data"] == []


async def test_every_admin_act_is_in_the_audit_log(admin: httpx.AsyncClient) -> None:
    created = await create(admin, name="laptop")
    await admin.post(f"/api/keys/{created['id']}/revoke")
    await admin.post("/api/workers/drain", json={"name": "smollm2-0"})
    await admin.post("/api/workers/drain", json={})  # refused, so nothing was done
    await admin.get("/api/ps")
    entries = (await admin.get("/api/audit")).json()["data"]
    acts = [(entry["act"], entry["target"]) for entry in entries]
    assert acts == [
        ("POST /api/workers/drain", "smollm2-0"),
        ("key.revoke", created["id"]),
        ("key.create", created["id"]),
    ]
    assert {entry["actor"] for entry in entries} != {""}
    assert entries[0]["source"] == "127.0.0.1"
    found = (await admin.get("/api/audit/verify")).json()
    assert (found["intact"], found["entries"]) == (True, 3)
    assert (await admin.get("/api/audit/verify", params={"head": "x"})).status_code == 400


async def test_no_secret_reaches_the_audit_log(admin: httpx.AsyncClient) -> None:
    joining = {"name": "gpu2", "url": "http://10.0.0.2:8000", "key": "join-token-of-the-worker"}
    assert (await admin.post("/api/workers/join", json=joining)).status_code == 200
    created = await create(admin)
    rotated = (await admin.post(f"/api/keys/{created['id']}/rotate")).json()
    shown = (await admin.get("/api/audit")).text
    assert '"gpu2"' in shown
    for secret in ("join-token", created["key"][:20], rotated["key"][:20], KEY):
        assert secret not in shown


async def test_where_an_act_came_from_cannot_be_forged(admin: httpx.AsyncClient) -> None:
    forged = {"x-forwarded-for": "6.6.6.6", "forwarded": "for=6.6.6.6", "x-real-ip": "6.6.6.6"}
    await admin.post("/api/accounts", json={"id": "acme"}, headers=forged)
    (entry,) = (await admin.get("/api/audit")).json()["data"]
    assert entry["source"] == "127.0.0.1"


async def test_a_server_without_a_store_says_so(service: FakeService) -> None:
    async with client_of(service) as client:
        answer = await client.get("/api/keys")
        assert (answer.status_code, "without a store" in answer.text) == (503, True)
