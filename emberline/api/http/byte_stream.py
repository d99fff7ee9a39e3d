"""A body that is sent as it is made, and is no event stream."""

import logging
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator
from contextlib import aclosing

from emberline.api.http.call import Call
from emberline.api.http.disconnect import while_connected
from emberline.api.http.reply import HeaderList
from emberline.protocol.errors import EmberlineError

JSONL = b"application/x-jsonl"
_PIECE_BYTES = 64 << 10

log = logging.getLogger(__name__)


class BrokenOff(Exception):
    """The body cannot be finished: the connection ends without its end, so that nobody takes it for whole."""


async def send_bytes(
    call: Call, chunks: AsyncGenerator[bytes, None], content_type: bytes, headers: HeaderList | None = None
) -> None:
    """What fails before the first byte is raised, so that it becomes an HTTP status."""
    await while_connected(call.receive, _send(call, chunks, [(b"content-type", content_type), *(headers or [])]))


async def _send(call: Call, chunks: AsyncGenerator[bytes, None], headers: HeaderList) -> None:
    send = call.send
    async with aclosing(chunks):
        piece = await anext(chunks, b"")
        await call.start(200, [(b"x-request-id", call.id.encode()), *headers])
        try:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            async for piece in chunks:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except EmberlineError as error:
            log.warning("a body broke off: %s", error.message)
            raise BrokenOff(error.message) from error
    await send({"type": "http.response.body", "body": b""})


async def gathered(lines: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    """Small pieces put together to larger ones."""
    pieces: list[bytes] = []
    n_bytes = 0
    async for line in lines:
        pieces.append(line)
        n_bytes += len(line)
        if n_bytes >= _PIECE_BYTES:
            yield b"".join(pieces)
            pieces, n_bytes = [], 0
    if pieces:
        yield b"".join(pieces)


async def pieces_of(chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    async for chunk in chunks:
        yield chunk
