"""Relaying an upstream stream to the client, one write per network read."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from emberline.api.http.call import Call
from emberline.api.http.errors import HeaderList
from emberline.protocol.errors import EmberlineError, Unavailable

Blocks = AsyncGenerator[tuple[bytes, bool], None]  # SSE lines, and whether they are the last


async def relay_body(blocks: Blocks) -> bytes:
    async with aclosing(blocks):
        body, _ = await anext(blocks)
        return body


async def relay_chunks(blocks: Blocks, error_event: Callable[[EmberlineError], bytes]) -> AsyncGenerator[bytes, None]:
    """As `relay_stream` sends them, for an event log."""
    async with aclosing(blocks):
        block, _ = await anext(blocks)
        yield block
        try:
            async for block, _ in blocks:
                yield block
        except EmberlineError as error:
            yield error_event(error)


async def relay_stream(
    call: Call, blocks: Blocks, headers: HeaderList, error_event: Callable[[EmberlineError], bytes]
) -> None:
    """A failure before the first line becomes an HTTP status, a later one the stream's last event."""
    async with aclosing(blocks):
        block, last = await anext(blocks)
        await call.start_stream(headers)
        try:
            while not last:
                await call.send({"type": "http.response.body", "body": block, "more_body": True})
                block, last = await anext(blocks)
        except EmberlineError as error:
            block = error_event(error)
        except BaseException:  # the client disconnected, or the server stops: then the client still reads
            event = error_event(Unavailable("the server is stopping"))
            await call.send({"type": "http.response.body", "body": event})
            raise
    await call.send({"type": "http.response.body", "body": block})
