"""The directory of accounts, API keys and keys of providers: all of them in the memory of every process, so that no
request reads a store.

Each row has the version at which it last changed. A process polls the current version about twice a second (with
PostgreSQL it is also notified) and reads the rows that are newer, so a revocation is effective everywhere in a moment.
While the store is away the directory stays as it was.
"""

import asyncio
import logging
import time

import msgspec

from emberline.accounts.account import ACCOUNT_COLUMNS, Account
from emberline.accounts.api_key import KEY_COLUMNS, ApiKey
from emberline.accounts.audit_log import CHANNEL
from emberline.accounts.stored_provider import PROVIDER_COLUMNS, StoredProvider
from emberline.net.periodic import stop
from emberline.protocol.errors import EmberlineError
from emberline.store import Database
from emberline.store.database import Row, decode_row

POLL_S = 0.5
CATCH_UP_S = 0.05  # between two reads that requests with unknown keys may cause
_PAGE = 1000  # rows
_VERSION = "SELECT number FROM audit_head"
_ACCOUNTS = f"SELECT {ACCOUNT_COLUMNS} FROM accounts WHERE version > ? ORDER BY version, id LIMIT {_PAGE}"
_PROVIDERS = f"SELECT {PROVIDER_COLUMNS} FROM provider_keys WHERE version > ? ORDER BY version LIMIT {_PAGE}"
_KEYS = f"SELECT {KEY_COLUMNS} FROM api_keys WHERE version > ? ORDER BY version, id LIMIT {_PAGE}"

log = logging.getLogger("emberline.accounts")


class KeyDirectory:
    """`open` it before it is asked. Look-ups are dictionary look-ups, without I/O."""

    def __init__(self, store: Database, poll_s: float = POLL_S) -> None:
        self._store = store
        self._poll_s = poll_s
        self._version = 0
        self._accounts: dict[str, Account] = {}
        self._keys: dict[str, ApiKey] = {}
        self._by_digest: dict[bytes, ApiKey] = {}
        self._providers: dict[tuple[str, str], StoredProvider] = {}  # by account and name, of those that have a key
        self._provider_names: set[str] = set()
        self._following: asyncio.Task[None] | None = None
        self._refreshing: asyncio.Task[None] | None = None
        self._refreshed_s = 0.0

    async def open(self) -> None:
        subscription = self._store.listen(CHANNEL, self._poll_s)
        await self._refresh()

        async def follow() -> None:
            is_away = False
            async for _ in subscription:
                try:
                    await self.refresh()
                except EmberlineError as error:
                    if not is_away:
                        log.warning("changes of keys and accounts are not seen: %s", error.message)
                    is_away = True
                except Exception:
                    log.exception("changes of keys and accounts are not seen")
                else:
                    is_away = False

        self._following = asyncio.create_task(follow())

    async def close(self) -> None:
        await stop(self._following, self._refreshing)

    def account(self, account_id: str) -> Account | None:
        """None: no record, hence no limits."""
        return self._accounts.get(account_id)

    def key(self, key_id: str) -> ApiKey | None:
        """Return the key even if it is revoked or expired: queued jobs keep the scope of their key."""
        return self._keys.get(key_id)

    def key_of_digest(self, digest: bytes) -> ApiKey | None:
        return self._by_digest.get(digest)

    def provider(self, account: str, name: str) -> StoredProvider | None:
        return self._providers.get((account, name))

    def has_provider(self, name: str) -> bool:
        """True if any account has a key of this provider."""
        return name in self._provider_names

    def providers(self) -> list[StoredProvider]:
        return list(self._providers.values())

    async def refresh(self) -> None:
        """See every change that has been committed by now."""
        if self._refreshing is not None and not self._refreshing.done():
            await asyncio.wait((self._refreshing,))  # it may have read before the change
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.create_task(self._refresh())
        await asyncio.shield(self._refreshing)

    async def catch_up(self) -> None:
        """Read the store for a key that is unknown here, since another process may just have created it. The store is
        read a few times a second, however many requests ask."""
        if self._refreshing is not None and not self._refreshing.done():
            await asyncio.wait((self._refreshing,))  # it may have read before the key was there
        if self._refreshing is None or self._refreshing.done():
            wait_s = self._refreshed_s + CATCH_UP_S - time.monotonic()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.create_task(self._refresh())
        try:
            await asyncio.shield(self._refreshing)
        except EmberlineError as error:
            log.debug("the directory is not refreshed: %s", error.message)

    async def _refresh(self) -> None:
        ((version,),) = await self._store.read(_VERSION)
        self._refreshed_s = time.monotonic()
        assert isinstance(version, int)
        if version <= self._version:
            return
        for row in await self._changed(_ACCOUNTS):
            account = decode_row(Account, ACCOUNT_COLUMNS, row)
            self._accounts[account.id] = account
        for row in await self._changed(_KEYS):
            self._put(decode_key(row))
        for row in await self._changed(_PROVIDERS):
            stored = decode_row(StoredProvider, PROVIDER_COLUMNS, row)
            self._providers[stored.account, stored.provider] = stored
            if stored.sealed is None:
                del self._providers[stored.account, stored.provider]
        self._provider_names = {name for _, name in self._providers}
        self._version = version  # what was committed meanwhile is read again next time
        self._refreshed_s = time.monotonic()

    async def _changed(self, select: str) -> list[Row]:
        """Rows after the current version, page by page: rows of one version never exceed a page."""
        rows: list[Row] = []
        after = self._version
        while True:
            page = await self._store.read(select, (after,))
            rows += page
            if len(page) < _PAGE:
                return rows
            last = page[-1][-1]
            assert isinstance(last, int)
            after = last

    def _put(self, key: ApiKey) -> None:
        if (earlier := self._keys.get(key.id)) is not None:
            for digest in (earlier.digest, earlier.previous_digest):
                if digest is not None:
                    self._by_digest.pop(digest, None)
        self._keys[key.id] = key
        self._by_digest[key.digest] = key
        if key.previous_digest is not None:
            self._by_digest[key.previous_digest] = key


def decode_key(row: Row) -> ApiKey:
    fields = dict(zip(ApiKey.__struct_fields__, row, strict=True))
    for name in ("models", "apis"):
        fields[name] = msgspec.json.decode(str(fields[name]))
    return msgspec.convert(fields, ApiKey)
