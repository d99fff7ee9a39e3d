"""The gateways of all accounts: those of the configuration, and those that were created over the API, with what they
keep: response cache, logs, counters and circuit breakers.

Gateways of the configuration, and those that an admin created, are the operator's. An account may add rules to one by
creating a gateway of the same name, and never removes or loosens any. Every process keeps all gateways in memory and
reads the store again when one has changed, so no request reads it.
"""

import asyncio
import logging
from collections.abc import Sequence

import msgspec

from emberline.gateway.attempts import Breakers
from emberline.gateway.counters import CounterTable
from emberline.gateway.gateway_errors import GatewayNotFound
from emberline.gateway.log import LogFilter, LogRow, LogWriter, search
from emberline.gateway.options import check_additions, check_settings, combined
from emberline.gateway.response_cache import ResponseCache
from emberline.net.periodic import attempt, stop
from emberline.protocol.errors import BadInput, Conflict, Forbidden
from emberline.protocol.gateway import DEFAULT_GATEWAY, GatewaySettings
from emberline.store import Database, Query
from emberline.store.notifications import Subscription

CHANNEL = "gateways"
POLL_S = 1.0  # for changes by other processes
MAX_PER_ACCOUNT = 100
MAX_SETTINGS_BYTES = 256 << 10
_VERSION = "SELECT COUNT(*), MAX(changed_us) FROM gateways"
_ALL = "SELECT account, settings FROM gateways ORDER BY account, name"
_OPERATORS = "/"  # begins the owner of a stored gateway that is the operator's, before the account that uses it
_PUT = (
    "INSERT INTO gateways (account, name, settings, created_us, changed_us) VALUES (?, ?, ?, ?, ?) "
    "ON CONFLICT (account, name) DO UPDATE SET settings = excluded.settings, changed_us = excluded.changed_us"
)
_DELETE = "DELETE FROM gateways WHERE account = ? AND name = ?"

log = logging.getLogger("emberline.gateway")


