"""The lines of a batch in its dialect: from its file into the queue, and from the queue into its results.

A batch keeps the file that it was submitted as. What the canonical request does not say (the model as the client wrote
it, whether logprobs were asked for) is read from there again when a result is shown.
"""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Collection
from typing import NamedTuple, Protocol

import msgspec

from emberline.api.http.call import Backend, Call
from emberline.api.http.errors import Dialect, Names
from emberline.jobs.batches.batch import Batch
from emberline.jobs.queue.job import Job, NewJob
from emberline.jobs.queue.queue import Queue
from emberline.protocol.errors import Internal
from emberline.protocol.request import GenerateRequest, Priority

BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # some editors begin a file with it


class FileLine(NamedTuple):
    at: int  # from 1, as editors count
    data: bytes | None  # None: it is too long


async def lines_of(chunks: AsyncIterable[bytes], max_bytes: int) -> AsyncIterator[FileLine]:
    """The lines that are not blank. What is too long is passed over without being held."""
    at, parts, n_bytes = 1, [b""], 0
    async for chunk in chunks:
        first, *others = chunk.split(b"\n")
        n_bytes += len(first)
        parts = [*parts, first] if n_bytes <= max_bytes else []
        for piece in others:
            if line := _line(at, parts, n_bytes, max_bytes):
                yield line
            at, parts, n_bytes = at + 1, [piece], len(piece)
    if line := _line(at, parts, n_bytes, max_bytes):
        yield line


def _line(at: int, parts: list[bytes], n_bytes: int, max_bytes: int) -> FileLine | None:
    if n_bytes > max_bytes:
        return FileLine(at, None)
    data = b"".join(parts)
    if at == 1:
        data = data.removeprefix(BYTE_ORDER_MARK)
    data = data.strip()
    return FileLine(at, data) if data else None


_STEP_BYTES = 48 << 10  # of JSON; about a millisecond of work


class Steps:
    def __init__(self) -> None:
        self._n_bytes = 0

    async def took(self, n_bytes: int) -> None:
        """So much was done; let the others go first now and then."""
        self._n_bytes += n_bytes
        if self._n_bytes >= _STEP_BYTES:
            self._n_bytes = 0
            await asyncio.sleep(0)


PAGE_LINES = 100  # of results that are in memory at once

SUCCEEDED = ("succeeded",)
NOT_SUCCEEDED = ("failed", "cancelled", "expired", "dead")


class LineReader(Protocol):
    """One batch's dialect, while its lines are read. It remembers what it has seen."""

    def read(self, line: FileLine) -> NewJob:
        """The line as the queue takes it; a bad one says what is wrong with it."""

    def skip(self, line: FileLine) -> None:
        """One that was read before a restart."""


class Result(NamedTuple):
    line: Job
    given: bytes  # what it was submitted as; empty: it was too long to be kept


async def results_of(queue: Queue, batch: Batch, states: Collection[str] = ()) -> AsyncIterator[Result]:
    """The batch's lines in these states, by number, each with what it was submitted as."""
    given = _given(queue, batch)
    at, text = -1, b""
    after = -1
    steps = Steps()
    while found := await queue.jobs(batch.id, after=after, limit=PAGE_LINES, states=states):
        for line in found:
            while at < line.number:
                at, text = at + 1, (await _next(given, batch)).data or b""
            yield Result(line, text)
            await steps.took(len(text))
        after = found[-1].number


def runnable(request: GenerateRequest, service: Backend) -> GenerateRequest:
    """As the queue wants it: the model by its own name, at the lowest priority, content to wait."""
    model = service.resolve(request.model).id
    return msgspec.structs.replace(request, model=model, priority=Priority.BATCH, reject_if_busy=False)


def _given(queue: Queue, batch: Batch) -> AsyncIterator[FileLine]:
    if batch.input_blob is None:
        raise Internal(f"{batch.id} has lost what it was submitted as")
    return lines_of(queue.blobs.stream(batch.input_blob), queue.limits.max_job_bytes)


async def _next(given: AsyncIterator[FileLine], batch: Batch) -> FileLine:
    line = await anext(given, None)
    if line is None:
        raise Internal(f"{batch.id} has more lines than its file")
    return line


class LineCall(Call):
    """It has an id and nothing else of a connection; one serves line after line."""

    def __init__(self, request_id: str, dialect: Dialect) -> None:
        self.id = request_id
        self.headers = {}
        self.names = Names()
        self.dialect = dialect
