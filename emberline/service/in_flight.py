"""The requests of this process that are admitted, or wait for it, and are not finalized yet."""

import asyncio
import logging
from typing import Any

from emberline.cluster.timings import Timings
from emberline.net.periodic import every
from emberline.protocol.errors import Unavailable
from emberline.service.core import Core
from emberline.service.request_run import RequestRun

log = logging.getLogger("emberline.request")


class InFlight:
    """Tells the core what running requests have used, and lets them end when the server stops."""

    def __init__(self, core: Core, timings: Timings) -> None:
        self.is_draining = False
        self._core = core
        self._runs: set[RequestRun[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        checkpoints = every(timings.checkpoint_s, self._send_checkpoint, log, "usage so far was not told to the core")
        self._checkpoints = asyncio.create_task(checkpoints)

    @property
    def n_running(self) -> int:
        """Number of requests that are not finalized yet."""
        return len(self._runs)

    def runs_on_provider(self, name: str) -> bool:
        """True if a request of this process, running or waiting, is for a model of the provider."""
        return any(run.model.startswith(f"{name}/") for run in self._runs)

    def add(self, run: RequestRun[Any]) -> None:
        """Count a request until `ended` is called with it."""
        self._runs.add(run)
        self._idle.clear()

    def ended(self, run: RequestRun[Any]) -> None:
        """Handle the end of a request: nothing of it is left to do."""
        self._runs.discard(run)
        if not self._runs:
            self._idle.set()

    def _send_checkpoint(self) -> None:
        """Tell the core what running requests have used, so that it is known should this process or the core die."""
        if rows := [row for run in self._runs if (row := run.checkpoint()) is not None]:
            self._core.checkpoint(rows)

    async def drain(self, limit_s: float) -> None:
        """Refuse new requests; return when the running ones are finalized, or after `limit_s`."""
        self.is_draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), limit_s)
        except TimeoutError:
            log.warning("%d requests still run after %g s", len(self._runs), limit_s)

    async def close(self, limit_s: float) -> None:
        """Wait up to `limit_s` for running requests, then finalize those whose consumers do not read."""
        await self.drain(limit_s)
        stopping = Unavailable("the server is shutting down")
        for run in tuple(self._runs):
            run.finalize("finished" if run.done else "failed", stopping)
        finalizing = [run.finalizing for run in self._runs if run.finalizing is not None]
        await asyncio.gather(*finalizing, return_exceptions=True)
        self._checkpoints.cancel()
