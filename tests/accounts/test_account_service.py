import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.accounts.account import Limits, parse_budget
from emberline.accounts.account_service import AccountService, KeyGrant
from emberline.accounts.api_key import key_digest
from emberline.accounts.audit_log import Actor
from emberline.accounts.key_directory import KeyDirectory
from emberline.accounts.secret import Secret
from emberline.protocol.errors import BadInput, Conflict, NotFound
from emberline.protocol.price import format_amount
from emberline.store import BulkQuery, Database, open_store
from tests.databases import DatabaseLocation
from tests.faulty_store import FaultyStore

SECRET = Secret("s" * 32)
ALICE = Actor("key_alice", "127.0.0.1")
LIMITS = Limits(requests_per_minute=60, concurrency=4, budget_pico=12_500_000_000_000, budget_period="month")


@pytest.fixture
async def store(database: DatabaseLocation) -> AsyncIterator[Database]:
    store = await database.open()
    yield store
    await store.close()


@pytest.fixture
async def accounts(store: Database) -> AsyncIterator[AccountService]:
    service = AccountService(store, SECRET)
    await service.open()
    yield service
    await service.close()


async def test_accounts_are_created_limited_and_disabled(accounts: AccountService) -> None:
    created = await accounts.create_account(ALICE, "acme", LIMITS)
    assert created.budget_pico == LIMITS.budget_pico
    assert accounts.directory.account("acme") == created == await accounts.account("acme")
    with pytest.raises(Conflict):
        await accounts.create_account(ALICE, "acme")
    with pytest.raises(NotFound):
        await accounts.update_account(ALICE, "nobody", {})
    with pytest.raises(BadInput):
        await accounts.create_account(ALICE, "../etc")
    changed = await accounts.update_account(ALICE, "acme", {"tokens_per_minute": 1000, "concurrency": None})
    assert (changed.requests_per_minute, changed.tokens_per_minute, changed.concurrency) == (60, 1000, None)
    disabled = await accounts.update_account(ALICE, "acme", disabled=True)
    assert disabled.disabled_us is not None
    assert disabled.tokens_per_minute == 1000
    assert accounts.directory.account("acme") == disabled
    assert [account.id for account in await accounts.accounts()] == ["acme"]


async def test_a_key_is_stored_as_its_hash_only(accounts: AccountService, store: Database) -> None:
    issued = await accounts.create_key(ALICE, "acme", KeyGrant(name="laptop", models=("m",), limits=LIMITS))
    assert issued.record.digest == key_digest(issued.key.text)
    assert await accounts.key(issued.record.id) == issued.record == accounts.directory.key(issued.record.id)
    assert accounts.directory.account("acme") is not None, "created with its first key"
    for table in ("api_keys", "audit_log", "accounts"):
        rows = await store.read(f"SELECT * FROM {table}")
        assert issued.key.text not in repr(rows)
        assert issued.key.text[10:30] not in repr(rows)
    assert issued.key.text not in repr(issued)


async def test_keys_are_listed_by_account(accounts: AccountService) -> None:
    one, two = await accounts.create_key(ALICE, "one"), await accounts.create_key(ALICE, "two")
    assert [key.id for key in await accounts.keys("one")] == [one.record.id]
    assert {key.id for key in await accounts.keys()} == {one.record.id, two.record.id}
    first = await accounts.keys(limit=1)
    rest = await accounts.keys(after=first[0].id, limit=5)
    assert {key.id for key in (*first, *rest)} == {one.record.id, two.record.id}


@pytest.mark.parametrize(
    "grant",
    [
        KeyGrant(name="x" * 200),
        KeyGrant(name="a\nb"),
        KeyGrant(models=("m",) * 65),
        KeyGrant(models=("m" * 257,)),
        KeyGrant(apis=("",)),
        KeyGrant(expires_us=1),
        KeyGrant(role="admin", models=("m",)),
        KeyGrant(role="admin", limits=Limits(budget_pico=1)),
    ],
)
async def test_bad_grants_are_refused(accounts: AccountService, grant: KeyGrant) -> None:
    with pytest.raises(BadInput):
        await accounts.create_key(ALICE, "acme", grant)
    assert await accounts.keys() == []


async def test_rotation_and_revocation_of_unknown_and_revoked_keys(accounts: AccountService) -> None:
    for call in (accounts.rotate_key, accounts.revoke_key):
        with pytest.raises(NotFound):
            await call(ALICE, "key_none")
    issued = await accounts.create_key(ALICE, "acme")
    with pytest.raises(BadInput):
        await accounts.rotate_key(ALICE, issued.record.id, overlap_s=-1)
    revoked = await accounts.revoke_key(ALICE, issued.record.id)
    again = await accounts.revoke_key(ALICE, issued.record.id)
    assert revoked.revoked_us == again.revoked_us
    with pytest.raises(Conflict):
        await accounts.rotate_key(ALICE, issued.record.id)


