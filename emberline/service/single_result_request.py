"""A request that an engine answers with one result, not with tokens: texts to encode, speech to transcribe."""

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress

import msgspec

from emberline.cluster.engine_client import EngineClient, EngineStream
from emberline.cluster.timings import DEFAULTS, Timings
from emberline.protocol.errors import EmberlineError, Internal, Unavailable, from_info
from emberline.protocol.events import TokenDelta, Usage
from emberline.protocol.request import EngineRequest
from emberline.protocol.route_request import Fault, Route, client_of
from emberline.protocol.trace_context import TraceContext, TraceDetails


class EngineCall:
    """One sequence. A failover computes it again: the client has received nothing."""

    provider = "emberline"

    def __init__(
        self,
        request: EngineRequest,
        engines: Mapping[str, EngineClient],
        operation: str,
        timings: Timings = DEFAULTS,
    ) -> None:
        self.restart_wait_s = timings.restart_wait_s
        self.deadline_grace_s = timings.deadline_grace_s
        self._timings = timings
        self.operation = operation
        self.began = False
        self.trace: TraceContext | None = None
        self.values: bytes | None = None  # the result, once it is there
        self._request = request
        self._engines = engines  # by endpoint name
        self._usage = Usage()
        self._engine: EngineClient | None = None
        self._stream: EngineStream | None = None

    @property
    def cached_tokens(self) -> int:
        return 0

    @property
    def done(self) -> bool:
        return self.values is not None

    @property
    def usage(self) -> Usage:
        """Counts of the whole input once there is a result; before, of what was computed when the sequence ended."""
        return self._usage

    async def open(self, route: Route, attempt: int, deadline_s: float | None) -> None:
        self.began, self._usage = False, Usage()
        until_s = None if deadline_s is None else time.monotonic() + deadline_s
        engine = self._engine = client_of(self._engines, route.decode)
        await engine.wait_connected(self._timings.reconnect_wait_s if attempt else self._timings.connect_wait_s)
        request = msgspec.structs.replace(
            self._request,
            id=self._request.id + (f"-m{attempt}" if attempt else ""),
            deadline_s=None if until_s is None else max(0.001, until_s - time.monotonic()),
            trace_id="" if self.trace is None else self.trace.trace_id,
        )
        self._stream = engine.stream([request])

    async def next(self) -> None:
        assert self._stream is not None
        for delta in await self._stream.next():
            if delta.finish in ("error", "cancelled"):
                self._count_partial(delta)
                raise Unavailable("the engine gave the request up") if delta.error is None else from_info(delta.error)
            self.began = True
            if delta.finish is not None:
                self.values, self._usage = delta.values, delta.usage or Usage()
            else:
                self.take(delta)

    def take(self, delta: TokenDelta) -> None:
        """Handle a delta that is not the last. It only tells that the request is being computed."""

    def fault(self, error: EmberlineError) -> Fault:
        """Internal is not retried: it may be the input that an engine cannot compute."""
        if self._engine is None or not isinstance(error, Unavailable | Internal):
            return Fault(False)
        if isinstance(error, Internal):
            return Fault(False, lost=(self._engine.name,))
        return Fault(not self._engine.closing, (self._engine.name,))

    def trace_details(self, content: bool) -> TraceDetails:
        return TraceDetails()

    async def settle(self) -> None:
        """Abort the sequence and count what the engine computed for it."""
        if self._stream is None:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(self._timings.settle_wait_s):
                await self._stream.end()
        for delta in self._stream.unread:
            self._count_partial(delta)

    def _count_partial(self, delta: TokenDelta) -> None:
        if delta.usage is not None and (delta.usage.partial or delta.finish == "stop"):
            self._usage = delta.usage

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None
