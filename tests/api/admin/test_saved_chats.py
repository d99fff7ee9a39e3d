"""Saved chats over HTTP: an account's own, whole or by summary; bad input says what to do."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from emberline.accounts.account_service import AccountService
from tests.api.admin.test_accounts import ADMIN, bearer, create
from tests.api.fake_service import KEY, FakeService, client_of

CHAT = {"id": "c1", "title": "Lighthouses", "text": "What is a lighthouse for?", "document": {"panes": [1, "ü"]}}


@pytest.fixture
async def admin(service: FakeService, accounts: AccountService) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(service, KEY, accounts=accounts) as client:
        client.headers.update(ADMIN)
        yield client


async def test_a_key_keeps_the_chats_of_its_account(admin: httpx.AsyncClient) -> None:
    mine, theirs = [bearer((await create(admin, account=account))["key"]) for account in ("acme", "other")]
    saved = await admin.post("/api/chats", json=CHAT, headers=mine)
    assert saved.status_code == 200, saved.text
    assert saved.json().items() >= {"id": "c1", "object": "chat", "title": "Lighthouses"}.items()
    await admin.post("/api/chats", json=CHAT | {"id": "c2", "title": "Tea", "text": ""}, headers=mine)

    async def listed(headers: dict[str, str], **query: Any) -> list[str]:
        answer = await admin.get("/api/chats", params=query, headers=headers)
        return [chat["id"] for chat in answer.json()["data"]]

    assert await listed(mine, q="LIGHTHOUSE for") == ["c1"]
    first = (await admin.get("/api/chats", params={"limit": 1}, headers=mine)).json()
    assert first["has_more"]
    assert [first["last_id"], *await listed(mine, after=first["last_id"])] == ["c2", "c1"]
    assert await listed(theirs) == []
    assert (await admin.get("/api/chats/c1", headers=theirs)).status_code == 404
    assert (await admin.get("/api/chats/c1", headers=mine)).json()["document"] == CHAT["document"]
    renamed = await admin.patch("/api/chats/c1", json={"title": "Towers"}, headers=mine)
    assert renamed.json()["title"] == "Towers"
    assert (await admin.delete("/api/chats/c1", headers=mine)).json()["deleted"] is True
    assert (await admin.delete("/api/chats/c1", headers=mine)).status_code == 404
    assert (await admin.delete("/api/chats", headers=mine)).json() == {"object": "chat.deletion", "deleted": 1}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"id": "../x"}, "id"),
        ({"title": ""}, "title"),
        ({"title": "t" * 201}, "title"),
        ({"title": "a\0b"}, "title"),
        ({"text": 5}, "text"),
        ({"document": "x" * (17 << 20)}, "document"),
    ],
)
async def test_what_cannot_be_saved_is_refused_by_its_field(
    admin: httpx.AsyncClient, change: dict[str, Any], field: str
) -> None:
    answer = await admin.post("/api/chats", json=CHAT | change)
    assert answer.status_code in (400, 413), answer.text
    assert answer.json()["error"]["param"] == field
    assert (await admin.get("/api/chats")).json()["data"] == []


async def test_a_search_for_too_much_text_is_refused(admin: httpx.AsyncClient) -> None:
    answer = await admin.get("/api/chats", params={"q": "x" * 201})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "q")


async def test_a_large_chat_comes_in_pieces(admin: httpx.AsyncClient) -> None:
    large = CHAT | {"document": ["é" * (1 << 20), {}], "text": "a\0b"}
    saved = (await admin.post("/api/chats", json=large)).json()
    async with admin.stream("GET", "/api/chats/c1") as answer:
        body = await answer.aread()
    assert int(answer.headers["content-length"]) == len(body)
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == saved | {"document": large["document"]}
    assert [chat["id"] for chat in (await admin.get("/api/chats", params={"q": "a b"})).json()["data"]] == ["c1"]
