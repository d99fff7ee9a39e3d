"""The inference service of one process: the pipeline, its connections to workers, and what the APIs use of it."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from emberline.catalog.model_card import TEXT_GENERATION, ModelCard
from emberline.cluster.engine_client import EngineClient
from emberline.cluster.served_models import ServedModels
from emberline.cluster.timings import DEFAULTS, Timings
from emberline.images.request_images import RequestImages
from emberline.images.sources import StoredFiles
from emberline.service import kv_cache
from emberline.service.core import CoreAccess
from emberline.service.engine_tasks import ChatFormat, EngineTasks
from emberline.service.event_log import EventLogs
from emberline.service.in_flight import InFlight
from emberline.service.models import Models
from emberline.service.operations import ServiceOperations
from emberline.service.pipeline import Pipeline
from emberline.service.responses import ResponseStore
from emberline.text.grammar.compiler_pool import GrammarCompiler
from emberline.upstream.models import UpstreamModels


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
        images: RequestImages | None = None,
    ) -> None:
        self.core = core
        self._images = images
        self._timings = timings
        self._exchange = None if data_dir is None else data_dir / kv_cache.FOLDER
        self.upstream = upstream if upstream is not None else UpstreamModels(())
        self._served = served
        self.models = Models(served, self.upstream, core.aliases)
        self.engines = engines  # by endpoint name
        self._close_core = close_core
        self._tasks = EngineTasks(core, served, engines, grammars, timings, images)
        self.in_flight = InFlight(core, timings)
        self._pipeline = Pipeline(core, self.models, self._tasks, self.upstream, self.in_flight, images)
        self.run, self.n_ahead = self._pipeline.run, core.n_ahead
        self.count_tokens = self._pipeline.count_tokens
        self.tokenize, self.detokenize = self._pipeline.tokenize, self._pipeline.detokenize
        self.tokenizer_info = self._pipeline.tokenizer_info
        self.operations = ServiceOperations(core.operations, self.models, served, self.in_flight)
        self.cluster_admin = core.cluster_admin
        for engine in engines.values():
            engine.start()

    def use_files(self, files: StoredFiles) -> None:
        """Let requests name images among the files that accounts have uploaded."""
        if self._images is not None:
            self._images.sources.files = files

    async def chat_format(self, card: ModelCard) -> ChatFormat:
        """The chat template of a model, and the texts that end its turns. Empty if another server computes it."""
        return ChatFormat() if self.models.is_upstream(card) else await self._tasks.chat_format(card)

    @property
    def responses(self) -> ResponseStore:
        """Stored responses, for later requests to continue."""
        return self.core.responses

    @property
    def event_logs(self) -> EventLogs:
        """Logs of streams that their clients may resume."""
        return self.core.event_logs

    @property
    def kv_cache(self) -> kv_cache.KVCacheAdmin:
        """Cached KV of the engine workers, for its owners and the operator."""
        generates = any(card.task == TEXT_GENERATION for card in self._served.cards())
        return kv_cache.KVCacheAdmin(list(self.engines.values()), self._exchange, generates)

    @property
    def n_running(self) -> int:
        """Number of requests that are not finalized yet."""
        return self.in_flight.n_running

    # --- lifecycle ---------------------------------------------------------------------------------------------------

    async def ready(self, timeout_s: float) -> bool:
        """Wait until every configured engine is connected and every upstream server was probed once, so that requests
        can go to those that are up. False: some engine is not connected within `timeout_s`; members of a cluster may
        be away for long."""
        names = {endpoint.name for item in self._served.known() for endpoint in item.endpoints}
        waits = [engine.wait_connected(timeout_s) for name, engine in self.engines.items() if name in names]
        *connected, _ = await asyncio.gather(*waits, self.upstream.wait_probed(timeout_s))
        return all(connected)

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
