"""Pulls models for the operator while the server runs: by the names of the catalog and of the hub, never by a path."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Protocol

from emberline.catalog import offers
from emberline.catalog.download import DownloadProgress
from emberline.catalog.model_store import ModelStore
from emberline.catalog.offers import ModelMemory, Offer
from emberline.catalog.pull import pull
from emberline.catalog.store_watch import wait_until_offered
from emberline.protocol.errors import Forbidden, ModelNotFound
from emberline.protocol.prediction import LogEnd, Pushed, Resources, VersionRow

MAX_PUSHES = 4  # concurrently
Update = str | DownloadProgress  # a sentence for the person who waits, or how far the download is


class Pushes(Protocol):
    """Adds models that come over HTTP. `RemotePushes`."""

    def check(self, account: str) -> None: ...

    def push(self, archive: bytes, name: str, resources: Resources, account: str) -> Pushed:
        """Blocks for as long as packages take to install."""

    def versions(self, account: str, name: str) -> list[VersionRow]: ...

    def log(self, account: str, name: str, version: int | None, n_lines: int) -> LogEnd: ...

    def roll_back(self, account: str, name: str, version: int | None) -> list[VersionRow]: ...

    def remove(self, account: str, name: str) -> None: ...


class ModelPulls:
    """The models that can be added to this machine. `memory` measures what there is for them, and may take a second."""

    def __init__(self, store: ModelStore, memory: Callable[[], ModelMemory], pushes: Pushes | None = None) -> None:
        self._store = store
        self._memory = memory
        self._pushes = pushes  # None: this server takes no models over HTTP
        self._pushing = ThreadPoolExecutor(MAX_PUSHES, thread_name_prefix="push")  # others wait for a thread

    def pushes(self, account: str) -> Pushes:
        """The models that were pushed over HTTP. Raises Forbidden unless the account (empty: the operator) may push."""
        if self._pushes is None:
            raise Forbidden("this server takes no models over HTTP")
        self._pushes.check(account)
        return self._pushes

    async def push(self, archive: bytes, name: str, resources: Resources, account: str) -> Pushed:
        """Add a version of a predictor from an archive of its project. A caller may go away meanwhile."""
        pushes = self.pushes(account)
        loop = asyncio.get_running_loop()
        return await asyncio.shield(loop.run_in_executor(self._pushing, pushes.push, archive, name, resources, account))

    async def versions(self, account: str, name: str) -> list[VersionRow]:
        """The versions of a model that the account has pushed."""
        return await asyncio.to_thread(self.pushes(account).versions, account, name)

    async def log(self, account: str, name: str, version: int | None, n_lines: int) -> LogEnd:
        """The end of the log of a model that the account has pushed."""
        return await asyncio.to_thread(self.pushes(account).log, account, name, version, n_lines)

    async def roll_back(self, account: str, name: str, version: int | None) -> list[VersionRow]:
        """Serve an earlier version of a model that the account has pushed."""
        return await asyncio.shield(asyncio.to_thread(self.pushes(account).roll_back, account, name, version))

    async def remove(self, account: str, name: str) -> None:
        """Remove a model that the account has pushed."""
        await asyncio.shield(asyncio.to_thread(self.pushes(account).remove, account, name))

    async def offers(self) -> list[Offer]:
        """Every model of the catalog, the smallest first, with whether it fits this machine and is here."""
        return await asyncio.to_thread(lambda: offers.offers(self._store, self._memory()))

    async def pull(self, name: str) -> AsyncGenerator[Update, None]:
        """Download a model and yield updates; return once the server offers it. A caller may go away meanwhile."""
        if not name.startswith("hf:") and self._store.offer(name) is None:
            raise ModelNotFound(
                f"the catalog has no model {name[:100]!r}: `emberline ls --all` lists it; hf:org/repo is a name, too",
                param="model",
            )
        loop, updates = asyncio.get_running_loop(), asyncio.Queue[Update | None]()
        failures: list[Exception] = []

        def tell(update: Update | None) -> None:
            with suppress(RuntimeError):  # the server has stopped
                loop.call_soon_threadsafe(updates.put_nowait, update)

        def run() -> None:
            try:
                pull(name, self._store, tell, on_gpu=self._memory().on_gpu, note=tell)
                wait_until_offered(self._store.root)
            except Exception as error:
                failures.append(error)
            tell(None)

        # A thread of its own, and a daemon: a stop of the server does not wait for a download, which goes on later.
        threading.Thread(target=run, name="pull", daemon=True).start()
        while (update := await updates.get()) is not None:
            yield update
        if failures:
            raise failures[0]
