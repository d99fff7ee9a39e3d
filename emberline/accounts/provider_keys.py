"""Keys of providers in the store: of one account (bring your own key), or of all. Sealed at rest, opened per request.

A key is sealed together with all that decides where it goes: account, provider, API and address. A row of which one of
these was changed in the store does not open. A key is shown to nobody once it is stored. It is replaced or removed; a
removed one leaves an empty row, so that every process learns of it by the directory's versions.
"""

import logging
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from emberline.accounts.audit_log import Actor, AuditLog
from emberline.accounts.key_directory import KeyDirectory
from emberline.accounts.sealing import Sealer
from emberline.accounts.secret import Secret
from emberline.accounts.stored_provider import EVERY_ACCOUNT, PROVIDER_COLUMNS, StoredProvider
from emberline.accounts.unbound_sealing import VERSION as UNBOUND
from emberline.accounts.unbound_sealing import UnboundOpener
from emberline.protocol.errors import BadInput, Internal, NotFound
from emberline.protocol.provider import ProviderKey
from emberline.store import Database, Query, Transaction
from emberline.store.database import decode_row

PURPOSE = "provider-keys"
MAX_KEY_CHARS = 4096
MAX_PER_ACCOUNT = 64
_UPSERT = (
    f"INSERT INTO provider_keys ({PROVIDER_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (account, provider) "
    "DO UPDATE SET kind = excluded.kind, url = excluded.url, sealed = excluded.sealed, "
    "created_us = excluded.created_us, version = excluded.version"
)
_SEALED = f"SELECT {PROVIDER_COLUMNS} FROM provider_keys WHERE sealed IS NOT NULL"
_BIND = "UPDATE provider_keys SET sealed = ? WHERE account = ? AND provider = ? AND sealed = ?"
_MIGRATION = Actor("migration")
_COUNT = "SELECT COUNT(*) FROM provider_keys WHERE account = ? AND provider <> ? AND sealed IS NOT NULL"

log = logging.getLogger("emberline.accounts")


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
        self._sealer = Sealer(secret, PURPOSE)
        self._unbound = UnboundOpener(secret, PURPOSE)

    async def bind(self) -> None:
        """Seal the keys of an earlier release in today's form, all of them in one transaction.

        Their form did not cover API and address. The audit log does, whose rows are chained by keyed digests: a key is
        bound to the address that the row of its storing names, and not bound if its own row names another. Call it
        before the directory is opened."""
        bound = [(row, sealed) for row in await self._unbound_rows() if (sealed := await self._bound(row)) is not None]
        if not bound:
            return

        def work(_: int) -> Transaction[None]:
            for row, sealed in bound:
                yield Query(_BIND, (sealed, row.account, row.provider, row.sealed))

        names = [_name(row) for row, _ in bound]
        await self._audit.run(_MIGRATION, "provider.bind", f"{len(names)} provider keys", {"keys": names}, work)

    def find(self, account: str, provider: str) -> ProviderKey | None:
        """The account's own, or else the one of all accounts.

        Raises Internal if it does not open, with the cause in the log: the store is the operator's."""
        row = self._directory.provider(account, provider) or self._directory.provider(EVERY_ACCOUNT, provider)
        if row is None or row.sealed is None:
            return None
        try:
            key = self._sealer.open(row.sealed, *_context(row))
        except Internal:
            log.error("%s is not used: %s", _name(row), _UNBOUND if row.sealed[:1] == UNBOUND else _CHANGED)
            raise Internal(f"the stored key of provider {provider} does not open: store it again") from None
        return ProviderKey(key, row.kind, row.url, is_own=row.account != EVERY_ACCOUNT)

    def has(self, provider: str, account: str | None) -> bool:
        """True if the account may use a key of this provider: its own, or that of all accounts.

        `account` None: if any account may."""
        if account is None:
            return self._directory.has_provider(provider)
        return any(self._directory.provider(owner, provider) is not None for owner in (account, EVERY_ACCOUNT))

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
            sealed=b"",
            created_us=self._store.now_us(),
            version=0,
        )
        row = msgspec.structs.replace(row, sealed=self._sealer.seal(new.key, *_context(row)))
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

        stored = await self._audit.run(actor, act, _target(row), _details(row), work)
        await self._directory.refresh()
        return stored

    async def _unbound_rows(self) -> Sequence[StoredProvider]:
        rows = [decode_row(StoredProvider, PROVIDER_COLUMNS, row) for row in await self._store.read(_SEALED)]
        return [row for row in rows if row.sealed is not None and row.sealed[:1] == UNBOUND]

    async def _bound(self, row: StoredProvider) -> bytes | None:
        """The row's key in today's form. Returns None, and says why, if it cannot be known where the key belongs."""
        assert row.sealed is not None
        entry = await self._audit.intact_entry(row.version)
        given = None if entry is None else (entry.act, entry.target, msgspec.json.decode(entry.details))
        if given != ("provider.add", _target(row), _details(row)):
            log.error("%s is not used: %s", _name(row), _CHANGED)
            return None
        try:
            key = self._unbound.open(row.sealed, row.account, row.provider)
        except Internal:
            log.error("%s is not used: %s", _name(row), _CHANGED)
            return None
        return self._sealer.seal(key, *_context(row))


_CHANGED = (
    "its account, provider, url or kind in the store is not the one that it was stored with, or the root secret is "
    "another. Store it again, and find out who wrote to the store"
)
_UNBOUND = (
    "an earlier release has stored it while this one ran, or its row was put back. Restart one core, which takes it "
    "over, or store it again"
)


def _context(row: StoredProvider) -> tuple[str, ...]:
    """All that decides where the key of a row goes."""
    return row.account, row.provider, row.kind, row.url


def _target(row: StoredProvider) -> str:
    return f"{row.provider} of {row.account or 'all accounts'}"


def _name(row: StoredProvider) -> str:
    return f"the key of provider {_target(row)}"


def _details(row: StoredProvider) -> dict[str, str]:
    return {"url": row.url, "kind": row.kind}
