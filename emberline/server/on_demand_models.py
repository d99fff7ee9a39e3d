"""The models that `emberline serve` loads on demand: which there are, and how much memory each takes."""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from emberline.catalog.integrity import verify
from emberline.catalog.model_card import TEXT_GENERATION, ModelCard
from emberline.catalog.model_files import ModelFiles
from emberline.catalog.model_store import ModelEntry, ModelStore
from emberline.catalog.store_watch import StoreWatch
from emberline.config import Config, EngineConfig
from emberline.engine.memory import MAX_HOST_KV_BYTES, free_host_bytes
from emberline.net.periodic import stop
from emberline.supervisor import machine
from emberline.supervisor.engine_workers import EngineWorkers, workers_per_model
from emberline.supervisor.model_manager import LoadableModel, ModelManager
from emberline.supervisor.model_switching import Limits
from emberline.weights.readahead import model_bytes

if TYPE_CHECKING:
    from emberline.service.core import LocalCore

MEMORY_SHARE = 0.8  # of the free memory, for models, by default
PROCESS_BYTES = 256 << 20  # of a worker, beside weights and KV cache

log = logging.getLogger("emberline.models")


def loaded_at_start(config: Config, local: Mapping[str, Path]) -> dict[str, Path]:
    """The named models that stay loaded: all, or none if fewer may be loaded at the same time."""
    most = config.models.max_loaded
    return dict(local) if not most or len(local) <= most else {}


def memory_limit(
    config: Config,
    find_gpus: Callable[[], Sequence[str]] = machine.gpus,
    free_bytes: Callable[[], int] = free_host_bytes,
) -> int:
    """Bytes that all models together may take. To be asked before any is loaded."""
    if config.models.memory_bytes:
        return config.models.memory_bytes
    return 1 << 62 if _on_gpus(config, find_gpus) else int(MEMORY_SHARE * free_bytes())


def drafter_bytes(engine: EngineConfig) -> int:
    """Weights that each worker loads to draft with. Their KV is a part of the worker's KV cache."""
    if engine.speculation not in ("auto", "eagle3", "draft_model"):
        return 0
    drafters = [Path(each).expanduser() for each in (engine.draft_model, engine.draft_head) if each]
    return sum(map(model_bytes, drafters))


class OnDemandModels:
    """Offers the models of the model store, as they come and go, and those that were named but are not loaded yet."""

    def __init__(
        self,
        config: Config,
        memory_bytes: int,
        named: Sequence[ModelEntry],
        pinned: Collection[str],
        workers: EngineWorkers,
        core: "LocalCore",
        elsewhere: Callable[[ModelCard], bool] = lambda card: False,
        scan_s: float = 1.0,
    ) -> None:
        """Offer the `named` models, which the command line says are to run on this machine, and those of the store.

        The `pinned` ones of the named models are loaded. Models that run `elsewhere` are not loaded here; nor is any,
        if the server is to start no worker of its own. The store is looked at every `scan_s` seconds."""
        assert core.membership is not None
        self._config = config
        self._store = ModelStore(config.home)
        self._membership = membership = core.membership
        self._named = {entry.card.id: entry for entry in named}
        self._pinned = frozenset(pinned)
        self._elsewhere, self._scan_s = elsewhere, scan_s
        self._on_demand = config.models.on_demand and not config.cluster.core_only
        self._on_demand &= bool(named or not config.endpoints)
        self._n_workers = workers_per_model(config.engine)
        self._drafter_bytes = drafter_bytes(config.engine)
        self._kv_bytes = config.engine.kv_bytes or min(memory_bytes // 4 // self._n_workers, MAX_HOST_KV_BYTES)
        models = config.models
        max_loaded = models.max_loaded
        if _on_gpus(config) and not config.engine.kv_bytes and not max_loaded:
            max_loaded = max(1, len(pinned))  # a worker's KV cache takes what its GPU has left
        limits = Limits(
            memory_bytes=memory_bytes,
            max_loaded=max_loaded,
            keep_alive_s=models.keep_alive_s,
            switch_after_s=models.switch_after_s,
            batch_switch_after_s=models.batch_switch_after_s,
        )
        self._manager = ModelManager(
            limits,
            workers,
            core.membership,
            core.admission,
            core.grants,
            self._check,
            lambda model: membership.reported_problem(model) or workers.problem(model),
        )
        core.models = self._manager
        core.register(self._manager.metrics)
        for model in pinned:
            self._manager.add_loaded(self._loadable(self._named[model]), workers.endpoints[model])
        self._watch = StoreWatch(self._store.root)
        self._watching: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Returns when as many of the named models are loaded as may be."""
        await asyncio.to_thread(self._watch.open)
        seen = await self._offer()
        self._manager.start()
        self._watching = asyncio.create_task(self._follow(seen))
        waiting = [model for model in self._named if model not in self._pinned]
        for model in waiting[: self._config.models.max_loaded]:
            await self._manager.ask(model, "load")

    async def close(self) -> None:
        await stop(self._watching)
        self._watch.close()
        await self._manager.close()

    async def _offer(self) -> int:
        """Offer what the store has; returns its stamp."""
        stamp = await asyncio.to_thread(self._watch.stamp)
        found = await asyncio.to_thread(self._store.entries) if self._on_demand else []
        entries = {entry.card.id: entry for entry in found if not self._elsewhere(entry.card)}
        replaced = {model for model, entry in entries.items() if entry.card.predictor is not None}
        named = {model: entry for model, entry in self._named.items() if model not in replaced}
        offered = list((entries | named).values())
        self._membership.offer([ModelFiles(entry.card, str(entry.path)) for entry in offered])
        self._manager.offer([self._loadable(entry) for entry in offered])
        self._watch.offered(stamp)
        return stamp

    async def _follow(self, seen: int) -> None:
        """Offer models that are pulled while the server runs. `seen`: the stamp of what is offered."""
        while True:
            await asyncio.sleep(self._scan_s)
            if await asyncio.to_thread(self._watch.stamp) != seen:
                try:
                    seen = await self._offer()
                except Exception as error:  # whatever is wrong with a model: it is looked for again
                    log.warning("the model store could not be read: %s", error)

    def _loadable(self, entry: ModelEntry) -> LoadableModel:
        each = entry.card.weight_bytes + PROCESS_BYTES
        if entry.card.task == TEXT_GENERATION:
            each += self._kv_bytes + self._drafter_bytes
        return LoadableModel(
            id=entry.card.id, path=entry.path, memory_bytes=self._n_workers * each, kv_bytes=self._kv_bytes
        )

    def _check(self, model: str) -> None:
        """Raise an error unless the model's files are as they were pulled. Blocks."""
        if (entry := self._store.find(model)) is not None:
            verify(self._store, entry.card)


def _on_gpus(config: Config, find_gpus: Callable[[], Sequence[str]] = machine.gpus) -> bool:
    return config.engine.device != "cpu" and bool(find_gpus())
