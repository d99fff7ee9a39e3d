"""The lines of a batch in its dialect: from its file into the queue, and from the queue into its results.

A batch keeps the file that it was submitted as. What the canonical request does not say (the model as the client wrote
it, whether logprobs were asked for) is read from there again when a result is shown.
"""

from collections.abc import AsyncIterator, Collection
from typing import NamedTuple, Protocol

import msgspec

from emberline.api.file_lines import FileLine, lines_of
from emberline.api.ports import Backend
from emberline.api.stepping import Steps
from emberline.jobs.batch import Batch
from emberline.jobs.line import Line, NewLine
from emberline.jobs.queue import Queue
from emberline.protocol.errors import Internal
from emberline.protocol.request import GenerateRequest, Priority

PAGE_LINES = 100  # of results that are in memory at once

SUCCEEDED = ("succeeded",)
NOT_SUCCEEDED = ("failed", "cancelled", "expired", "dead")


class LineReader(Protocol):
    """One batch's dialect, while its lines are read. It remembers what it has seen."""

    def read(self, line: FileLine) -> NewLine:
        """The line as the queue takes it; a bad one says what is wrong with it."""

    def skip(self, line: FileLine) -> None:
        """One that was read before a restart."""


class Result(NamedTuple):
    line: Line
    given: bytes  # what it was submitted as; empty: it was too long to be kept


async def results_of(queue: Queue, batch: Batch, states: Collection[str] = ()) -> AsyncIterator[Result]:
    """The batch's lines in these states, by number, each with what it was submitted as."""
    given = _given(queue, batch)
    at, text = -1, b""
    after = -1
    steps = Steps()
    while found := await queue.lines(batch.id, after=after, limit=PAGE_LINES, states=states):
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
    return lines_of(queue.blobs.stream(batch.input_blob), queue.limits.max_line_bytes)


async def _next(given: AsyncIterator[FileLine], batch: Batch) -> FileLine:
    line = await anext(given, None)
    if line is None:
        raise Internal(f"{batch.id} has more lines than its file")
    return line
