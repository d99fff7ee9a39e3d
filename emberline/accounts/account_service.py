"""Changes to accounts and API keys, each with its row in the audit log, and the directory that requests are checked by.

Every process that serves HTTP has one over the shared store, and so has the command line where no server runs.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from emberline.accounts.account import ACCOUNT_COLUMNS, Account, Limits, check_account_name
from emberline.accounts.api_key import KEY_COLUMNS, ApiKey, NewKey, Role, new_key, new_key_id
from emberline.accounts.audit_log import Actor, AuditLog
from emberline.accounts.key_directory import POLL_S, KeyDirectory, decode_key
from emberline.accounts.price_store import PriceStore
from emberline.accounts.provider_keys import ProviderKeys
from emberline.accounts.saved_chats import SavedChats
from emberline.accounts.secret import Secret
from emberline.accounts.usage_report import UsageReports
from emberline.protocol.errors import BadInput, Conflict, NotFound
from emberline.store import Database, Query, Transaction, Value
from emberline.store.database import decode_row

OVERLAP_S = 86_400  # for which a rotated key stays valid by default
MAX_OVERLAP_S = 30 * 86_400
MAX_SCOPE = 64  # models or APIs of one key
MAX_NAME_CHARS = 128
MAX_PAGE = 1000
_FIND_ACCOUNT = f"SELECT {ACCOUNT_COLUMNS} FROM accounts WHERE id = ?"
_FIND_KEY = f"SELECT {KEY_COLUMNS} FROM api_keys WHERE id = ?"
_ACCOUNTS_PAGE = f"SELECT {ACCOUNT_COLUMNS} FROM accounts WHERE id > ? ORDER BY id LIMIT ?"
_KEYS_PAGE = f"SELECT {KEY_COLUMNS} FROM api_keys WHERE id > ? ORDER BY id LIMIT ?"
_KEYS_OF_ACCOUNT = f"SELECT {KEY_COLUMNS} FROM api_keys WHERE account = ? AND id > ? ORDER BY id LIMIT ?"

Changes = Mapping[str, Any]  # of fields, by name
R = TypeVar("R", Account, ApiKey)


class KeyGrant(msgspec.Struct, frozen=True, kw_only=True):
    """Permissions of a new key."""

    name: str = ""
    role: Role = "user"
    models: tuple[str, ...] = ()
    apis: tuple[str, ...] = ()
    expires_us: int | None = None
    limits: Limits = Limits()


NO_LIMITS = Limits()
EVERYTHING = KeyGrant()


class IssuedKey(msgspec.Struct, frozen=True):
    record: ApiKey
    key: NewKey


class AccountService:
    """`open` and `close` it. The store stays open."""

    def __init__(self, store: Database, secret: Secret, poll_s: float = POLL_S) -> None:
        """`poll_s`: between two looks for changes of keys and accounts by other processes."""
        self._store = store
        self.audit = AuditLog(store, secret)
        self.prices = PriceStore(store, self.audit)
        self.reports = UsageReports(store)
        self.directory = KeyDirectory(store, poll_s)
        self.provider_keys = ProviderKeys(store, secret, self.directory, self.audit)
        self.chats = SavedChats(store)

    async def open(self) -> None:
        await self.provider_keys.bind()
        await self.directory.open()
        await self.prices.start()

    async def close(self) -> None:
        await self.prices.close()
        await self.directory.close()

    # --- accounts ----------------------------------------------------------------------------------------------------

    async def accounts(self, *, after: str = "", limit: int = MAX_PAGE) -> list[Account]:
        rows = await self._store.read(_ACCOUNTS_PAGE, (after, limit))
        return [decode_row(Account, ACCOUNT_COLUMNS, row) for row in rows]

    async def account(self, account_id: str) -> Account:
        rows = await self._store.read(_FIND_ACCOUNT, (account_id,))
        if not rows:
            raise NotFound(f"there is no account {account_id[:64]!r}")
        return decode_row(Account, ACCOUNT_COLUMNS, rows[0])

    async def create_account(self, actor: Actor, account_id: str, limits: Limits = NO_LIMITS) -> Account:
        check_account_name(account_id)

        def work(version: int) -> Transaction[Account]:
            if (yield Query(_FIND_ACCOUNT, (account_id,))):
                raise Conflict(f"there is an account {account_id} already", param="id")
            account = _with_limits(Account(id=account_id, created_us=self._store.now_us(), version=version), limits)
            yield _insert("accounts", ACCOUNT_COLUMNS, msgspec.structs.astuple(account))
            return account

        account = await self.audit.run(actor, "account.create", account_id, _given(limits), work)
        await self.directory.refresh()
        return account

    async def update_account(
        self, actor: Actor, account_id: str, changes: Changes | None = None, disabled: bool | None = None
    ) -> Account:
        """Change some of its limits; disable it or enable it again."""
        changes = changes or {}

        def work(version: int) -> Transaction[Account]:
            rows = yield Query(_FIND_ACCOUNT, (account_id,))
            if not rows:
                raise NotFound(f"there is no account {account_id[:64]!r}")
            account = decode_row(Account, ACCOUNT_COLUMNS, rows[0])
            disabled_us = account.disabled_us
            if disabled is not None:
                disabled_us = (disabled_us or self._store.now_us()) if disabled else None
            account = msgspec.structs.replace(account, **changes, disabled_us=disabled_us, version=version)
            yield _replace("accounts", ACCOUNT_COLUMNS, msgspec.structs.astuple(account), account_id)
            return account

        details = {**changes, **({} if disabled is None else {"disabled": disabled})}
        account = await self.audit.run(actor, "account.update", account_id, details, work)
        await self.directory.refresh()
        return account

    # --- keys --------------------------------------------------------------------------------------------------------

    async def keys(self, account: str | None = None, *, after: str = "", limit: int = MAX_PAGE) -> list[ApiKey]:
        """List the keys of one account or of all, including revoked and expired ones."""
        if account is None:
            rows = await self._store.read(_KEYS_PAGE, (after, limit))
        else:
            rows = await self._store.read(_KEYS_OF_ACCOUNT, (account, after, limit))
        return [decode_key(row) for row in rows]

    async def key(self, key_id: str) -> ApiKey:
        rows = await self._store.read(_FIND_KEY, (key_id,))
        if not rows:
            raise NotFound(f"there is no key {key_id[:64]!r}; `emberline key ls` lists them")
        return decode_key(rows[0])

    async def create_key(self, actor: Actor, account_id: str, grant: KeyGrant = EVERYTHING) -> IssuedKey:
        """The key is in this result and nowhere else. An account that does not exist is created without limits."""
        check_account_name(account_id)
        key, key_id = new_key(), new_key_id()

        def work(version: int) -> Transaction[ApiKey]:
            now_us = self._store.now_us()
            if not (yield Query(_FIND_ACCOUNT, (account_id,))):
                account = Account(id=account_id, created_us=now_us, version=version)
                yield _insert("accounts", ACCOUNT_COLUMNS, msgspec.structs.astuple(account))
            record = _with_limits(
                ApiKey(
                    id=key_id,
                    account=account_id,
                    name=grant.name,
                    role=grant.role,
                    models=grant.models,
                    apis=grant.apis,
                    digest=key.digest,
                    hint=key.hint,
                    created_us=now_us,
                    expires_us=grant.expires_us,
                    version=version,
                ),
                grant.limits,
            )
            _check_record(record, now_us)
            yield _insert("api_keys", KEY_COLUMNS, _key_values(record))
            return record

        details = {"account": account_id, **msgspec.structs.asdict(grant), "limits": _given(grant.limits)}
        record = await self.audit.run(actor, "key.create", key_id, details, work)
        await self.directory.refresh()
        return IssuedKey(record, key)

    async def rotate_key(self, actor: Actor, key_id: str, overlap_s: int = OVERLAP_S) -> IssuedKey:
        """A new key with the same id, account, scope and limits. The old one stays valid for `overlap_s` seconds."""
        if not 0 <= overlap_s <= MAX_OVERLAP_S:
            raise BadInput(f"`overlap_s` is from 0 to {MAX_OVERLAP_S}", param="overlap_s")
        key = new_key()

        def change(record: ApiKey, now_us: int) -> ApiKey:
            if record.revoked_us is not None:
                raise Conflict(f"{key_id} is revoked: create another key")
            return msgspec.structs.replace(
                record,
                digest=key.digest,
                hint=key.hint,
                previous_digest=record.digest if overlap_s else None,
                previous_until_us=now_us + overlap_s * 1_000_000 if overlap_s else None,
            )

        return IssuedKey(await self._change_key(actor, "key.rotate", key_id, {"overlap_s": overlap_s}, change), key)

    async def revoke_key(self, actor: Actor, key_id: str) -> ApiKey:
        """Final. Running requests and queued jobs of the key go on."""

        def change(record: ApiKey, now_us: int) -> ApiKey:
            return msgspec.structs.replace(record, revoked_us=record.revoked_us or now_us)

        return await self._change_key(actor, "key.revoke", key_id, {}, change)

    async def update_key(self, actor: Actor, key_id: str, changes: Changes) -> ApiKey:
        """Change its name, scope, expiry or some of its limits."""

        def change(record: ApiKey, now_us: int) -> ApiKey:
            changed = msgspec.structs.replace(record, **changes)
            _check_record(changed, now_us if "expires_us" in changes else None)
            return changed

        return await self._change_key(actor, "key.update", key_id, dict(changes), change)

    async def _change_key(
        self, actor: Actor, act: str, key_id: str, details: object, change: Callable[[ApiKey, int], ApiKey]
    ) -> ApiKey:
        def work(version: int) -> Transaction[ApiKey]:
            rows = yield Query(_FIND_KEY, (key_id,))
            if not rows:
                raise NotFound(f"there is no key {key_id[:64]!r}; `emberline key ls` lists them")
            record = change(decode_key(rows[0]), self._store.now_us())
            record = msgspec.structs.replace(record, version=version)
            yield _replace("api_keys", KEY_COLUMNS, _key_values(record), key_id)
            return record

        record = await self.audit.run(actor, act, key_id, details, work)
        await self.directory.refresh()
        return record


def _check_record(key: ApiKey, now_us: int | None) -> None:
    """`now_us`: check that it has not expired."""
    if key.role == "admin" and (key.models or key.apis or key.budget_pico is not None):
        field = "models" if key.models else "apis" if key.apis else "budget"
        raise BadInput(f"an admin key may use everything, for every account: it has no `{field}`", param=field)
    if len(key.name) > MAX_NAME_CHARS or not key.name.isprintable():
        raise BadInput(f"a key's name is at most {MAX_NAME_CHARS} printable characters", param="name")
    if now_us is not None and key.expires_us is not None and key.expires_us <= now_us:
        raise BadInput("the key would have expired already", param="expires_at")
    for field, values in (("models", key.models), ("apis", key.apis)):
        if len(values) > MAX_SCOPE or any(not 0 < len(value) <= 256 or not value.isprintable() for value in values):
            raise BadInput(f"`{field}` has at most {MAX_SCOPE} names of at most 256 characters", param=field)


def _with_limits(record: R, limits: Limits) -> R:
    return msgspec.structs.replace(record, **{name: getattr(limits, name) for name in Limits.__struct_fields__})


def _given(limits: Limits) -> dict[str, object]:
    """The limits that are set, for the audit log."""
    values = {name: getattr(limits, name) for name in Limits.__struct_fields__}
    return {name: value for name, value in values.items() if value is not None}


def _key_values(record: ApiKey) -> tuple[Value, ...]:
    fields = msgspec.structs.asdict(record)
    for name in ("models", "apis"):
        fields[name] = msgspec.json.encode(fields[name]).decode()
    return tuple(fields.values())


def _insert(table: str, columns: str, values: tuple[Value, ...]) -> Query:
    return Query(f"INSERT INTO {table} ({columns}) VALUES ({', '.join('?' * len(values))})", values)


def _replace(table: str, columns: str, values: tuple[Value, ...], row_id: str) -> Query:
    assignments = ", ".join(f"{name} = ?" for name in columns.split(", "))
    return Query(f"UPDATE {table} SET {assignments} WHERE id = ?", (*values, row_id))