async def test_changes_reach_the_directory_of_another_process(
    accounts: AccountService, database: DatabaseLocation
) -> None:
    store = await database.open()
    other = AccountService(store, SECRET)
    await other.open()
    issued = await accounts.create_key(ALICE, "acme")
    await accounts.revoke_key(ALICE, issued.record.id)
    async with asyncio.timeout(60):
        while (found := other.directory.key(issued.record.id)) is None or found.revoked_us is None:
            await asyncio.sleep(0.02)
    await other.close()
    await store.close()


async def test_a_key_that_is_created_while_the_directory_is_read_is_known_at_once(
    accounts: AccountService, database: DatabaseLocation
) -> None:
    store = FaultyStore(await database.open())
    other = KeyDirectory(store, poll_s=60.0)
    await other.open()
    has_read, go_on = asyncio.Event(), asyncio.Event()

    async def slowly(name: str, asked: object) -> None:
        has_read.set()
        await go_on.wait()

    store.after = slowly
    reading = asyncio.create_task(other.refresh())
    await has_read.wait()
    issued = await accounts.create_key(ALICE, "acme")
    catching_up = asyncio.create_task(other.catch_up())
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(reading, catching_up)
    assert other.key(issued.record.id) is not None
    await other.close()
    await store.close()


async def test_a_directory_of_more_than_a_page_is_read_whole(accounts: AccountService, store: Database) -> None:
    issued = await accounts.create_key(ALICE, "acme")
    columns = msgspec.structs.asdict(issued.record)
    values = [
        {**columns, "id": f"key_{n}", "digest": n.to_bytes(32, "big"), "models": "[]", "apis": "[]", "version": n + 2}
        for n in range(2100)
    ]
    names = ", ".join(columns)
    insert = f"INSERT INTO api_keys ({names}) VALUES ({', '.join('?' * len(columns))})"
    await store.transaction([BulkQuery(insert, [tuple(row.values()) for row in values])])
    await store.write("UPDATE audit_head SET number = 5000")
    await accounts.directory.refresh()
    assert all(accounts.directory.key(f"key_{n}") is not None for n in range(2100))
    assert accounts.directory.key_of_digest((2099).to_bytes(32, "big")) is not None


async def test_the_directory_outlives_its_store(accounts: AccountService, store: Database) -> None:
    issued = await accounts.create_key(ALICE, "acme")
    await store.close()
    await accounts.directory.catch_up()
    assert accounts.directory.key(issued.record.id) == issued.record


@given(st.integers(0, (1 << 63) - 1))
def test_amounts_are_exact(pico: int) -> None:
    assert parse_budget(format_amount(pico)) == pico


def test_amounts() -> None:
    assert parse_budget("12.50") == 12_500_000_000_000
    assert parse_budget("0.000000000001") == 1
    assert format_amount(12_500_000_000_000) == "12.50"
    for bad in ("", "x", "-1", "nan", "inf", "1e30", "0.0000000000001", "9223373", "1" * 100, "1." + "0" * 27 + "1"):
        with pytest.raises(BadInput):
            parse_budget(bad)


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_directories_of_two_processes_agree_with_the_store(data: st.DataObject) -> None:
    """After any changes by either: every key is found by its digest exactly if the store says so."""

    async def run(folder: Path) -> None:
        stores = [await open_store(folder / "t.db") for _ in range(2)]
        services = [AccountService(store, SECRET) for store in stores]
        for service in services:
            await service.open()
        ids: list[str] = []
        digests: set[bytes] = set()
        for _ in range(data.draw(st.integers(1, 8))):
            service = data.draw(st.sampled_from(services))
            act = data.draw(
                st.sampled_from(("create", "rotate", "revoke", "disable", "update") if ids else ("create",))
            )
            account = data.draw(st.sampled_from(("a", "b")))
            if act == "create":
                issued = await service.create_key(ALICE, account)
                ids.append(issued.record.id)
                digests.add(issued.record.digest)
            elif act == "disable":
                with contextlib.suppress(NotFound):
                    await service.update_account(ALICE, account, disabled=data.draw(st.booleans()))
            elif act == "revoke":
                await service.revoke_key(ALICE, data.draw(st.sampled_from(ids)))
            elif act == "update":
                await service.update_key(ALICE, data.draw(st.sampled_from(ids)), {"concurrency": 2})
            else:
                with contextlib.suppress(Conflict):
                    overlap_s = data.draw(st.sampled_from((0, 60)))
                    rotated = await service.rotate_key(ALICE, data.draw(st.sampled_from(ids)), overlap_s)
                    digests.add(rotated.record.digest)
        stored = {key.id: key for key in await services[0].keys()}
        by_digest = {key.digest: key for key in stored.values()}
        by_digest |= {key.previous_digest: key for key in stored.values() if key.previous_digest is not None}
        for service, store in zip(services, stores, strict=True):
            await service.directory.refresh()
            assert {key_id: service.directory.key(key_id) for key_id in ids} == stored
            assert {digest: service.directory.key_of_digest(digest) for digest in digests} == {
                digest: by_digest.get(digest) for digest in digests
            }
            for account in await service.accounts():
                assert service.directory.account(account.id) == account
            assert not (await service.audit.verify()).problem
            await service.close()
            await store.close()

    with TemporaryDirectory() as folder:
        asyncio.run(run(Path(folder)))
