"""The gateways of all accounts: those of the configuration, and those that were created over the API.

Every process keeps them in memory and reads the store again when one has changed, so no request reads it.
"""

import asyncio
import logging
from collections.abc import Sequence

import msgspec

from emberline.protocol.errors import BadInput, Conflict, EmberlineError
from emberline.protocol.gateway import DEFAULT_GATEWAY, GatewaySettings
from emberline.store import Database
from emberline.store.notifications import Subscription
from emberline.upstream.gateway.errors import GatewayNotFound
from emberline.upstream.gateway.options import check_settings

CHANNEL = "gateways"
POLL_S = 1.0  # for changes by other processes
MAX_PER_ACCOUNT = 100
MAX_SETTINGS_BYTES = 256 << 10
_VERSION = "SELECT COUNT(*), MAX(changed_us) FROM gateways"
_ALL = "SELECT settings FROM gateways ORDER BY account, name"
_PUT = (
    "INSERT INTO gateways (account, name, settings, created_us, changed_us) VALUES (?, ?, ?, ?, ?) "
    "ON CONFLICT (account, name) DO UPDATE SET settings = excluded.settings, changed_us = excluded.changed_us"
)
_DELETE = "DELETE FROM gateways WHERE account = ? AND name = ?"

log = logging.getLogger("emberline.gateway")


class Gateways:
    """`open` it before it is asked; looking one up needs no I/O."""

    def __init__(self, store: Database, configured: Sequence[GatewaySettings] = ()) -> None:
        """BadInput where a configured one cannot be used."""
        self._configured = {(one.account, one.name): check_settings(one) for one in configured}
        if len(self._configured) < len(configured):
            raise BadInput("two [[gateways]] have the same name", param="gateways")
        self._stored: dict[tuple[str, str], GatewaySettings] = {}
        self._version: object = None
        self._store = store
        self._following: asyncio.Task[None] | None = None

    async def open(self) -> None:
        subscription = self._store.listen(CHANNEL, POLL_S)
        await self.refresh()
        self._following = asyncio.create_task(self._follow(subscription))

    async def close(self) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)

    def find(self, account: str, name: str) -> GatewaySettings:
        """The account's own, or a configured one for every account. `default` exists always."""
        for key in ((account, name), ("", name)):
            if (found := self._stored.get(key) or self._configured.get(key)) is not None:
                return found
        if name == DEFAULT_GATEWAY:
            return GatewaySettings(name=name)
        raise GatewayNotFound(
            f"account {account} has no gateway {name[:64]!r}: create it with `emberline gateway create {name[:64]}`, "
            f"or use {DEFAULT_GATEWAY!r}",
            param="gateway",
        )

    def of_account(self, account: str) -> list[GatewaySettings]:
        """Those that the account can use, by name."""
        names = {DEFAULT_GATEWAY} | {
            name for owner, name in (*self._stored, *self._configured) if owner in ("", account)
        }
        return [self.find(account, name) for name in sorted(names)]

    def is_configured(self, account: str, name: str) -> bool:
        return (account, name) in self._configured or ("", name) in self._configured

    async def put(self, settings: GatewaySettings) -> None:
        """Create or replace one, durably; in effect in every process within about a second."""
        account, name = settings.account, settings.name
        if not account:
            raise BadInput("a gateway belongs to an account", param="account")
        if (account, name) in self._configured:
            raise Conflict(f"gateway {name} is in emberline.toml: change it there and restart", param="name")
        check_settings(settings)
        encoded = msgspec.json.encode(settings)
        if len(encoded) > MAX_SETTINGS_BYTES:
            raise BadInput(f"the settings have more than {MAX_SETTINGS_BYTES >> 10} KiB")
        if (account, name) not in self._stored:
            n_there = sum(owner == account for owner, _ in self._stored)
            if n_there >= MAX_PER_ACCOUNT:
                raise Conflict(f"account {account} has {n_there} gateways, the most there can be")
        now_us = self._store.now_us()
        await self._store.write(_PUT, (account, name, encoded.decode(), now_us, now_us))
        await self.refresh()
        await self._store.notify(CHANNEL)

    async def delete(self, account: str, name: str) -> None:
        if (account, name) not in self._stored:
            if self.is_configured(account, name):
                raise Conflict(f"gateway {name} is in emberline.toml: remove it there and restart", param="name")
            raise GatewayNotFound(f"account {account} has no gateway {name[:64]!r}", param="name")
        await self._store.write(_DELETE, (account, name))
        await self.refresh()
        await self._store.notify(CHANNEL)

    async def refresh(self) -> None:
        (version,) = await self._store.read(_VERSION)
        if version == self._version:
            return
        stored: dict[tuple[str, str], GatewaySettings] = {}
        for (encoded,) in await self._store.read(_ALL):
            assert isinstance(encoded, str)
            try:
                settings = msgspec.json.decode(encoded, type=GatewaySettings)
            except msgspec.ValidationError as error:  # written by another version
                log.warning("a stored gateway is left out: %s", error)
                continue
            stored[settings.account, settings.name] = settings
        self._stored, self._version = stored, version

    async def _follow(self, subscription: Subscription) -> None:
        async for _ in subscription:
            try:
                await self.refresh()
            except EmberlineError as error:
                log.warning("gateways were not read: %s", error.message)
            except Exception:  # the next look may succeed
                log.exception("gateways were not read")
