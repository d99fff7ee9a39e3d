"""Limits of keys and accounts, enforced in the core for every request."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path

import pytest

from emberline.accounts.account import Limits
from emberline.accounts.account_service import AccountService, KeyGrant
from emberline.accounts.audit_log import Actor
from emberline.accounts.secret import Secret
from emberline.balancer.route_request import Route
from emberline.protocol.errors import Forbidden, Overloaded, RateLimited
from emberline.protocol.events import Completed
from emberline.protocol.rate_limits import RateLimits
from emberline.protocol.request import Principal
from emberline.service import Service
from emberline.service.core import LocalCore
from emberline.service.request_context import JobContext
from emberline.store import Database, open_store
from tests.service.conftest import Opener
from tests.service.fake_engine import FakeEngine, Script
from tests.service.test_service import ask, events_of

ADMIN = Actor("admin", "here")


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Database]:
    store = await open_store(tmp_path / "limits.db")
    yield store
    await store.close()


@pytest.fixture
async def accounts(store: Database) -> AsyncIterator[AccountService]:
    accounts = AccountService(store, Secret("s" * 32))
    await accounts.open()
    yield accounts
    await accounts.close()


@pytest.fixture
async def limited(engine: FakeEngine, open_one: Opener, accounts: AccountService, store: Database) -> Service:
    return await open_one(engine, directory=accounts.directory, store=store)


async def key_with(accounts: AccountService, **limits: int) -> Principal:
    issued = await accounts.create_key(ADMIN, "acme", KeyGrant(limits=Limits(**limits)))
    return Principal("acme", issued.record.id, b"a" * 16)


async def test_requests_a_minute(limited: Service, accounts: AccountService) -> None:
    key = await key_with(accounts, requests_per_minute=2)
    for _ in range(2):
        assert isinstance((await events_of(limited, ask(), key))[-1], Completed)
    with pytest.raises(RateLimited, match="2 requests a minute") as refused:
        await events_of(limited, ask(), key)
    assert refused.value.rate_limits is not None
    assert refused.value.rate_limits.requests is not None
    assert refused.value.rate_limits.requests.remaining == 0
    other = await key_with(accounts, requests_per_minute=2)
    await events_of(limited, ask(), other)


async def test_tokens_are_taken_for_the_worst_case_and_put_back(limited: Service, accounts: AccountService) -> None:
    key = await key_with(accounts, tokens_per_minute=1000)
    seen: list[RateLimits | None] = []
    async with aclosing(limited.generate(ask(sampling={"max_tokens": 100}), key, on_admit=seen.append)) as events:
        *_, completed = [event async for event in events]
    assert isinstance(completed, Completed)
    used = completed.usage.prompt_tokens + completed.usage.completion_tokens
    (limits,) = seen
    assert limits is not None
    assert limits.tokens is not None
    assert limits.tokens.remaining == 1000 - completed.usage.prompt_tokens - 100
    async with aclosing(limited.generate(ask(sampling={"max_tokens": 100}), key, on_admit=seen.append)) as events:
        await anext(events)
    assert seen[1] is not None
    assert seen[1].tokens is not None
    assert seen[1].tokens.remaining in range(1000 - used - completed.usage.prompt_tokens - 100, 1000 - used)


async def test_concurrency_is_given_back_by_a_client_that_leaves(
    limited: Service, accounts: AccountService, engine: FakeEngine, say: Callable[..., Script]
) -> None:
    key = await key_with(accounts, concurrency=1)
    engine.script = say("and so on", end=False)
    async with aclosing(limited.generate(ask(), key)) as events:
        await anext(events)
        with pytest.raises(RateLimited, match="concurrent requests"):
            await events_of(limited, ask(), key)
    core = limited.core
    assert isinstance(core, LocalCore)
    assert core.limits is not None
    async with asyncio.timeout(5):
        while core.limits.n_held:
            await asyncio.sleep(0.001)
    core.limits.admit("next", key.account, key.key_id, input_tokens=1, output_tokens=1, is_job=False)


async def test_a_request_shed_for_capacity_does_not_count(
    limited: Service, accounts: AccountService, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = await key_with(accounts, requests_per_minute=1, concurrency=1)

    async def full(request: object) -> Route:
        raise Overloaded("full")

    with monkeypatch.context() as patch:
        patch.setattr(limited.core.admission, "admit", full)  # type: ignore[attr-defined]
        with pytest.raises(Overloaded):
            await events_of(limited, ask(), key)
    await events_of(limited, ask(), key)


async def test_queued_jobs_have_no_rate_limit(limited: Service, accounts: AccountService) -> None:
    key = await key_with(accounts, requests_per_minute=1)
    for _ in range(3):
        async with aclosing(limited.generate(ask(), key, JobContext("e0", lambda row: None))) as events:
            assert [event async for event in events]


async def test_an_account_limits_all_of_its_keys_and_may_be_disabled(
    limited: Service, accounts: AccountService
) -> None:
    await accounts.create_account(ADMIN, "acme", Limits(requests_per_minute=1))
    first, second = await key_with(accounts), await key_with(accounts)
    await events_of(limited, ask(), first)
    with pytest.raises(RateLimited, match="account acme"):
        await events_of(limited, ask(), second)
    await accounts.update_account(ADMIN, "acme", Limits())
    await events_of(limited, ask(), second)
    await accounts.update_account(ADMIN, "acme", disabled=True)
    with pytest.raises(Forbidden):
        await events_of(limited, ask(), second)