class Gateways:
    """The settings of all gateways. `open` it before it is asked; looking one up needs no I/O."""

    def __init__(self, store: Database, configured: Sequence[GatewaySettings] = ()) -> None:
        """Raises BadInput if a configured gateway cannot be used."""
        self._configured = {(one.account, one.name): check_settings(one) for one in configured}
        if len(self._configured) < len(configured):
            raise BadInput("two [[gateways]] have the same name", param="gateways")
        self._stored: dict[tuple[str, str], GatewaySettings] = {}  # by owner and name
        self._combined: dict[tuple[str, str], GatewaySettings] = {}  # accounts' additions to the operator's gateways
        self._version: object = None
        self._store = store
        self._following: asyncio.Task[None] | None = None

    async def open(self) -> None:
        subscription = self._store.listen(CHANNEL, POLL_S)
        await self.refresh()
        self._following = asyncio.create_task(self._follow(subscription))

    async def close(self) -> None:
        await stop(self._following)

    def find(self, account: str, name: str) -> GatewaySettings:
        """The operator's gateway with the account's additions, or the account's own. `default` exists always."""
        key = account, name
        found = self._combined.get(key) or self.floor(account, name) or self._stored.get(key)
        if found is not None:
            return found
        if name == DEFAULT_GATEWAY:
            return GatewaySettings(name=name)
        raise GatewayNotFound(
            f"account {account} has no gateway {name[:64]!r}: create it with `emberline gateway create {name[:64]}`, "
            f"or use {DEFAULT_GATEWAY!r}",
            param="gateway",
        )

    def floor(self, account: str, name: str) -> GatewaySettings | None:
        """The operator's gateway of that name, whose rules nobody else can loosen. Returns None if there is none."""
        configured = self._configured.get((account, name)) or self._configured.get(("", name))
        return self._stored.get((_OPERATORS + account, name)) or configured

    def of_account(self, account: str) -> list[GatewaySettings]:
        """Gateways that the account can use, by name."""
        owners = ("", account, _OPERATORS + account)
        names = {DEFAULT_GATEWAY} | {name for owner, name in (*self._stored, *self._configured) if owner in owners}
        return [self.find(account, name) for name in sorted(names)]

    def is_configured(self, account: str, name: str) -> bool:
        return (account, name) in self._configured or ("", name) in self._configured

    async def put(self, settings: GatewaySettings, by_operator: bool = False) -> None:
        """Create or replace one, durably; in effect in every process within about a second. The operator replaces all
        settings; an account's are its own gateway, or its additions to the operator's."""
        account, name = settings.account, settings.name
        if not account:
            raise BadInput("a gateway belongs to an account", param="account")
        if by_operator and (account, name) in self._configured:
            raise Conflict(f"gateway {name} is in emberline.toml: change it there and restart", param="name")
        check_settings(settings)
        floor = None if by_operator else self.floor(account, name)
        if floor is not None:
            check_additions(floor, settings)
        encoded = msgspec.json.encode(settings)
        if len(encoded) > MAX_SETTINGS_BYTES:
            raise BadInput(f"the settings have more than {MAX_SETTINGS_BYTES >> 10} KiB")
        owner = _OPERATORS + account if by_operator else account
        if (owner, name) not in self._stored:
            n_there = sum(known == owner for known, _ in self._stored)
            if n_there >= MAX_PER_ACCOUNT:
                raise Conflict(f"account {account} has {n_there} gateways, the most there can be")
        now_us = self._store.now_us()
        statements = [Query(_DELETE, (account, name))] if by_operator else []
        statements.append(Query(_PUT, (owner, name, encoded.decode(), now_us, now_us)))
        await self._store.transaction(statements)
        await self.refresh()
        await self._store.notify(CHANNEL)

    async def delete(self, account: str, name: str, by_operator: bool = False) -> None:
        """Delete an account's gateway, or its additions to the operator's. The operator deletes both."""
        owners = (account, _OPERATORS + account) if by_operator else (account,)
        if not any((owner, name) in self._stored for owner in owners):
            if self.is_configured(account, name):
                raise Conflict(f"gateway {name} is in emberline.toml: remove it there and restart", param="name")
            if self.floor(account, name) is not None:
                raise Forbidden(f"gateway {name} is the operator's, who alone can delete it", param="name")
            raise GatewayNotFound(f"account {account} has no gateway {name[:64]!r}", param="name")
        await self._store.transaction([Query(_DELETE, (owner, name)) for owner in owners])
        await self.refresh()
        await self._store.notify(CHANNEL)

    async def refresh(self) -> None:
        (version,) = await self._store.read(_VERSION)
        if version == self._version:
            return
        stored: dict[tuple[str, str], GatewaySettings] = {}
        for owner, encoded in await self._store.read(_ALL):
            assert isinstance(owner, str)
            assert isinstance(encoded, str)
            try:
                settings = msgspec.json.decode(encoded, type=GatewaySettings)
            except msgspec.ValidationError as error:  # written by another version
                log.warning("a stored gateway is left out: %s", error)
                continue
            stored[owner, settings.name] = settings
        self._stored, self._version = stored, version
        self._combined = {
            key: combined(floor, added) for key, added in stored.items() if (floor := self.floor(*key)) is not None
        }

    async def _follow(self, subscription: Subscription) -> None:
        async for _ in subscription:
            await attempt(self.refresh, log, "gateways were not read")


class GatewayService:
    """The gateways of one process. `open` it before it is used, `close` it before the store."""

    def __init__(self, store: Database, configured: Sequence[GatewaySettings] = ()) -> None:
        """Raises BadInput if a configured gateway cannot be used."""
        self._store = store
        self.settings = Gateways(store, configured)
        self.cache = ResponseCache(store)
        self.logs = LogWriter(store, self.settings.find)
        self.counters = CounterTable(store)
        self.breakers = Breakers()

    async def open(self) -> None:
        for part in (self.settings, self.cache, self.logs, self.counters):
            await part.open()

    async def close(self) -> None:
        for part in (self.settings, self.logs, self.counters, self.cache):
            await part.close()

    async def search_logs(self, account: str, gateway: str, wanted: LogFilter) -> list[LogRow]:
        """Log rows of a gateway that match, those included that are not written yet."""
        await self.logs.flush()
        return await search(self._store, account, gateway, wanted)
