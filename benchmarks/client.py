"""A streaming HTTP client with little CPU cost, since it shares cores with the server it measures.

During a reply, arriving bytes are only stored with their times; they are parsed after its end.
"""

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

_END = b"data: [DONE]"
_WORD_KEYS = ("content", "reasoning_content", "text")


class RequestFailed(RuntimeError):
    """The server refused the request, closed the connection, or sent no valid stream."""


@dataclass(slots=True)
class Reply:
    """One streamed completion. Times are `time.perf_counter` seconds."""

    sent_at: float
    first_at: float  # the first text arrived
    last_at: float  # the last text, or the finish reason, arrived
    text: str
    finish: str | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    n_events: int
    event_at: list[float] = field(default_factory=list)  # when each text arrived

    @property
    def ttft_s(self) -> float:
        return self.first_at - self.sent_at

    @property
    def decode_s(self) -> float:
        return self.last_at - self.first_at


@dataclass(slots=True)
class _Recorder(asyncio.Protocol):
    """Stores arriving bytes with their times; `done` is set at the end of the stream or connection."""

    done: "asyncio.Future[None]"
    transport: asyncio.Transport | None = None
    arrivals: list[tuple[float, bytes]] = field(default_factory=list)
    _tail: bytes = b""  # the end marker may be split over two reads

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.arrivals.append((time.perf_counter(), data))
        if _END in self._tail + data:
            self._finish()
        self._tail = data[-len(_END) :]

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish()

    def _finish(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


async def stream(
    port: int, path: str, body: dict[str, Any], headers: dict[str, str] | None = None, timeout_s: float = 600.0
) -> Reply:
    """POST `body` to 127.0.0.1 and read its server-sent events to the end."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    recorder = _Recorder(done)
    sent_at = time.perf_counter()
    try:
        transport, _ = await loop.create_connection(lambda: recorder, "127.0.0.1", port)
    except OSError as error:
        raise RequestFailed(f"no connection to port {port}: {error}") from error
    try:
        transport.write(_request(port, path, body, headers or {}))
        await asyncio.wait_for(done, timeout_s)
    except TimeoutError:
        raise RequestFailed(f"no end of the stream within {timeout_s:.0f} s") from None
    finally:
        transport.close()
    return parse(sent_at, recorder.arrivals)


def _request(port: int, path: str, body: dict[str, Any], headers: dict[str, str]) -> bytes:
    payload = json.dumps(body, ensure_ascii=False).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        f"Host: 127.0.0.1:{port}",
        "Content-Type: application/json",
        "Accept: text/event-stream",
        "Connection: close",
        f"Content-Length: {len(payload)}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + payload


def parse(sent_at: float, arrivals: list[tuple[float, bytes]]) -> Reply:
    """Parses a recorded reply: status, chunks, events, and the time at which each event was complete."""
    raw = b"".join(data for _, data in arrivals)
    head, found, payload = raw.partition(b"\r\n\r\n")
    if not found:
        raise RequestFailed(f"no HTTP reply: {raw[:200]!r}")
    status = head.split(b"\r\n", 1)[0]
    if b" 200" not in status:
        raise RequestFailed(f"{status.decode('latin-1')}: {payload[:500].decode(errors='replace')}")
    chunked = b"transfer-encoding: chunked" in head.lower()
    pieces = _chunks(payload) if chunked else [(0, payload)]
    return _reply(sent_at, arrivals, len(head) + 4, pieces)


def _chunks(payload: bytes) -> list[tuple[int, bytes]]:
    """The chunks of the body, each with its offset in `payload`."""
    pieces: list[tuple[int, bytes]] = []
    at = 0
    while True:
        line_end = payload.find(b"\r\n", at)
        if line_end < 0:
            return pieces
        try:
            size = int(payload[at:line_end].split(b";")[0], 16)
        except ValueError:
            raise RequestFailed(f"a broken chunk: {payload[at : at + 40]!r}") from None
        if size == 0:
            return pieces
        pieces.append((line_end + 2, payload[line_end + 2 : line_end + 2 + size]))
        at = line_end + 4 + size


def _reply(sent_at: float, arrivals: list[tuple[float, bytes]], body_at: int, pieces: list[tuple[int, bytes]]) -> Reply:
    clock = _Clock(arrivals)
    texts: list[str] = []
    first_at = last_at = 0.0
    event_at: list[float] = []
    finish: str | None = None
    usage: dict[str, Any] = {}
    n_events = 0
    ended = False
    for end, data in _events(pieces):
        if data == b"[DONE]":
            ended = True
            continue
        event = json.loads(data)
        if "error" in event:
            raise RequestFailed(f"an error in the stream: {json.dumps(event['error'])[:500]}")
        usage = event.get("usage") or usage
        words, reason = _content(event)
        if words or reason:
            last_at = clock.at(body_at + end)
            first_at = first_at or last_at
            n_events += 1
            event_at.append(last_at)
        texts.append(words)
        finish = reason or finish
    if not n_events or not (ended or finish):
        raise RequestFailed("the stream broke off before its end")
    details = usage.get("prompt_tokens_details") or {}
    return Reply(
        sent_at=sent_at,
        first_at=first_at,
        last_at=last_at,
        text="".join(texts),
        finish=finish,
        prompt_tokens=int(usage.get("prompt_tokens", 0)),
        cached_tokens=int(details.get("cached_tokens") or 0),
        output_tokens=int(usage.get("completion_tokens", 0)),
        n_events=n_events,
        event_at=event_at,
    )


def _content(event: dict[str, Any]) -> tuple[str, str | None]:
    """An event's text and finish reason, of a chat completion or a plain one."""
    choices = event.get("choices") or []
    if not choices:
        return "", None
    choice = choices[0]
    source = choice.get("delta") or choice
    return "".join(source.get(key) or "" for key in _WORD_KEYS), choice.get("finish_reason")


def _events(pieces: list[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """The data of each server-sent event, with the offset in the body at which it was complete."""
    events: list[tuple[int, bytes]] = []
    line = b""
    for place, piece in pieces:
        at = 0
        while (newline := piece.find(b"\n", at)) >= 0:
            line += piece[at:newline]
            at = newline + 1
            if line.startswith(b"data:"):
                events.append((place + at, line[5:].strip()))
            line = b""
        line += piece[at:]
    if line.startswith(b"data:"):  # the last line may lack its end when the connection closed right behind it
        place, piece = pieces[-1]
        events.append((place + len(piece), line[5:].strip()))
    return events


class _Clock:
    """The arrival time of the byte before an offset; offsets must increase."""

    def __init__(self, arrivals: list[tuple[float, bytes]]) -> None:
        self._arrivals = iter(arrivals)
        self._now = 0.0
        self._covered = 0

    def at(self, place: int) -> float:
        while self._covered < place:
            self._now, data = next(self._arrivals)
            self._covered += len(data)
        return self._now
