"""A batch whose requests came in the body: they are kept as a file of lines, and read from it like any other."""

from collections.abc import AsyncIterator, Iterable

import msgspec

from emberline.api.batches.job_format import Steps
from emberline.api.http.byte_stream import gathered
from emberline.api.http.call import Call
from emberline.jobs.batches.batch import Batch, NewBatch
from emberline.jobs.batches.files import File

_PURPOSE = "queue"
_FORGET_S = 3600.0  # the file's row, should we die before the batch has taken what is in it
_ONE_LINE = bytes.maketrans(b"\r\n", b"  ")  # JSON has line ends only between its tokens


async def submit_lines(call: Call, new: NewBatch, requests: Iterable[msgspec.Raw]) -> Batch:
    """Durable when it returns."""
    file = await store_lines(call, new.id, requests)
    new.input_file_id = file.id
    try:
        batch = await call.batches.queue.create(new)
    finally:
        await call.batches.queue.files.delete(new.account, file.id)
    call.batches.loader.wake()
    return batch


async def store_lines(call: Call, name: str, requests: Iterable[msgspec.Raw]) -> File:
    """For a moment it is a file of the account; whoever needs it for longer refers to what is in it."""
    files = call.batches.queue.files
    return await files.add(call.principal.account, name, _PURPOSE, gathered(_lines(requests)), _FORGET_S)


async def _lines(requests: Iterable[msgspec.Raw]) -> AsyncIterator[bytes]:
    steps = Steps()
    for request in requests:
        line = bytes(request).translate(_ONE_LINE) + b"\n"
        yield line
        await steps.took(len(line) // 8)  # copying is quicker than reading
