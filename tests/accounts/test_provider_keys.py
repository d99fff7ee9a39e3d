"""Provider keys in the store, on both databases."""

from base64 import b64decode
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from emberline.accounts.account_service import AccountService
from emberline.accounts.provider_keys import NewProviderKey
from emberline.accounts.secret import Secret
from emberline.accounts.unbound_sealing import VERSION as UNBOUND
from emberline.protocol.errors import Internal, NotFound, Unavailable
from emberline.store import Database, Transaction
from emberline.store.migrations import BOUND_PROVIDER_KEYS, MIGRATIONS
from emberline.store.postgres import PostgresStore
from emberline.store.sqlite import SqliteStore
from tests.databases import DatabaseLocation
from tests.faulty_store import FaultyStore

from .test_account_service import ALICE, SECRET, accounts, store

__all__ = ["accounts", "store"]
T = TypeVar("T")
URL = "https://llm.example/v1"
STORED = [
    NewProviderKey("", "openai", "sk-all"),
    NewProviderKey("acme", "mine", "sk-acme", "openai", URL),
    NewProviderKey("bob", "mine", "sk-bob", "anthropic", URL),
]
# These keys as an earlier release has sealed them under SECRET.
SEALED_BEFORE = {
    ("", "openai"): "AVHX60rCixB1dv370xYvtKx7qgpi2M0Un9iNLmNnd91DiofKwIzn0eJhre96Rc7ezPXfPx6Q9xQE2eCJMvfS",
    ("acme", "mine"): "AaBCs1ihjkkl8vi8XyIcPkg5zzvcedS5kLU3+iBWmMAw3cmhOH2V+rZhmlgIU47ettjr7DVZMIj0gv+r7iAZqw==",
    ("bob", "mine"): "AfTBX7c3HlcZUn98JFW4Ls/9tTPv+FY8szy4XnLiuhKciijw/4bg1uJjBhWGzBhqlg3bn/w2vvLM70gvRfQo",
}


async def test_the_accounts_own_comes_before_that_of_all(accounts: AccountService, store: Database) -> None:
    keys = accounts.provider_keys
    await keys.add(ALICE, NewProviderKey("", "openai", "sk-all"))
    await keys.add(ALICE, NewProviderKey("acme", "openai", "sk-acme", "openai", "https://llm.example/v1"))
    await keys.add(ALICE, NewProviderKey("acme", "openai", "sk-acme-2", "openai", "https://llm.example/v2"))
    own, other = keys.find("acme", "openai"), keys.find("bob", "openai")
    assert own is not None
    assert other is not None
    assert (own.key, own.url, own.is_own) == ("sk-acme-2", "https://llm.example/v2", True)
    assert (other.key, other.url, other.is_own) == ("sk-all", "", False)
    assert "sk-" not in repr((own, other, keys.list()))
    stored = await store.read("SELECT sealed FROM provider_keys ORDER BY account")
    assert not any(b"sk-" in bytes(sealed) for (sealed,) in stored)  # type: ignore[arg-type]

    elsewhere = AccountService(store, SECRET)  # another process
    await elsewhere.open()
    try:
        found = elsewhere.provider_keys.find("acme", "openai")
        assert found is not None
        assert found.key == "sk-acme-2"
        await keys.remove(ALICE, "acme", "openai")
        await elsewhere.directory.refresh()
        assert elsewhere.provider_keys.find("acme", "openai") == other
        assert all(elsewhere.provider_keys.has("openai", account) for account in ("acme", "bob", "", None))
        await keys.remove(ALICE, "", "openai")
        await elsewhere.directory.refresh()
        assert not elsewhere.provider_keys.has("openai", None)
    finally:
        await elsewhere.close()
    with pytest.raises(NotFound):
        await keys.remove(ALICE, "acme", "openai")
    assert (await accounts.audit.verify()).problem == ""


@pytest.mark.parametrize(
    ("column", "value"), [("url", "https://evil.example/v1"), ("kind", "gemini"), ("account", "eve"), ("provider", "x")]
)
async def test_a_row_that_was_changed_in_the_store_does_not_open(
    accounts: AccountService, store: Database, column: str, value: str, caplog: pytest.LogCaptureFixture
) -> None:
    for new in STORED:
        await accounts.provider_keys.add(ALICE, new)
    await store.write(f"UPDATE provider_keys SET {column} = ? WHERE account = ?", (value, "acme"))
    again = AccountService(store, SECRET)
    await again.open()
    try:
        account, provider = ("eve" if column == "account" else "acme"), ("x" if column == "provider" else "mine")
        with pytest.raises(Internal, match=f"provider {provider} does not open: store it again"):
            again.provider_keys.find(account, provider)
        assert "its account, provider, url or kind in the store is not the one" in caplog.text
        assert "sk-acme" not in caplog.text
        whole = again.provider_keys.find("bob", "mine")
        assert whole is not None
        assert whole.key == "sk-bob"
        await again.provider_keys.add(ALICE, STORED[1]._replace(account=account, provider=provider))
        assert again.provider_keys.find(account, provider) is not None
    finally:
        await again.close()


