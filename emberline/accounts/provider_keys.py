"""Keys of providers in the store: of one account (bring your own key), or of all. Sealed at rest, opened per request.

A key is shown to nobody once it is stored. It is replaced or removed; a removed one leaves an empty row, so that every
process learns of it by the directory's versions.
"""

from typing import NamedTuple

import msgspec

from emberline.accounts.audit_log import Actor, AuditLog
from emberline.accounts.key_directory import KeyDirectory
from emberline.accounts.sealing import Sealer
from emberline.accounts.secret import Secret
from emberline.accounts.stored_provider import EVERY_ACCOUNT, PROVIDER_COLUMNS, StoredProvider
from emberline.protocol.errors import BadInput, NotFound
from emberline.protocol.provider import ProviderKey
from emberline.store import Database, Query, Transaction

MAX_KEY_CHARS = 4096
MAX_PER_ACCOUNT = 64
_UPSERT = (
    f"INSERT INTO provider_keys ({PROVIDER_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (account, provider) "
    "DO UPDATE SET kind = excluded.kind, url = excluded.url, sealed = excluded.sealed, "
    "created_us = excluded.created_us, version = excluded.version"
)
_COUNT = "SELECT COUNT(*) FROM provider_keys WHERE account = ? AND provider <> ? AND sealed IS NOT NULL"


class NewProviderKey(NamedTuple):
    account: str  # empty: of all accounts
    provider: str
    key: str
    kind: str = ""
    url: str = ""


class ProviderKeys:
    """Reads are from the directory's memory; writes go to the store, with a row in the audit log."""

    def __init__(self, store: Database, secret: Secret, directory: KeyDirectory, audit: AuditLog) -> None:
        self._store = store
        self._directory = directory
        self._audit = audit
        self._sealer = Sealer(secret, "provider-keys")

    def find(self, account: str, provider: str) -> ProviderKey | None:
        """The account's own, or else the one of all accounts."""
        row = self._directory.provider(account, provider) or self._directory.provider(EVERY_ACCOUNT, provider)
        if row is None or row.sealed is None:
            return None
        key = self._sealer.open(row.sealed, row.account, row.provider)
        return ProviderKey(key, row.kind, row.url, is_own=row.account != EVERY_ACCOUNT)

    def has(self, provider: str) -> bool:
        """True if any account has a key of this provider."""
        return self._directory.has_provider(provider)

    def list(self, account: str | None = None) -> list[StoredProvider]:
        """List the keys of one account, or of all."""
        rows = [row for row in self._directory.providers() if account is None or row.account == account]
        return sorted(rows, key=lambda row: (row.account, row.provider))

    async def catch_up(self) -> None:
        """Another process may have stored a key a moment ago."""
        await self._directory.catch_up()

    async def add(self, actor: Actor, new: NewProviderKey) -> StoredProvider:
        """Store a key, in place of an earlier one."""
        if len(new.key) > MAX_KEY_CHARS:
            raise BadInput(f"a key has at most {MAX_KEY_CHARS} characters", param="key")
        row = StoredProvider(
            account=new.account,
            provider=new.provider,
            kind=new.kind,
            url=new.url,
            sealed=self._sealer.seal(new.key, new.account, new.provider),
            created_us=self._store.now_us(),
            version=0,
        )
        return await self._put(actor, "provider.add", row)

    async def remove(self, actor: Actor, account: str, provider: str) -> None:
        row = self._directory.provider(account, provider)
        if row is None:
            raise NotFound(f"there is no key of provider {provider[:32]} to remove", param="name")
        await self._put(actor, "provider.remove", msgspec.structs.replace(row, sealed=None, url=""))

    async def _put(self, actor: Actor, act: str, row: StoredProvider) -> StoredProvider:
        def work(version: int) -> Transaction[StoredProvider]:
            if row.sealed is not None:
                ((n_others,),) = yield Query(_COUNT, (row.account, row.provider))
                assert isinstance(n_others, int)
                if n_others >= MAX_PER_ACCOUNT:
                    raise BadInput(f"an account has keys of at most {MAX_PER_ACCOUNT} providers", param="name")
            stored = msgspec.structs.replace(row, version=version)
            yield Query(_UPSERT, msgspec.structs.astuple(stored))
            return stored

        target = f"{row.provider} of {row.account or 'all accounts'}"
        stored = await self._audit.run(actor, act, target, {"url": row.url, "kind": row.kind}, work)
        await self._directory.refresh()
        return stored
