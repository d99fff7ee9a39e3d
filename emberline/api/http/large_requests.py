"""Large requests are relayed to an HTTP worker of their own, over a Unix socket.

Decoding, translating and rendering megabytes of JSON takes the time of the event loop and the interpreter lock, so that
every stream of the process would stall. The endpoints are the same there; here only bytes are copied.
"""

import asyncio
import contextlib
from pathlib import Path
from urllib.parse import quote

from emberline.api.http.body import body_chunks
from emberline.api.http.exchange import HttpExchange, while_connected
from emberline.api.http.streaming import IncompleteBody
from emberline.net.held_bodies import held_bodies
from emberline.net.http_client import Connection, ConnectionFailed, Exchange
from emberline.net.periodic import stop
from emberline.protocol.errors import Unavailable

STALL_S = 60.0  # for the worker to read on; it may have to start first
# Headers of one connection, and those that were checked here: Host and Origin.
_NOT_RELAYED = frozenset(
    {b"host", b"origin", b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect"}
    | {b"content-length", b"proxy-connection"}
)
_NOT_RETURNED = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"date"})


class LargeRequestRelay:
    """Relays requests to the HTTP worker that listens on a Unix socket."""

    def __init__(self, socket_path: Path, stall_s: float = STALL_S) -> None:
        self._path, self._stall_s = str(socket_path), stall_s

    async def relay(self, call: HttpExchange, max_bytes: int) -> None:
        """Send the request on, with what has been read of its body and what has not; send its response back."""
        connection, loop = Connection(_close, lambda connection: None), asyncio.get_running_loop()
        try:
            await loop.create_unix_connection(lambda: connection, self._path)
        except OSError as error:
            raise Unavailable(f"large requests cannot be served now: {error.strerror}", retry_after_s=1) from None
        announced = call.headers.get("content-length", "")
        chunked = not announced.isdecimal()
        framing = b"transfer-encoding: chunked" if chunked else b"content-length: " + announced.encode()
        exchange = connection.begin(_head(call, framing), b"")
        sending = asyncio.create_task(_send(call, connection, chunked, max_bytes, self._stall_s))
        receiving = asyncio.create_task(_respond(call, exchange))
        try:
            await asyncio.wait((sending, receiving), return_when=asyncio.FIRST_COMPLETED)
            if not receiving.done():  # else the worker has refused it before its end
                await sending
                await while_connected(call, _result(receiving))
            receiving.result()
        finally:
            await stop(sending, receiving)
            exchange.close()


def _close(connection: Connection) -> None:
    connection.abort("its one request has ended")


async def _result(task: "asyncio.Task[None]") -> None:
    await task


async def _send(call: HttpExchange, connection: Connection, chunked: bool, max_bytes: int, stall_s: float) -> None:
    async def write(chunk: bytes) -> None:
        try:
            async with asyncio.timeout(stall_s):
                await connection.write(b"%x\r\n%b\r\n" % (len(chunk), chunk) if chunked else chunk)
        except TimeoutError:
            raise Unavailable("large requests cannot be served now: too many are waiting", retry_after_s=5) from None

    with contextlib.suppress(ConnectionFailed):  # then the response, or its absence, tells why
        for chunk in filter(None, call.received):
            await write(chunk)
        call.received.clear()
        held_bodies.release(call)
        if not call.body_complete:
            async for chunk in body_chunks(call, max_bytes):
                if chunk:
                    await write(chunk)
            call.body_complete = True
        if chunked:
            await write(b"")  # which ends the body


def _head(call: HttpExchange, framing: bytes) -> bytes:
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


async def _respond(call: HttpExchange, exchange: Exchange) -> None:
    try:
        await exchange.head
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in exchange.headers.items()]
        await call.start(exchange.status, [field for field in headers if field[0] not in _NOT_RETURNED])
        while body := await exchange.piece():
            await call.send({"type": "http.response.body", "body": body, "more_body": True})
    except ConnectionFailed:
        problem = "the process for large requests has ended"
        raise (
            IncompleteBody(problem) if call.status else Unavailable(f"{problem}: try again", retry_after_s=1)
        ) from None
    await call.send({"type": "http.response.body", "body": b""})
