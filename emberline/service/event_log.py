"""Event logs of resumable streams: what was sent of a stream, kept in the core so that its client can come back to it.

A stream whose client asked for it has a log. The HTTP worker that runs the request appends events; its client, and a
client that comes back, here or at another HTTP worker, read them by number. While nobody reads, the log is idle: after
its grace period the request is cancelled, and a complete log removed. Memory is bounded by the number of logs and the
size of each.
"""

import asyncio
import contextlib
import math
import time
from typing import Protocol

import msgspec

from emberline.protocol.errors import NoSuchStream, Overloaded

_MAX_PART_BYTES = 256 << 10
EVENT_BYTES = 64  # approximate overhead of an event in memory, which counts too


class LogLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of the core's event logs: their number, size and age. All of them together take at most 1 GiB."""

    logs: int = 256  # of the whole server
    account_logs: int = 64  # of an account
    log_bytes: int = 4 << 20
    sweep_s: float = 5.0  # between two looks for logs whose time is over
    orphan_s: float = 60.0  # beyond its grace period, for a log that is neither read nor ended
    wait_s: float = 5.0  # of a reader for the next event; then a comment is sent
    idle_check_s: float = 1.0  # between two looks whether anyone reads the log of a running request


DEFAULTS = LogLimits()
HOLD_S = 3.0  # for which a reader that is connected keeps a log; it says so more often
PURGED_GRACE_S = 10.0  # for the reader of a stream that ran when its account was purged


class NewLog(msgspec.Struct, frozen=True):
    id: str
    account: str
    grace_s: float
    content_type: bytes
    lost: bytes  # the event that ends the log, should the process die that writes it


class LogPart(msgspec.Struct):
    """Events in order; `done`: there are none after them."""

    events: list[bytes]
    done: bool
    content_type: bytes


class EventLogs(Protocol):
    limits: LogLimits = DEFAULTS

    async def open(self, log: NewLog) -> None:
        """Overloaded: there are too many."""

    def append(self, log_id: str, events: list[bytes], done: bool = False) -> None:
        """Add events. Those beyond the log's size are dropped: whoever writes it stops before that."""

    async def read(self, account: str, log_id: str, after: int, wait_s: float) -> LogPart:
        """The events with numbers above `after`, as many as one frame takes; waits for the first up to `wait_s`.
        NoSuchStream: there is none of that account."""

    def hold(self, log_id: str) -> None:
        """Keep a log for HOLD_S: its reader is connected, but takes what it has read slowly."""

    async def idle_s(self, log_id: str) -> float:
        """Seconds since anyone has read it; 0: someone waits or holds it; infinite: it was cancelled, or is gone."""

    async def cancel(self, account: str, log_id: str) -> None: ...


class _Log:
    def __init__(self, new: NewLog, orphan_s: float) -> None:
        self.new = new
        self.grace_s = new.grace_s
        self._orphan_s = orphan_s
        self.events: list[bytes] = []
        self.n_bytes = 0
        self.done = False
        self.cancelled = False
        self.n_waiting = 0
        self.held_until_s = 0.0
        self.read_s = time.monotonic()
        self.changed = asyncio.Event()

    @property
    def is_held(self) -> bool:
        """True if a client is connected that reads it."""
        return self.n_waiting > 0 or time.monotonic() < self.held_until_s

    @property
    def idle_s(self) -> float:
        return 0.0 if self.is_held else time.monotonic() - self.read_s

    @property
    def is_over(self) -> bool:
        return self.idle_s > self.grace_s + (0.0 if self.done else self._orphan_s)


class MemoryEventLogs:
    """Implements EventLogs in the core's memory."""

    def __init__(self, limits: LogLimits = DEFAULTS) -> None:
        self.limits = limits
        self._logs: dict[str, _Log] = {}
        self._sweeper: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._logs)

    async def open(self, log: NewLog) -> None:
        own = [other for other in self._logs.values() if other.new.account == log.account]
        is_full = len(own) >= self.limits.account_logs
        if is_full or len(self._logs) >= self.limits.logs:
            self._make_room(own if is_full else list(self._logs.values()))
        self._logs[log.id] = _Log(log, self.limits.orphan_s)
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().call_later(self.limits.sweep_s, self._sweep)

    def append(self, log_id: str, events: list[bytes], done: bool = False) -> None:
        log = self._logs.get(log_id)
        if log is None or log.done:
            return
        n_bytes = sum(map(len, events)) + EVENT_BYTES * len(events)
        if log.n_bytes + n_bytes <= 2 * self.limits.log_bytes:
            log.events += events
            log.n_bytes += n_bytes
        if done:
            log.done = True
            log.read_s = time.monotonic()  # the grace period of a complete log begins at its end
        log.changed.set()

    async def read(self, account: str, log_id: str, after: int, wait_s: float) -> LogPart:
        log = self._find(account, log_id)
        log.n_waiting += 1
        try:
            if len(log.events) <= after + 1 and not log.done and wait_s > 0:
                log.changed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await log.changed.wait()
        finally:
            log.n_waiting -= 1
            log.read_s = time.monotonic()
        events, n_bytes = [], 0
        for event in log.events[after + 1 :]:
            events.append(event)
            n_bytes += len(event)
            if n_bytes > _MAX_PART_BYTES:
                break
        return LogPart(events, log.done and after + 1 + len(events) >= len(log.events), log.new.content_type)

    def hold(self, log_id: str) -> None:
        if (log := self._logs.get(log_id)) is not None:
            log.read_s = time.monotonic()
            log.held_until_s = log.read_s + HOLD_S

    async def idle_s(self, log_id: str) -> float:
        log = self._logs.get(log_id)
        return math.inf if log is None or log.cancelled else log.idle_s

    async def cancel(self, account: str, log_id: str) -> None:
        self._find(account, log_id).cancelled = True

    def purge(self, account: str | None) -> int:
        """Forget the complete logs of an account, or (None) of all. Returns how many. One that is still written stays
        for its reader, and is forgotten soon after its end."""
        found = [log for log in self._logs.values() if account in (None, log.new.account)]
        complete = [log for log in found if log.done]
        for log in complete:
            del self._logs[log.new.id]
        for log in found:
            log.grace_s = min(log.grace_s, PURGED_GRACE_S)
        return len(complete)

    def abandon(self, log_id: str) -> None:
        """The process that writes it is gone."""
        log = self._logs.get(log_id)
        if log is not None and not log.done:
            self.append(log_id, [log.new.lost], done=True)

    def _find(self, account: str, log_id: str) -> _Log:
        log = self._logs.get(log_id)
        if log is None or log.new.account != account:
            raise NoSuchStream(f"there is no stream {log_id[:100]!r}: it was not made resumable, or its time is over")
        return log

    def _make_room(self, among: list[_Log]) -> None:
        """Remove the complete log that was read longest ago."""
        complete = [log for log in among if log.done and not log.is_held]
        if not complete:
            raise Overloaded("too many resumable streams are open: try again, or without resuming", retry_after_s=5)
        oldest = max(complete, key=lambda log: log.idle_s)
        del self._logs[oldest.new.id]

    def _sweep(self) -> None:
        for log in list(self._logs.values()):
            if log.is_over:
                del self._logs[log.new.id]
        loop = asyncio.get_running_loop()
        self._sweeper = loop.call_later(self.limits.sweep_s, self._sweep) if self._logs else None
