"""Batch services for API tests: a queue on a store, and a puller that runs jobs with the fake service."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from emberline.accounts.auth import Authenticator
from emberline.accounts.secret import Secret
from emberline.api.app import ApiSettings, App
from emberline.api.batch_loader import BatchService
from emberline.jobs.batches.blobs import BlobStore
from emberline.jobs.batches.database_blobs import DatabaseBlobs
from emberline.jobs.limits import QueueLimits
from emberline.jobs.queue.job import Lease
from emberline.jobs.queue.queue import BLOBS, Queue, open_queue
from emberline.net.http_server import ASGIApp, Receive, Scope, Send
from emberline.protocol.errors import EmberlineError
from emberline.protocol.request import Principal
from emberline.service.event_collector import collect_answer
from emberline.service.work import Work
from emberline.store import Database, open_store
from tests.api.fake_service import CARDS, FakeService
from tests.faulty_queue import FaultyQueue

OWNER = "test-puller"


@asynccontextmanager
async def open_batch_service(
    store: Database, service: FakeService, folder: Path, **limits: Any
) -> AsyncIterator[BatchService]:
    blobs = BlobStore(folder / BLOBS)
    queue = FaultyQueue(store, DatabaseBlobs(store, blobs) if store.is_shared else blobs, QueueLimits(**limits))
    queue.start_sweeping()
    batches = BatchService(queue, service)
    batches.start_loading()
    try:
        yield batches
    finally:
        await batches.close()
        await queue.close()


async def run_all(queue: Queue, service: FakeService) -> int:
    """Run the jobs that are queued now; returns their number."""
    leases = [lease for card in CARDS for lease in await queue.claim(OWNER, card.id, 1000)]
    await asyncio.gather(*(run_one(queue, service, lease) for lease in leases))
    return len(leases)


async def run_one(queue: Queue, service: FakeService, lease: Lease) -> None:
    """Run one job as the puller would, without retries."""
    try:
        answer = await collect_answer(service.run(Work(lease.request, Principal(lease.account))), lease.request.n)
    except EmberlineError as error:
        ours = await queue.fail(lease, error.info(), retry=False)
    else:
        ours = await queue.complete(lease, answer)
    assert ours


class SelfMade:
    """The app with its queue and a puller, opened by the serving event loop."""

    def __init__(self, service: FakeService, folder: Path, key: str | None = None) -> None:
        self._service = service
        self._folder = folder
        self._auth = Authenticator(Secret("0" * 64), key)
        self._app: asyncio.Task[ASGIApp] | None = None
        self.runs = True  # whether lines are run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._app is None:
            self._app = asyncio.create_task(self._open())
        await (await asyncio.shield(self._app))(scope, receive, send)

    async def _open(self) -> ASGIApp:
        queue = await open_queue(await open_store(self._folder / "t.db"), self._folder)
        batches = BatchService(queue, self._service)
        batches.start_loading()
        self._pulling = asyncio.create_task(self._pull(queue))
        return App(self._service, ApiSettings(auth=self._auth), batches=batches)

    async def _pull(self, queue: Queue) -> None:
        while True:
            if not self.runs or not await run_all(queue, self._service):
                await asyncio.sleep(0.02)


def jsonl(lines: Iterable[Any]) -> bytes:
    return b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)


def lines_in(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.content.splitlines()]


async def until(ready: Any, timeout_s: float = 60.0) -> Any:
    """The first true result of `ready`, which is polled."""
    async with asyncio.timeout(timeout_s):
        while not (found := await ready()):
            await asyncio.sleep(0.01)
    return found
