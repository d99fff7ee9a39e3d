"""A job queue some of whose calls a test delays, refuses or answers itself."""

from collections.abc import AsyncIterable, Awaitable, Callable, Iterable
from typing import Any

from emberline.accounts.usage_row import UsageRow
from emberline.jobs.batches.batch import Batch, NewBatch
from emberline.jobs.batches.blobs import Blobs
from emberline.jobs.limits import QueueLimits
from emberline.jobs.queue.job import Lease, NewJob
from emberline.jobs.queue.queue import Queue
from emberline.protocol.complete_response import Answer
from emberline.store import Database

Hook = Callable[..., Awaitable[Any]]  # of the call itself, without arguments, and of its arguments


class FaultyQueue(Queue):
    """A real queue. `around` has the hooks of calls by name: a hook makes the call, or does something else."""

    def __init__(self, store: Database, blobs: Blobs, limits: QueueLimits) -> None:
        super().__init__(store, blobs, limits)
        self.around: dict[str, Hook] = {}

    async def submit(self, new: NewBatch, jobs: Iterable[NewJob] | AsyncIterable[NewJob]) -> Batch:
        batch: Batch = await self._call("submit", lambda: super(FaultyQueue, self).submit(new, jobs), new)
        return batch

    async def create(self, new: NewBatch) -> Batch:
        batch: Batch = await self._call("create", lambda: super(FaultyQueue, self).create(new), new)
        return batch

    async def batch(self, account: str, batch_id: str) -> Batch:
        batch: Batch = await self._call("batch", lambda: super(FaultyQueue, self).batch(account, batch_id))
        return batch

    async def claim(self, owner: str, model: str, n: int, *, quarantined: bool = False) -> list[Lease]:
        claim = super().claim
        leases: list[Lease] = await self._call("claim", lambda: claim(owner, model, n, quarantined=quarantined))
        return leases

    async def complete(self, lease: Lease, answer: Answer, usage: UsageRow | None = None) -> bool:
        done: bool = await self._call("complete", lambda: super(FaultyQueue, self).complete(lease, answer, usage))
        return done

    async def finish_stopped(self, lease: Lease, usage: UsageRow | None = None) -> bool:
        finish = super().finish_stopped
        done: bool = await self._call("finish_stopped", lambda: finish(lease, usage))
        return done

    async def _call(self, name: str, call: Callable[[], Awaitable[Any]], *arguments: object) -> Any:
        hook = self.around.get(name)
        return await (call() if hook is None else hook(call, *arguments))