async def of_an_earlier_release(accounts: AccountService, store: Database) -> None:
    for new in STORED:
        await accounts.provider_keys.add(ALICE, new)
    for (account, provider), sealed in SEALED_BEFORE.items():
        values = (b64decode(sealed), account, provider)
        await store.write("UPDATE provider_keys SET sealed = ? WHERE account = ? AND provider = ?", values)


async def opened(store: Database, secret: Secret = SECRET) -> dict[str, str]:
    """Keys by account, as a process finds them that starts now; of those that do not open, the error."""
    service = AccountService(store, secret)
    await service.open()
    found = {}
    try:
        for new in STORED:
            try:
                key = service.provider_keys.find(new.account, new.provider)
                found[new.account] = "" if key is None else f"{key.key} {key.kind} {key.url}"
            except Internal as error:
                found[new.account] = error.message
        assert (await service.audit.verify()).problem == ""
    finally:
        await service.close()
    return found


EXPECTED = {new.account: f"{new.key} {new.kind} {new.url}" for new in STORED}


class CrashingStore(FaultyStore):
    """Crashes after some statements of a transaction."""

    def __init__(self, store: Database, n_statements: int) -> None:
        super().__init__(store)
        self._n = n_statements

    async def run(self, work: Callable[[], Transaction[T]]) -> T:
        def crashing() -> Transaction[T]:
            transaction, answer, n_left = work(), None, self._n
            try:
                while True:
                    statement = transaction.send(answer)  # type: ignore[arg-type]
                    if n_left == 0:
                        raise Unavailable("the process was killed")
                    n_left, answer = n_left - 1, (yield statement)
            except StopIteration as end:
                result: T = end.value
                return result

        return await self.store.run(crashing)


async def test_keys_of_an_earlier_release_are_bound_at_start_or_not_at_all(
    accounts: AccountService, store: Database
) -> None:
    await of_an_earlier_release(accounts, store)
    for n_statements in range(6):  # three of the audit log, one for each key
        with pytest.raises(Unavailable, match="was killed"):
            await AccountService(CrashingStore(store, n_statements), SECRET).open()
        forms = await store.read("SELECT sealed FROM provider_keys")
        assert [bytes(sealed)[:1] for (sealed,) in forms] == [UNBOUND] * 3, "none is half done"  # type: ignore[arg-type]
    assert await opened(store) == EXPECTED
    forms = await store.read("SELECT sealed FROM provider_keys")
    assert not [sealed for (sealed,) in forms if bytes(sealed)[:1] == UNBOUND]  # type: ignore[arg-type]
    assert [entry.act for entry in await accounts.audit.entries(limit=2)] == ["provider.bind", "provider.add"]
    assert await opened(store) == EXPECTED, "there is nothing left to bind"
    assert (await accounts.audit.entries(limit=2))[1].act == "provider.add"


async def test_a_key_of_an_earlier_release_is_bound_to_the_address_it_was_stored_with(
    accounts: AccountService, store: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where the row was changed before the upgrade, or an old row was put back after it."""
    await of_an_earlier_release(accounts, store)
    evil = "https://evil.example/v1"
    await store.write("UPDATE provider_keys SET url = ? WHERE account = 'acme'", (evil,))
    refused = "the stored key of provider mine does not open: store it again"
    assert await opened(store) == EXPECTED | {"acme": refused}
    assert "mine of acme is not used: its account" in caplog.text
    put_back = (b64decode(SEALED_BEFORE["bob", "mine"]), evil)
    await store.write("UPDATE provider_keys SET sealed = ?, url = ? WHERE account = 'bob'", put_back)
    assert await opened(store) == EXPECTED | {"acme": refused, "bob": refused}


async def test_another_root_secret_leaves_the_keys_of_an_earlier_release_as_they_are(
    accounts: AccountService, store: Database
) -> None:
    await of_an_earlier_release(accounts, store)
    other = AccountService(store, Secret("t" * 32))
    await other.provider_keys.bind()
    assert await opened(store) == EXPECTED


async def test_the_release_before_refuses_a_store_with_bound_keys(database: DatabaseLocation) -> None:
    await (await database.open()).close()
    before = MIGRATIONS[: MIGRATIONS.index(BOUND_PROVIDER_KEYS)]
    where, on_sqlite = database.where, database.kind == "sqlite"
    opening = SqliteStore.open(Path(where), before) if on_sqlite else PostgresStore.open(where, before)
    with pytest.raises(Unavailable, match=f"has schema version {len(MIGRATIONS)}, this Emberline knows up to "):
        await opening
