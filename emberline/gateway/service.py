"""The gateways of one process: settings, response cache, logs, counters and circuit breakers."""

from collections.abc import Sequence

from emberline.gateway.attempts import Breakers
from emberline.gateway.counters import CounterTable
from emberline.gateway.gateways import Gateways
from emberline.gateway.log import LogFilter, LogRow, LogWriter, search
from emberline.gateway.response_cache import ResponseCache
from emberline.protocol.gateway import GatewaySettings
from emberline.store import Database


class GatewayService:
    """`open` it before it is used, `close` it before the store."""

    def __init__(self, store: Database, configured: Sequence[GatewaySettings] = ()) -> None:
        """BadInput where a configured gateway cannot be used."""
        self._store = store
        self.settings = Gateways(store, configured)
        self.cache = ResponseCache(store)
        self.logs = LogWriter(store, self.settings)
        self.counters = CounterTable(store)
        self.breakers = Breakers()

    async def open(self) -> None:
        await self.settings.open()
        await self.cache.open()
        await self.logs.open()
        await self.counters.open()

    async def close(self) -> None:
        await self.settings.close()
        await self.logs.close()
        await self.counters.close()
        await self.cache.close()

    async def search_logs(self, account: str, gateway: str, wanted: LogFilter) -> list[LogRow]:
        await self.logs.flush()
        return await search(self._store, account, gateway, wanted)
