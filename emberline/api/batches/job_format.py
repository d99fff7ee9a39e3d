"""The jobs of a batch in the format of its API: from the submitted file into the queue, and from the queue to results.

A batch keeps the file that it was submitted as. What the canonical request does not hold (the model as the client
wrote it, whether logprobs were requested) is read from that file again when a result is formatted.
"""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Collection
from typing import NamedTuple

import msgspec

from emberline.api.http.errors import FieldNames
from emberline.api.http.exchange import Services
from emberline.jobs.batches.batch import Batch
from emberline.jobs.queue.job import Job, NewJob
from emberline.jobs.queue.queue import Queue
from emberline.protocol.complete_response import Answer
from emberline.protocol.errors import EmberlineError, Internal, TooLarge, from_info
from emberline.protocol.request import EncodeRequest, GenerateRequest, PredictRequest, Priority, alias_caller

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
PAGE_JOBS = 100  # jobs that are in memory at once while results are read
SUCCEEDED = ("succeeded",)
NOT_SUCCEEDED = ("failed", "cancelled", "expired", "dead")
_YIELD_BYTES = 48 << 10  # of JSON: about a millisecond of work


class FileLine(NamedTuple):
    number: int  # from 1
    data: bytes | None  # None if it is too long

    def content(self) -> bytes:
        if self.data is None:
            raise TooLarge("the request is larger than one of a batch may be")
        return self.data


# Parses the lines of one batch, in order; it may keep state. The job of an invalid line holds the error.
JobReader = Callable[[FileLine], NewJob]


async def file_lines(chunks: AsyncIterable[bytes], max_bytes: int) -> AsyncIterator[FileLine]:
    """The lines that are not blank. A line that is too long is skipped without being held in memory."""
    number, parts, n_bytes = 1, [b""], 0
    async for chunk in chunks:
        first, *others = chunk.split(b"\n")
        n_bytes += len(first)
        parts = [*parts, first] if n_bytes <= max_bytes else []
        for part in others:
            if line := _line(number, parts, n_bytes, max_bytes):
                yield line
            number, parts, n_bytes = number + 1, [part], len(part)
    if line := _line(number, parts, n_bytes, max_bytes):
        yield line


def _line(number: int, parts: list[bytes], n_bytes: int, max_bytes: int) -> FileLine | None:
    if n_bytes > max_bytes:
        return FileLine(number, None)
    data = b"".join(parts)
    if number == 1:
        data = data.removeprefix(BYTE_ORDER_MARK)
    data = data.strip()
    return FileLine(number, data) if data else None


class CooperativeYield:
    """Lets other tasks run from time to time during a long loop of synchronous work."""

    def __init__(self) -> None:
        self._n_bytes = 0

    async def after(self, n_bytes: int) -> None:
        self._n_bytes += n_bytes
        if self._n_bytes >= _YIELD_BYTES:
            self._n_bytes = 0
            await asyncio.sleep(0)


class Result(NamedTuple):
    job: Job
    line: bytes  # as submitted; empty if it was too long to be kept

    def answer(self) -> Answer:
        """The answer of a job that succeeded; otherwise its error is raised."""
        if self.job.state != "succeeded" or self.job.answer is None:
            raise job_error(self.job)
        return self.job.answer

    def renamed(self, error: EmberlineError, field_names: Callable[[], FieldNames]) -> EmberlineError:
        """`error` with the client's field names. A job that never ran failed while parsing and has them already."""
        if self.job.started_us is None:
            return error
        try:
            return field_names().rename(error)
        except EmberlineError:
            return error


def job_error(job: Job) -> EmberlineError:
    """Why a job did not succeed."""
    return from_info(job.error) if job.error else Internal(f"the request ended as {job.state}")


async def batch_results(queue: Queue, batch: Batch, states: Collection[str] = ()) -> AsyncIterator[Result]:
    """The batch's jobs in these states, in the order of their numbers, each with its submitted line."""
    if batch.input_blob is None:
        raise Internal(f"{batch.id} has lost its input file")
    lines = file_lines(queue.blobs.stream(batch.input_blob), queue.limits.max_job_bytes)
    number, text = -1, b""
    after = -1
    yielding = CooperativeYield()
    while jobs := await queue.jobs(batch.id, after=after, limit=PAGE_JOBS, states=states):
        for job in jobs:
            while number < job.number:
                if (line := await anext(lines, None)) is None:
                    raise Internal(f"{batch.id} has more jobs than its file has lines")
                number, text = number + 1, line.data or b""
            yield Result(job, text)
            await yielding.after(len(text))
        after = jobs[-1].number


def line_request(
    task: GenerateRequest | EncodeRequest | PredictRequest, service: Services, batch: Batch
) -> GenerateRequest:
    """The request of a batch's line, as the queue runs it.

    An alias of several models stands for the same one in all lines of a batch, and in all requests of a session."""
    request = task
    if isinstance(request, EncodeRequest):
        request = GenerateRequest(id=task.id, model=task.model, encode=request, api=task.api)
    elif isinstance(request, PredictRequest):
        request = GenerateRequest(id=task.id, model=task.model, predict=request, api=task.api)
    caller = alias_caller(batch.account, request.session, batch.id)
    return queued_request(request, service.models.find(request.model, batch.account, caller).id)


def queued_request(request: GenerateRequest, model: str) -> GenerateRequest:
    """The request as the queue runs it: with the model's canonical id, at batch priority, willing to wait."""
    return msgspec.structs.replace(request, model=model, priority=Priority.BATCH, reject_if_busy=False)
