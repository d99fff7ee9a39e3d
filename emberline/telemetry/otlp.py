"""Exports spans by OTLP/HTTP (protobuf), from a thread: batched, bounded, never in the way of a request.

The few messages of the OTLP trace format are encoded here. The OpenTelemetry SDK is not needed: spans are made at the
end of a request from stamps that exist anyway, so there is nothing to instrument.
"""

import http.client
import logging
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from emberline.protocol.trace_context import TraceContext

MAX_BATCH = 512
MAX_BACKOFF_S = 30.0
CLOSE_S = 3.0  # for the last export
INTERNAL, SERVER, CLIENT, PRODUCER, CONSUMER = 1, 2, 3, 4, 5
_RETRYABLE = frozenset({429, 502, 503, 504})
_ERROR = 2  # status code of a span

log = logging.getLogger("emberline.tracing")


class ExportLimits(NamedTuple):
    """Bounds of an exporter: the spans it keeps, and when it sends them."""

    queued: int = 8192  # spans; more are dropped and counted
    interval_s: float = 5.0  # between two exports while few spans are queued
    first_backoff_s: float = 1.0  # after an export that failed; doubles each time


EXPORT_LIMITS = ExportLimits()


class Span(NamedTuple):
    """Times are Unix time in microseconds. `error`: empty unless the span failed."""

    context: TraceContext
    parent_id: str  # empty: the first span of its trace
    name: str
    start_us: int
    end_us: int
    attributes: Mapping[str, Any]
    kind: int = INTERNAL
    error: str = ""
    link: TraceContext | None = None


class Exporter(Collector):
    """`add` is called on the event loop; everything else happens in a thread."""

    def __init__(
        self,
        url: str,
        resource: Mapping[str, Any],
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 10.0,
        limits: ExportLimits = EXPORT_LIMITS,
    ) -> None:
        self._limits = limits
        self.counts = {"exported": 0, "dropped": 0, "failed": 0}
        self.others: Counter[str] = Counter()  # the same of other processes
        self._url: SplitResult = urlsplit(url)
        self._headers = {"content-type": "application/x-protobuf", **(headers or {})}
        self._timeout_s = timeout_s
        self._resource = _field(1, b"".join(_attribute(1, *item) for item in resource.items()))
        self._queue: deque[Span] = deque()
        self._wake = threading.Event()
        self._connection: http.client.HTTPConnection | None = None  # kept between exports; of the thread
        self._closing = False
        self._warned_s = -60.0
        self._thread = threading.Thread(target=self._run, name="otlp exporter", daemon=True)
        self._thread.start()

    def add(self, spans: Sequence[Span]) -> None:
        """Drops them where the queue is full: the collector is away or too slow."""
        if len(self._queue) + len(spans) > self._limits.queued:
            self.counts["dropped"] += len(spans)
            return
        self._queue.extend(spans)
        if len(self._queue) >= MAX_BATCH:
            self._wake.set()

    @property
    def n_queued(self) -> int:
        """Number of spans that wait for an export."""
        return len(self._queue)

    def close(self) -> None:
        """Export what is queued, for a moment. Blocks."""
        self._closing = True
        self._wake.set()
        self._thread.join(CLOSE_S)

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily("emberline_spans", "Spans of traces, by what became of them.", labels=["outcome"])
        for outcome, n in self.counts.items():
            family.add_metric([outcome], n + self.others[outcome])
        yield family

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        backoff_s = self._limits.first_backoff_s
        while not (self._closing and not self._queue):
            if len(self._queue) < MAX_BATCH and not self._closing:
                self._wake.wait(self._limits.interval_s)
                self._wake.clear()
            batch = [self._queue.popleft() for _ in range(min(MAX_BATCH, len(self._queue)))]
            if not batch:
                continue
            try:
                problem, retry = self._post(encode(batch, self._resource))
            except Exception as error:  # of a bug, or headers that HTTP forbids: the thread goes on
                problem, retry = f"{type(error).__name__}: {error}", False
            if not problem:
                self.counts["exported"] += len(batch)
                backoff_s = self._limits.first_backoff_s
                continue
            self._warn(problem)
            if not retry or self._closing or len(self._queue) + len(batch) > self._limits.queued:
                self.counts["failed"] += len(batch)
            else:
                self._queue.extendleft(reversed(batch))
            if self._closing:
                return
            time.sleep(backoff_s)
            backoff_s = min(MAX_BACKOFF_S, 2 * backoff_s)

    def _post(self, body: bytes) -> tuple[str, bool]:
        """Send one request. Returns the problem, empty if there is none, and True if it may succeed later."""
        reused = self._connection is not None
        if self._connection is None:
            kind = http.client.HTTPSConnection if self._url.scheme == "https" else http.client.HTTPConnection
            self._connection = kind(self._url.hostname or "", self._url.port, timeout=self._timeout_s)
        try:
            self._connection.request("POST", self._url.path or "/", body, self._headers)
            response = self._connection.getresponse()
            response.read()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            self._connection = None
            return self._post(body) if reused else (str(error) or type(error).__name__, True)  # it may just have closed
        accepted = 200 <= response.status < 300
        return "" if accepted else f"status {response.status}", response.status in _RETRYABLE

    def _warn(self, problem: str) -> None:
        if time.monotonic() - self._warned_s >= 60:
            self._warned_s = time.monotonic()
            log.warning("traces cannot be exported to %s: %s", self._url.netloc.rpartition("@")[2], problem)


