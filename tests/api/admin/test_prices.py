"""The admin API for prices, and usage reports: an admin sees all accounts, a key its own."""

import csv
import io
import time
from collections.abc import AsyncIterator

import httpx
import msgspec
import pytest

from emberline.accounts.account_service import AccountService
from emberline.accounts.usage_ledger import UsageLedger
from emberline.protocol.price import Price
from tests.accounts.test_usage_ledger import ROW
from tests.api.fake_service import KEY, MODEL, FakeService, client_of

from .test_accounts import ADMIN, bearer, create

KIMI = {"model": "@cf/Moonshotai/kimi-k2.5", "input": "0.60", "cached_input": 0.1, "output": 3, "batch": 50}


def ledger_of(accounts: AccountService) -> UsageLedger:
    return UsageLedger(accounts.prices._store)


@pytest.fixture
async def admin(service: FakeService, accounts: AccountService) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(service, KEY, accounts=accounts) as client:
        client.headers.update(ADMIN)
        yield client


async def test_prices_are_set_listed_and_kept(admin: httpx.AsyncClient, service: FakeService) -> None:
    assert (await admin.get("/api/prices")).json()["data"] == []
    answer = await admin.post("/api/prices", json=KIMI)
    assert answer.status_code == 200, answer.text
    price = {"input": "0.60", "cached_input": "0.10", "output": "3.00", "batch": 50}
    assert answer.json()["price"] == price
    assert service.price_refreshes == 1
    await admin.post("/api/prices", json=KIMI | {"output": "2.5", "valid_from": "2099-01-01T00:00:00Z"})
    (now,) = (await admin.get("/api/prices")).json()["data"]
    assert (now["version"], now["price"], now["source"]) == (1, price, "admin")
    history = (await admin.get("/api/prices", params={"model": KIMI["model"]})).json()["data"]
    assert [version["version"] for version in history] == [1, 2]
    acts = [(entry["act"], entry["target"]) for entry in (await admin.get("/api/audit")).json()["data"]]
    assert acts == [("price.set", KIMI["model"])] * 2
    await admin.post("/api/prices", json={"model": MODEL, "input": 1})
    key = (await create(admin))["key"]
    (seen,) = (await admin.get("/api/prices", headers=bearer(key))).json()["data"]
    assert "created_by" not in seen
    assert (await admin.post("/api/prices", json=KIMI, headers=bearer(key))).status_code == 403


async def test_an_alias_is_priced_as_its_model_and_a_price_can_be_taken_away(admin: httpx.AsyncClient) -> None:
    answer = await admin.post("/api/prices", json={"model": MODEL.upper(), "input": 1})
    assert answer.json()["model"] == MODEL.lower()
    assert (await admin.post("/api/prices/remove", json={"model": MODEL})).json()["price"] is None
    assert (await admin.get("/api/prices")).json()["data"] == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input": "-1"}, "`input`"),
        ({"input": 1e-9}, "`input`"),
        ({"input": "0.05", "cached_input": "0.1"}, "cached input"),
        ({"input": 99999}, "cannot be used"),
        ({"flex": 33, "input": "0.000001", "cached_input": 0}, "33 %"),
        ({"valid_from": "2020-01-01"}, "past"),
        ({"valid_from": "soon"}, "valid_from"),
        ({"model": "x" * 1_000_000}, "model"),
        ({"discount": 1}, "discount"),
    ],
)
async def test_wrong_prices_are_refused(admin: httpx.AsyncClient, change: dict[str, object], message: str) -> None:
    answer = await admin.post("/api/prices", json=KIMI | change)
    assert answer.status_code == 400
    assert message in answer.text
    assert len(answer.text) < 1000
    assert (await admin.get("/api/prices", params={"model": "unknown"})).status_code == 404


