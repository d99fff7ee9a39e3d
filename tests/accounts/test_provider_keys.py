"""Provider keys in the store, on both databases."""

import pytest

from emberline.accounts.account_service import AccountService
from emberline.accounts.provider_keys import NewProviderKey
from emberline.protocol.errors import NotFound
from emberline.store import Database

from .test_account_service import ALICE, SECRET, accounts, store

__all__ = ["accounts", "store"]


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
        await keys.remove(ALICE, "", "openai")
        await elsewhere.directory.refresh()
        assert not elsewhere.provider_keys.has("openai")
    finally:
        await elsewhere.close()
    with pytest.raises(NotFound):
        await keys.remove(ALICE, "acme", "openai")
    assert (await accounts.audit.verify()).problem == ""
