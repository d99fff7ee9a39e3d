"""W3C Trace Context: which trace the current work belongs to, in and out of every process.

`current` is set for the duration of a request or a job; log lines, upstream requests and spans read it.
"""

import random
import re
from contextvars import ContextVar
from typing import Any, NamedTuple

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1
MAX_TRACESTATE = 512  # characters; a longer one is dropped, as the standard allows
_random = random.Random()  # of the operating system's entropy; ids need no more than being unlikely to repeat


class TraceContext(NamedTuple):
    """A span and the trace that it belongs to, as lowercase hexadecimal digits."""

    trace_id: str
    span_id: str
    sampled: bool
    state: str = ""  # `tracestate`, passed on unchanged

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{self.sampled:02x}"

    @property
    def headers(self) -> str:
        """Whole lines of an HTTP head."""
        state = f"tracestate: {self.state}\r\n" if self.state else ""
        return f"traceparent: {self.traceparent}\r\n{state}"


class Phase(NamedTuple):
    """A part of a request that only its transport has seen, on the monotonic clock; it becomes a span."""

    name: str
    start_s: float
    end_s: float
    attributes: dict[str, Any] = {}


class TraceDetails(NamedTuple):
    """Facts of a traced request that its transport knows at the end."""

    phases: tuple[Phase, ...] = ()
    finish_reasons: tuple[str, ...] = ()
    input: str = ""  # the messages as JSON, where content is traced
    output: str = ""


current: ContextVar[TraceContext | None] = ContextVar("trace_context", default=None)


def parse(traceparent: str | None, tracestate: str | None = None) -> TraceContext | None:
    """None for a header that is missing or invalid; then a new trace begins."""
    found = _TRACEPARENT.fullmatch(traceparent.strip()) if traceparent and len(traceparent) < 256 else None
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == "ff" or (version == "00" and more) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    state = tracestate.strip() if tracestate else ""
    printable = state.isascii() and state.isprintable() and len(state) <= MAX_TRACESTATE
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & _SAMPLED), state if printable else "")


def new_trace_id() -> str:
    return f"{_random.getrandbits(128) or 1:032x}"


def new_span_id() -> str:
    return f"{_random.getrandbits(64) or 1:016x}"