async def test_reports_of_all_accounts_and_of_ones_own(admin: httpx.AsyncClient, accounts: AccountService) -> None:
    ledger, now_us = ledger_of(accounts), time.time_ns() // 1000
    for n, account in enumerate(("acme", "acme", "other")):
        cost_pico = None if n == 2 else 10**12
        row = msgspec.structs.replace(ROW, id=str(n), account=account, created_us=now_us, cost_pico=cost_pico)
        await ledger.record(row)
    report = (await admin.get("/api/usage", params={"by": "account"})).json()
    assert [(row["account"], row["requests"], row["cost"]) for row in report["data"]] == [
        ("acme", 2, "2.00"),
        ("other", 1, None),
    ]
    assert (report["total"]["cost"], report["total"]["without_price"]) == ("2.00", 1)
    key = (await create(admin))["key"]
    own = (await admin.get("/api/usage", params={"by": "account,key,class"}, headers=bearer(key))).json()
    assert [(row["account"], row["key"], row["class"]) for row in own["data"]] == [("acme", "k1", "flex")]
    assert own["total"]["requests"] == 2
    refused = await admin.get("/api/usage", params={"account": "other"}, headers=bearer(key))
    assert refused.status_code == 403
    answer = await admin.get("/api/usage", params={"by": "model", "format": "csv", "since": "1d"})
    assert answer.headers["content-type"] == "text/csv; charset=utf-8"
    (line,) = csv.DictReader(io.StringIO(answer.text))
    assert (line["model"], line["requests"], line["cached_tokens"]) == (ROW.model, "3", "18")
    for wrong in ({"by": "price"}, {"since": "never"}, {"since": "0d", "until": "3d"}, {"format": "xml"}):
        assert (await admin.get("/api/usage", params=wrong)).status_code == 400


async def test_a_report_says_what_the_same_tokens_cost_elsewhere_and_without_the_cache(
    admin: httpx.AsyncClient, accounts: AccountService
) -> None:
    row = {"input_tokens": 1_000_000, "cached_by_tier": {"device": 600_000}, "output_tokens": 100_000}
    price = Price(input=1_000_000, cached_input=100_000, output=4_000_000)
    used = msgspec.structs.replace(
        ROW, id="1", account="acme", created_us=time.time_ns() // 1000, priority="default", **row
    )
    await ledger_of(accounts).record(used.priced(price))
    assert (await admin.get("/api/usage", params={"compare": MODEL})).json()["error"]["param"] == "compare"
    await admin.post("/api/prices", json={"model": MODEL, "input": 3, "cached_input": "0.30", "output": 15})
    found = (await admin.get("/api/usage", params={"by": "", "compare": MODEL})).json()["comparison"]
    assert (found["cost_without_cache"], found["cost"]) == ("1.40", "2.88")
    assert found["sentence"] == (
        f"1 requests cost 0.86, without the prefix cache 1.40; at the prices of {MODEL} 2.88 = 400,000 uncached input"
        " tokens × 3.00 + 600,000 cached input tokens × 0.30 + 100,000 output tokens × 15.00 per million."
    )
    key = (await create(admin, models=["@cf/a/other"]))["key"]
    assert (await admin.get("/api/usage", params={"compare": MODEL}, headers=bearer(key))).status_code == 403


async def test_a_key_sees_the_prices_of_its_models_alone(admin: httpx.AsyncClient) -> None:
    """The name of a model tells that another account has it, such as one of a provider of its own."""
    hidden = "p5/theirs"
    for model in (MODEL, hidden):
        assert (await admin.post("/api/prices", json={"model": model, "input": 3, "output": 15})).status_code == 200
    key, other = [bearer((await create(admin, **more))["key"]) for more in ({}, {"models": ["@cf/a/other"]})]

    async def seen(headers: dict[str, str]) -> list[str]:
        rows = (await admin.get("/api/prices", headers=headers)).json()["data"]
        return sorted(row["model"] for row in rows if row["model"] in (MODEL, hidden))

    assert await seen({}) == sorted([MODEL, hidden])
    assert await seen(key) == [MODEL]
    assert await seen(other) == []
    for model, headers, status in ((MODEL, key, 200), (hidden, key, 404), (MODEL, other, 404), (hidden, {}, 200)):
        answer = await admin.get("/api/prices", params={"model": model}, headers=headers)
        assert answer.status_code == status, (model, answer.text)


async def test_a_nul_which_one_database_cannot_store_is_refused(admin: httpx.AsyncClient) -> None:
    assert (await admin.get("/api/usage?model=%00")).status_code == 400
    assert (await admin.get("/api/keys/%00")).status_code == 404
    assert (await admin.post("/api/prices", json=KIMI | {"model": "a\0b"})).status_code == 400
