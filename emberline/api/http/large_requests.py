"""Large requests are relayed to an HTTP worker of their own, over a Unix socket.

Decoding, translating and rendering megabytes of JSON takes the time of the event loop and the interpreter lock, so that
every stream of the process would stall. The endpoints are the same there; here only bytes are copied.
"""

import asyncio
import contextlib
from pathlib import Path
from urllib.parse import quote

import httptools

from emberline.api.http.body import body_chunks, held_bodies
from emberline.api.http.call import Call, while_connected
from emberline.api.http.errors import HeaderList
from emberline.api.http.sse import IncompleteBody
from emberline.protocol.errors import Unavailable

STALL_S = 60.0  # for the worker to read on; it may have to start first
_READ_BYTES = 64 << 10
# Headers of one connection, and those that were checked here: Host and Origin.
_NOT_RELAYED = frozenset(
    {b"host", b"origin", b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect"}
    | {b"content-length", b"proxy-connection"}
)
_NOT_RETURNED = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"date"})


class LargeRequestRelay:
    def __init__(self, socket_path: Path) -> None:
        self._path = str(socket_path)

    async def relay(self, call: Call, max_bytes: int) -> None:
        """Send the request on, with what has been read of its body and what has not; send its response back."""
        try:
            reader, writer = await asyncio.open_unix_connection(self._path)
        except OSError as error:
            raise Unavailable(f"large requests cannot be served now: {error.strerror}", retry_after_s=1) from None
        sending = asyncio.create_task(_send(call, writer, max_bytes))
        receiving = asyncio.create_task(_respond(call, reader))
        try:
            await asyncio.wait((sending, receiving), return_when=asyncio.FIRST_COMPLETED)
            if not receiving.done():  # else the worker has refused it before its end
                await sending
                await while_connected(call.receive, _result(receiving))
            receiving.result()
        finally:
            for task in (sending, receiving):
                task.cancel()
            await asyncio.gather(sending, receiving, return_exceptions=True)
            writer.close()


async def _result(task: "asyncio.Task[None]") -> None:
    await task


async def _send(call: Call, writer: asyncio.StreamWriter, max_bytes: int) -> None:
    announced = call.headers.get("content-length", "")
    chunked = not announced.isdecimal()
    writer.write(_head(call, b"transfer-encoding: chunked" if chunked else b"content-length: " + announced.encode()))
    with contextlib.suppress(ConnectionError):  # then the response, or its absence, tells why
        for chunk in call.received:
            await _write(writer, chunk, chunked)
        call.received.clear()
        held_bodies.release(call)
        if not call.body_complete:
            async for chunk in body_chunks(call, max_bytes):
                await _write(writer, chunk, chunked)
            call.body_complete = True
        if chunked:
            writer.write(b"0\r\n\r\n")
        await _drain(writer)


async def _write(writer: asyncio.StreamWriter, chunk: bytes, chunked: bool) -> None:
    if chunk:
        writer.write(b"%x\r\n%b\r\n" % (len(chunk), chunk) if chunked else chunk)
        await _drain(writer)


async def _drain(writer: asyncio.StreamWriter) -> None:
    try:
        async with asyncio.timeout(STALL_S):
            await writer.drain()
    except TimeoutError:
        raise Unavailable("large requests cannot be served now: too many are waiting", retry_after_s=5) from None


def _head(call: Call, framing: bytes) -> bytes:
    scope = call.scope
    target: bytes = scope.get("raw_path") or quote(scope["path"]).encode()
    if scope["query_string"]:
        target += b"?" + scope["query_string"]
    fields = [b"%b: %b" % field for field in scope["headers"] if field[0] not in _NOT_RELAYED]
    if call.traceparent:
        fields = [field for field in fields if not field.startswith(b"traceparent:")]
        fields.append(b"traceparent: " + call.traceparent.encode())
    request = b"%b %b HTTP/1.1" % (scope["method"].encode(), target)
    return b"\r\n".join([request, b"host: localhost", b"connection: close", framing, *fields, b"\r\n"])


async def _respond(call: Call, reader: asyncio.StreamReader) -> None:
    response = _Response()
    parser = httptools.HttpResponseParser(response)
    while not response.complete:
        try:
            data = await reader.read(_READ_BYTES)
        except ConnectionError:
            data = b""
        if not data:
            problem = "the process for large requests has ended"
            raise IncompleteBody(problem) if call.status else Unavailable(f"{problem}: try again", retry_after_s=1)
        parser.feed_data(data)
        if response.has_head and not call.status:
            await call.start(parser.get_status_code(), response.headers)
        if response.body:
            body, response.body = b"".join(response.body), []
            await call.send({"type": "http.response.body", "body": body, "more_body": True})
    await call.send({"type": "http.response.body", "body": b""})


class _Response:
    """What the parser has found since it was last asked."""

    def __init__(self) -> None:
        self.headers: HeaderList = []
        self.body: list[bytes] = []
        self.has_head = False
        self.complete = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() not in _NOT_RETURNED:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.has_head = True

    def on_body(self, body: bytes) -> None:
        self.body.append(body)

    def on_message_complete(self) -> None:
        self.complete = True