# --- the OTLP trace format, as protobuf ------------------------------------------------------------------------------


def encode(spans: Sequence[Span], resource: bytes = b"") -> bytes:
    """An ExportTraceServiceRequest; `resource` is an encoded field of ResourceSpans."""
    scope = _field(1, _field(1, b"emberline"))
    return _field(1, resource + _field(2, scope + b"".join(_field(2, _span(span)) for span in spans)))


def _span(span: Span) -> bytes:
    context = span.context
    parts = [
        _field(1, bytes.fromhex(context.trace_id)),
        _field(2, bytes.fromhex(context.span_id)),
        _field(3, context.state.encode()) if context.state else b"",
        _field(4, bytes.fromhex(span.parent_id)) if span.parent_id else b"",
        _field(5, span.name.encode()),
        _varint(6 << 3) + _varint(span.kind),
        b"\x39" + struct.pack("<Q", 1000 * span.start_us),
        b"\x41" + struct.pack("<Q", 1000 * max(span.start_us, span.end_us)),
        *(_attribute(9, *item) for item in span.attributes.items()),
    ]
    if (link := span.link) is not None:
        parts.append(_field(13, _field(1, bytes.fromhex(link.trace_id)) + _field(2, bytes.fromhex(link.span_id))))
    if span.error:
        parts.append(_field(15, _field(2, span.error.encode()) + _varint(3 << 3) + _varint(_ERROR)))
    return b"".join(parts)


def _attribute(number: int, key: str, value: Any) -> bytes:
    return _field(number, _key(key) + _field(2, _value(value)))


@cache
def _key(key: str) -> bytes:
    """There are only a few dozen names."""
    return _field(1, key.encode())


def _value(value: Any) -> bytes:
    if isinstance(value, bool):
        return _varint(2 << 3) + _varint(value)
    if isinstance(value, int):
        return _varint(3 << 3) + _varint(value & 0xFFFFFFFFFFFFFFFF)
    if isinstance(value, float):
        return b"\x21" + struct.pack("<d", value)
    if isinstance(value, list | tuple):
        return _field(5, b"".join(_field(1, _value(item)) for item in value))
    return _field(1, str(value).encode("utf-8", "replace"))


def _field(number: int, content: bytes) -> bytes:
    """A length-delimited field: text, bytes or a message."""
    assert number < 16, "a tag of one byte"
    return _BYTES[number << 3 | 2] + _varint(len(content)) + content


_BYTES = [bytes((value,)) for value in range(0x80)]


def _varint(value: int) -> bytes:
    if value < 0x80:
        return _BYTES[value]
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
