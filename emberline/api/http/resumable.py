"""Streams that a client may leave and come back to: `x-emberline-resume: SECONDS` asks for it.

The request runs in a task of its own, which writes the stream's events into an event log; the client reads the log, and
so does whoever resumes, at any HTTP worker. Without a reader for the grace period, the request is cancelled.
"""

import asyncio
import logging
import uuid
from contextlib import aclosing

from emberline.api.http.errors import HeaderList, error_body
from emberline.api.http.exchange import EVENT_STREAM, HttpExchange, Reply, encode, json_reply, parse_int
from emberline.api.http.streaming import Blocks, BlockStream, Chunks, Failed, LastBlock, Streaming
from emberline.protocol.errors import Internal, TooLarge, Unavailable
from emberline.protocol.sizes import format_limit
from emberline.service.event_log import EVENT_BYTES, HOLD_S, EventLogs, NewLog

HEADER = "x-emberline-resume"
STREAM_ID = b"x-emberline-stream-id"
AFTER = {"starting_after": {"type": "integer", "minimum": 0}}
MIN_GRACE_S, MAX_GRACE_S = 5, 3600
_MAX_EVENT_NUMBER = 999_999_999
_COMMENT = b": waiting\n\n"

log = logging.getLogger(__name__)
_running: set[asyncio.Task[None]] = set()  # asyncio itself holds tasks weakly


def grace_period_s(call: HttpExchange) -> int:
    """Return the seconds for which the client may be away; 0 if it asks for no resuming."""
    given = call.headers.get(HEADER)
    return 0 if given is None else parse_int(given, HEADER, MIN_GRACE_S, MAX_GRACE_S)


class _Numbering:
    """Splits what encoders produce into single events, and gives each its number."""

    def __init__(self, content_type: bytes) -> None:
        self._is_sse = content_type == EVENT_STREAM
        self._end = b"\n\n" if self._is_sse else b"\n"
        self._rest: list[bytes] = []  # the pieces of an event that has not ended yet
        self.n_events = 0

    def split(self, chunk: bytes) -> list[bytes]:
        if self._is_sse and b"\r" in chunk:  # as some servers end their lines; inside JSON it is escaped
            chunk = chunk.replace(b"\r", b"")
        if not chunk:
            return []
        last = self._rest[-1][-1:] if self._rest else b""
        self._rest.append(chunk)
        if self._end not in last + chunk:
            return []
        *whole, rest = b"".join(self._rest).split(self._end)
        self._rest = [rest] if rest else []
        return [self._numbered(event) for event in whole]

    def end(self, last: bytes) -> list[bytes]:
        """The last events. Before an error, one that has begun and not ended is no event."""
        if not last and any(piece.strip() for piece in self._rest):
            return self.split(self._end)
        self._rest = []
        return self.split(last)

    def _numbered(self, event: bytes) -> bytes:
        number = b"id: %d\n" % self.n_events if self._is_sse else b""
        self.n_events += 1
        return number + event + self._end


async def send_resumable(call: HttpExchange, streaming: Streaming) -> None:
    """Send a stream by way of an event log, which the client, or another one, can read again."""
    chunks, content_type, failed = streaming.chunks(), streaming.content_type, streaming.failed
    assert failed is not None
    logs, grace_s = call.service.event_logs, grace_period_s(call)
    log_id = streaming.log_id or f"stream_{uuid.uuid4().hex}"
    try:
        first = await anext(chunks)
        await logs.open(NewLog(log_id, call.principal.account, grace_s, content_type, _lost(call, content_type)))
    except BaseException:
        await chunks.aclose()
        raise
    running = asyncio.create_task(_run(logs, log_id, first, chunks, _Numbering(content_type), failed, grace_s))
    _running.add(running)
    running.add_done_callback(_running.discard)
    await _log_stream(call, log_id, -1, content_type, streaming.headers).send(call)


