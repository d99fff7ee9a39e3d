"""Who reads the lines of submitted batches into the queue, behind the doors.

A batch is durable before a line of it was looked at. If this process dies, another goes on where it was.
"""

import asyncio
import contextlib
import logging
import secrets

from emberline.api.anthropic.batches import AnthropicLines
from emberline.api.batches.job_format import LineReader, Steps, lines_of
from emberline.api.http.call import Backend
from emberline.api.openai.batch_jobs import OpenAILines
from emberline.api.workers_ai.endpoints import WorkersAILines
from emberline.jobs.batches.batch import Batch
from emberline.jobs.limits import INSERT_CHUNK
from emberline.jobs.queue.job import NewJob
from emberline.jobs.queue.queue import Queue
from emberline.protocol.errors import Conflict, EmberlineError, Internal, TooLarge, Unavailable

AT_ONCE = 2  # batches: a small one need not wait for a large one
POLL_S = 5.0  # for batches that a process left behind
_RETRY_S = 1.0

log = logging.getLogger("emberline.batches")


class Loader:
    def __init__(self, queue: Queue, service: Backend) -> None:
        self._queue = queue
        self._service = service
        self._new = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._run()) for _ in range(AT_ONCE)]

    def wake(self) -> None:
        """There is a new batch."""
        self._new.set()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self) -> None:
        owner = f"loader-{secrets.token_hex(8)}"
        while True:
            self._new.clear()
            try:
                while batch := await self._queue.claim_validating(owner):
                    await self._load(batch)
            except Unavailable as error:
                log.warning("batches cannot be read now: %s", error.message)
                await asyncio.sleep(_RETRY_S)
                continue
            except EmberlineError as error:
                log.error("batches cannot be read: %s", error.message)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._new.wait()

    async def _load(self, batch: Batch) -> None:
        try:
            await self._read(batch)
        except Conflict:
            log.info("the batch is read elsewhere or was cancelled", extra={"batch": batch.id})
        except Unavailable:
            raise
        except EmberlineError as error:
            await self._queue.reject(batch, [error.info()])
        except Exception:
            log.exception("a batch could not be read", extra={"batch": batch.id})
            await self._queue.reject(batch, [Internal("the batch could not be read; the server's log says why").info()])

    async def _read(self, batch: Batch) -> None:
        queue, reader = self._queue, reader_of(batch, self._service)
        assert batch.input_blob is not None, "whoever creates a batch names its file"
        done, seen, steps = batch.counts.total, 0, Steps()
        lines: list[NewJob] = []
        async for line in lines_of(queue.blobs.stream(batch.input_blob), queue.limits.max_job_bytes):
            seen += 1
            if seen > queue.limits.max_jobs:
                raise TooLarge(f"a batch has at most {queue.limits.max_jobs:,} lines: split it", param="input_file_id")
            if seen <= done:
                reader.skip(line)
            else:
                lines.append(reader.read(line))
            await steps.took(len(line.data or b""))
            if len(lines) == INSERT_CHUNK:
                await queue.append(batch, lines)
                lines = []
        await queue.append(batch, lines)
        await queue.start(batch)


def reader_of(batch: Batch, service: Backend) -> LineReader:
    if batch.kind == "anthropic":
        return AnthropicLines(service)
    if batch.kind == "workers_ai":
        return WorkersAILines(service, batch.model)
    assert batch.kind == "openai", "a response is no file"
    return OpenAILines(service, batch.endpoint)


class BatchService:
    """Every process with a door has one, over the same store: a batch is known at all of them, and needs no core."""

    def __init__(self, queue: Queue, service: Backend) -> None:
        self.queue = queue
        self.loader = Loader(queue, service)
        self.closing = asyncio.Event()  # streams that wait for something end
        self.sizes: dict[tuple[str, int], int] = {}  # of files of results that were made, in bytes

    def load(self) -> None:
        """Read what is submitted, from now on, this process's and what others left behind."""
        self.loader.start()

    async def close(self) -> None:
        """The queue stays open."""
        self.closing.set()
        await self.loader.close()
