"""The inference service of one process: the pipeline, its connections to workers, and the operator's queries."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from emberline.catalog.aliases import AliasTable
from emberline.catalog.model_card import ModelCard
from emberline.cluster.cluster import ClusterStatus
from emberline.cluster.engine_client import EngineClient
from emberline.cluster.membership import WorkerChange
from emberline.cluster.served_models import ServedModels
from emberline.cluster.timings import DEFAULTS, Timings
from emberline.protocol.errors import Unavailable
from emberline.protocol.media import MediaRequest
from emberline.protocol.member import Challenge, Signed
from emberline.protocol.request import EncodeRequest, GenerateRequest, SpeechRequest
from emberline.service import kv_cache
from emberline.service.core import CoreAccess
from emberline.service.engine_tasks import EngineTasks
from emberline.service.event_log import EventLogs
from emberline.service.in_flight import InFlight
from emberline.service.models import Models
from emberline.service.pipeline import Pipeline
from emberline.service.responses import ResponseStore
from emberline.telemetry.health import Health
from emberline.telemetry.status import Status, StatusQuery
from emberline.text.grammar.compiler_pool import GrammarCompiler
from emberline.upstream.models import UpstreamModels

_ANY_VOCABULARY = 1 << 31  # upstream servers check token ids themselves

T = TypeVar("T")
AnyRequest = TypeVar("AnyRequest", GenerateRequest, EncodeRequest, SpeechRequest, MediaRequest)

log = logging.getLogger("emberline.request")


class Service:
    """Serves models on workers, whose connections it owns. Made by `open_service` and `open_http_worker`."""

    def __init__(
        self,
        core: CoreAccess,
        served: ServedModels,
        engines: Mapping[str, EngineClient],
        close_core: Callable[[], Awaitable[None]],
        grammars: GrammarCompiler,
        upstream: UpstreamModels | None = None,
        data_dir: Path | None = None,
        timings: Timings = DEFAULTS,
    ) -> None:
        self.core = core
        self._timings = timings
        self._exchange = None if data_dir is None else data_dir / kv_cache.FOLDER
        self.upstream = upstream if upstream is not None else UpstreamModels(())
        self._served = served
        self.models = Models(served, self.upstream, core.aliases)
        self.engines = engines  # by endpoint name
        self._close_core = close_core
        self._tasks = EngineTasks(core, served, engines, grammars, timings)
        self.in_flight = InFlight(core, timings)
        self._pipeline = Pipeline(core, self.models, self._tasks, self.upstream, self.in_flight)
        self.run = self._pipeline.run
        self.count_tokens = self._pipeline.count_tokens
        for engine in engines.values():
            engine.start()

    # --- queries -----------------------------------------------------------------------------------------------------

    @property
    def aliases(self) -> AliasTable:
        return self.core.aliases.table

    async def change_alias(self, name: str, targets: Mapping[str, int] | None) -> None:
        """Set an alias, or remove it; in effect in every HTTP worker once this returns, and after a restart."""
        if targets is not None:
            self.models.check_alias(name, targets)
        await self.core.operations.change_alias(name, targets)

    @property
    def responses(self) -> ResponseStore:
        """Stored responses, for later requests to continue."""
        return self.core.responses

    @property
    def event_logs(self) -> EventLogs:
        return self.core.event_logs

    async def health(self) -> Health:
        """Not ok without the core, and while draining, so that load balancers send their requests elsewhere."""
        try:
            health = await self.core.operations.health()
        except Unavailable as error:
            health = Health(False, {"core": error.message})
        return Health(
            health.ok and not self.in_flight.is_draining, {**health.detail, "draining": self.in_flight.is_draining}
        )

    async def metrics(self) -> bytes:
        return await self.core.operations.metrics()

    async def status(self, query: StatusQuery) -> Status:
        """Status of the whole server, for its operator."""
        found = await self.core.operations.status(query)
        found.ok &= not self.in_flight.is_draining
        return found

    async def refresh_prices(self) -> None:
        await self.core.operations.refresh_prices()

    async def change_workers(self, change: WorkerChange) -> list[str]:
        """Workers join, leave or drain; returns their names."""
        return await self.core.cluster_admin.change_workers(change)

    async def join_challenge(self) -> Challenge:
        return await self.core.cluster_admin.join_challenge()

    async def announce(self, signed: Signed) -> Signed:
        """A worker announces itself to the cluster."""
        return await self.core.cluster_admin.announce(signed)

    async def cluster_status(self) -> ClusterStatus:
        return await self.core.cluster_admin.cluster_status()

    async def scaling_plan(self, model: str, limit: int) -> dict[str, Any]:
        """Observations and actions of the planner, with its reasons."""
        return await self.core.cluster_admin.scaling_plan(model, limit)

    async def set_scaling_bounds(self, model: str, changes: dict[str, Any] | None) -> dict[str, Any] | None:
        return await self.core.cluster_admin.set_scaling_bounds(model, changes)

    @property
    def kv_cache(self) -> kv_cache.KVCacheAdmin:
        """Cached KV of the engine workers, for its owners and the operator."""
        return kv_cache.KVCacheAdmin(list(self.engines.values()), self._exchange)

    async def load_model(self, model_id: str, action: Literal["load", "unload"]) -> ModelCard:
        """Load or unload a model of ours, as an operator asks; returns when it is done."""
        if self.models.is_upstream(card := self.models.find(model_id)):
            raise self._served.not_found(card.id)
        await self.core.operations.load_model(card.id, action)
        return card

    @property
    def n_running(self) -> int:
        """Number of requests that are not finalized yet."""
        return self.in_flight.n_running

    # --- lifecycle ---------------------------------------------------------------------------------------------------

    async def ready(self, timeout_s: float) -> bool:
        """Wait until every configured engine is connected; members of a cluster may be away for long."""
        names = {endpoint.name for item in self._served.known() for endpoint in item.endpoints}
        waits = [engine.wait_connected(timeout_s) for name, engine in self.engines.items() if name in names]
        return all(await asyncio.gather(*waits))

    async def warm_up(self) -> None:
        """Prepare what only requests with grammars need, so that the first of them need not wait for it."""
        await self._tasks.warm_up()

    async def drain(self, limit_s: float) -> None:
        """Refuse new requests; return when the running ones are finalized, or after `limit_s`."""
        await self.in_flight.drain(limit_s)

    async def close(self) -> None:
        """Cut the connections to all workers, finalize the requests that this ends, then close the core."""
        self.in_flight.is_draining = True
        engines = self.engines.values()
        await asyncio.gather(*(engine.close(server_ends=True) for engine in engines), self.upstream.close())
        await self.in_flight.close(self._timings.close_wait_s)
        await self._tasks.close()
        await self._close_core()