def _lost(call: HttpExchange, content_type: bytes) -> bytes:
    """The event that ends the log if this process dies. Not by `failed`: an encoder may count what it has encoded."""
    error = Unavailable("the process that ran this request has ended")
    body = encode(error_body(error, call.dialect, call.id))
    return b"event: error\ndata: %b\n\n" % body if content_type == EVENT_STREAM else body + b"\n"


async def _run(
    logs: EventLogs, log_id: str, first: bytes, chunks: Chunks, numbering: _Numbering, failed: Failed, grace_s: float
) -> None:
    """Write the log until the request has ended, nobody reads any more, or the log is full."""
    task = asyncio.current_task()
    assert task is not None
    watcher = asyncio.create_task(_cancel_when_idle(logs, log_id, grace_s, task))
    n_bytes, most_bytes = 0, logs.limits.log_bytes
    last = b""
    try:
        async with aclosing(chunks):
            logs.append(log_id, numbering.split(first))
            async for chunk in chunks:
                events = numbering.split(chunk)
                n_bytes += len(chunk) + EVENT_BYTES * len(events)
                if n_bytes > most_bytes:
                    last = failed(TooLarge(f"a resumable stream has at most {format_limit(most_bytes)}"))
                    break
                if events:
                    logs.append(log_id, events)
    except asyncio.CancelledError:
        last = failed(Unavailable("the request was cancelled: nobody has read its stream"))
    except Exception:
        log.exception("a resumable stream failed")
        last = failed(Internal("the request failed; the server's log has the reason under this request's id"))
    finally:
        watcher.cancel()
        logs.append(log_id, numbering.end(last), done=True)


async def _cancel_when_idle(logs: EventLogs, log_id: str, grace_s: float, task: asyncio.Task[None]) -> None:
    while True:
        await asyncio.sleep(logs.limits.idle_check_s)
        try:
            if await logs.idle_s(log_id) > grace_s:
                task.cancel()
                return
        except Unavailable:  # the core restarts: it will know nothing of the log
            continue


def _log_stream(call: HttpExchange, log_id: str, after: int, content_type: bytes, headers: HeaderList) -> BlockStream:
    """The events of a log after that number, up to the last. The client resumes if the stream breaks off."""
    headers = [*headers, (STREAM_ID, log_id.encode())]
    return BlockStream(_read(call, log_id, after, content_type), None, content_type, headers=headers)


async def _read(call: HttpExchange, log_id: str, after: int, content_type: bytes) -> Blocks:
    yield b""  # the response begins before there are events
    logs, account = call.service.event_logs, call.principal.account
    done = False
    holding = asyncio.create_task(_hold(logs, log_id))
    try:
        while not done:
            part = await logs.read(account, log_id, after, logs.limits.wait_s)
            after += len(part.events)
            done = part.done
            body = b"".join(part.events)
            if not body and not done and content_type == EVENT_STREAM:
                body = _COMMENT
            yield LastBlock(body) if done else body
    finally:
        holding.cancel()


async def _hold(logs: EventLogs, log_id: str) -> None:
    """Keep a log while its client is connected: sending to a slow one takes any time."""
    while True:
        await asyncio.sleep(HOLD_S / 3)
        logs.hold(log_id)


# --- endpoints --------------------------------------------------------------------------------------------------------


async def resume(call: HttpExchange) -> BlockStream:
    """Send the events after `starting_after`, or after the header `Last-Event-ID`; without either all of them."""
    return await resume_log(call, call.path_param)


async def resume_log(call: HttpExchange, log_id: str) -> BlockStream:
    last_id = call.headers.get("last-event-id")
    after = -1 if not last_id else parse_int(last_id, "last-event-id", 0, _MAX_EVENT_NUMBER)
    after = call.int_param("starting_after", after, 0, _MAX_EVENT_NUMBER)
    found = await call.service.event_logs.read(call.principal.account, log_id, after, 0)
    return _log_stream(call, log_id, after, found.content_type, call.id_headers)


async def cancel(call: HttpExchange) -> Reply:
    await call.service.event_logs.cancel(call.principal.account, call.path_param)
    return json_reply({"id": call.path_param, "object": "stream", "cancelled": True})
