"""Reads submitted batches from their files into the queue, in the background.

A batch is durable before any of its lines has been read. If this process dies, another one resumes where it stopped.
"""

import asyncio
import contextlib
import logging
import secrets
from functools import partial

from emberline.api.anthropic.batches import read_message_job
from emberline.api.batches.job_format import CooperativeYield, JobReader, file_lines
from emberline.api.http.exchange import Services
from emberline.api.openai.batch_jobs import OpenAIJobReader
from emberline.api.workers_ai.handlers import read_input_job
from emberline.jobs.batches.batch import Batch
from emberline.jobs.limits import INSERT_CHUNK
from emberline.jobs.queue.job import NewJob
from emberline.jobs.queue.queue import Queue
from emberline.net.periodic import stop
from emberline.protocol.errors import Conflict, EmberlineError, Internal, TooLarge, Unavailable

CONCURRENT_BATCHES = 2  # so that a small batch need not wait for a large one
POLL_S = 5.0  # for batches whose process died
OFF_LOOP_BYTES = 256 << 10  # of a line: a longer one is read outside the event loop
_RETRY_S = 1.0

log = logging.getLogger("emberline.batches")


class BatchService:
    """The queue as the HTTP API of one process uses it. Every HTTP process has one, over the same store."""

    def __init__(self, queue: Queue, service: Services) -> None:
        self.queue = queue
        self.closing = asyncio.Event()
        self.result_sizes: dict[tuple[str, int], int] = {}
        self._service = service
        self._submitted = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start_loading(self) -> None:
        """Start to load batches: this process's, and those that other processes left unfinished."""
        self._tasks = [asyncio.create_task(self._run()) for _ in range(CONCURRENT_BATCHES)]

    def wake(self) -> None:
        self._submitted.set()

    async def close(self) -> None:
        """Stop loading. The queue stays open."""
        self.closing.set()
        await stop(*self._tasks)

    async def _run(self) -> None:
        owner = f"loader-{secrets.token_hex(8)}"
        while True:
            self._submitted.clear()
            try:
                while batch := await self.queue.claim_validating(owner):
                    await self._load(batch)
            except Unavailable as error:
                log.warning("batches cannot be loaded now: %s", error.message)
                await asyncio.sleep(_RETRY_S)
                continue
            except EmberlineError as error:
                log.error("batches cannot be loaded: %s", error.message)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._submitted.wait()

    async def _load(self, batch: Batch) -> None:
        try:
            await self._append_jobs(batch)
        except Conflict:
            log.info("the batch was cancelled or is loaded by another process", extra={"batch": batch.id})
        except Unavailable:
            raise
        except EmberlineError as error:
            await self.queue.reject(batch, [error.info()])
        except Exception:
            log.exception("a batch could not be loaded", extra={"batch": batch.id})
            failure = Internal("the batch could not be loaded; the server's log has the reason")
            await self.queue.reject(batch, [failure.info()])

    async def _append_jobs(self, batch: Batch) -> None:
        queue, read_job = self.queue, job_reader(batch, self._service)
        assert batch.input_blob is not None, "a batch is created with its file"
        n_read, yielding = 0, CooperativeYield()
        jobs: list[NewJob] = []
        async for line in file_lines(queue.blobs.stream(batch.input_blob), queue.limits.max_job_bytes):
            n_read += 1
            if n_read > queue.limits.max_jobs:
                raise TooLarge(f"a batch has at most {queue.limits.max_jobs:,} lines: split it", param="input_file_id")
            # Also lines loaded before a restart: the reader may keep state.
            large = len(line.data or b"") > OFF_LOOP_BYTES
            job = await asyncio.to_thread(read_job, line) if large else read_job(line)
            if n_read > batch.counts.total:
                jobs.append(job)
            await yielding.after(len(line.data or b""))
            if len(jobs) == INSERT_CHUNK:
                await queue.append(batch, jobs)
                jobs = []
        await queue.append(batch, jobs)
        await queue.start(batch)


def job_reader(batch: Batch, service: Services) -> JobReader:
    if batch.kind == "anthropic":
        return partial(read_message_job, service, batch)
    if batch.kind == "workers_ai":
        return partial(read_input_job, service, batch)
    assert batch.kind == "openai", "a background response has no file to load"
    return OpenAIJobReader(service, batch)
