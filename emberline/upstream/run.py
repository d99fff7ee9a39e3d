"""One relayed request: admitted, tried where the core says, moved when a server fails it, settled once."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from types import TracebackType

import msgspec

from emberline.accounts.usage_ledger import UsageRow, UsageStatus
from emberline.balancer.route_request import RouteRequest
from emberline.protocol.errors import (
    BadInput,
    DeadlineExceeded,
    EmberlineError,
    EngineLost,
    Internal,
    Overloaded,
    Unavailable,
)
from emberline.protocol.events import Usage
from emberline.service.core import Core, Settlement
from emberline.service.metrics import Counts
from emberline.service.request_log import log_end
from emberline.upstream.attempt import Attempt, Busy
from emberline.upstream.client import Upstream
from emberline.upstream.disaggregation import encode
from emberline.upstream.http_client import MAX_ANSWER_BYTES
from emberline.upstream.request import UpstreamRequest
from emberline.upstream.resume import Kept, Splice, continuation
from emberline.upstream.sse import StreamEditor, StreamError, TooLong, read_usage, usage_objects, write_cached

MOST_MOVES = 3
RESTART_WAIT_S = 15.0  # for a server to come back, when a request has lost one

log = logging.getLogger("emberline.request")


class UpstreamRun:
    """`open` it, then take its `block`s until b"" (or its whole `body`), inside `async with`: leaving settles it."""

    def __init__(
        self,
        parcel: UpstreamRequest,
        core: Core,
        servers: Mapping[str, Upstream],
        on_end: "Callable[[UpstreamRun], None]",
    ) -> None:
        self.parcel = parcel
        self.first_token_us: int | None = None
        self.settling: asyncio.Task[None] | None = None
        self.engine = ""  # the server that answers, or did last
        self._core = core
        self._servers = servers
        self._on_end = on_end
        self._attempt: Attempt | None = None
        self._editor = StreamEditor(hides_usage=parcel.hides_usage)
        self._kept = Kept()
        self._splice: Splice | None = None
        self._first = b""
        self._body_usage: Usage | None = None
        self._n_moves = 0
        self._admitted = False
        self._believed = 0  # prompt tokens that the core believes to be cached
        self._avoid: list[str] = []
        self._lost: list[str] = []
        self._over = False

    @property
    def usage(self) -> Usage:
        """As the server said; until it has, a guess; nothing before its first byte."""
        said = self._body_usage or self._editor.usage
        if said is not None:
            return said
        if self.first_token_us is None:
            return Usage()
        n_events = max(0, self._kept.n_events - 1)
        return Usage(prompt_tokens=self.parcel.input_tokens, completion_tokens=n_events)

    async def __aenter__(self) -> "UpstreamRun":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close_attempt()
        if self.settling is not None or not self._admitted:
            return self._on_end(self)
        if error is None or isinstance(error, Exception):
            cause = error if isinstance(error, EmberlineError) else Internal("the answer was not read to its end")
            self._end("failed", cause)
        else:
            self._end("cancelled")

    @property
    def admitted(self) -> bool:
        """Whether it has a usage row, or will have one."""
        return self._admitted

    @property
    def over(self) -> bool:
        """Nothing follows the block that was taken last."""
        return self._over and not self._first

    async def fail(self, error: Exception) -> None:
        """Settle it as failed; the row is durable when this returns, unless writing it failed too."""
        if isinstance(error, EngineLost):
            self._blame(error)
        self._close_attempt()
        await asyncio.shield(asyncio.wait((self._end("failed", error),)))

    # --- what doors take ---------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Return once the answer has begun. Until then a server that fails is nobody's concern but ours."""
        await self._admit()
        while True:
            try:
                return await self._begin(self.parcel.fields)
            except (EngineLost, Busy) as error:
                await self._move(error)

    async def body(self) -> bytes:
        """The whole answer of a request that is not streamed. Its usage row is durable when this returns."""
        body = self._first
        await self._finish()
        return body

    async def block(self) -> bytes:
        """More of the stream, in whole lines; b"" at its end. Before its last event the usage row is durable."""
        block = b""
        while not (block or self.over):
            block, self._first = self._first or await self._next(), b""
        if self._over:
            await self._finish()
        return block

    # --- the stream --------------------------------------------------------------------------------------------------

    async def _begin(self, fields: dict[str, object]) -> None:
        assert self._attempt is not None
        attempt = self._attempt
        exchange = await attempt.open(fields)
        if not self.parcel.stream:
            self._first = await self._whole(attempt)
            return
        if not exchange.headers.get("content-type", "").startswith("text/event-stream"):
            raise attempt.decode.lost("answered a stream with something else")
        while not self._first and not self._over:
            self._first = await self._take(attempt)

    def _began(self) -> None:
        if self.first_token_us is None:
            self.first_token_us = self.parcel.clock.now_us()
            self._core.began(self.parcel.id, self._believed)

    async def _next(self) -> bytes:
        assert self._attempt is not None
        try:
            return await self._take(self._attempt)
        except EngineLost as error:
            await self._resume(error)
            block, self._first = self._first, b""
            return block

    async def _take(self, attempt: Attempt) -> bytes:
        """The next lines as the client shall see them, which may be none; ends the stream where it ends."""
        editor = self._editor
        try:
            piece = await attempt.piece()
            lines = editor.whole(piece) if piece else editor.tail
            if attempt.prefill is not None and editor.cached is None and editor.needs_cached(lines):
                editor.cached = await attempt.cached()
            block = editor.edit(lines) if piece else editor.flush()
        except StreamError as error:
            if 400 <= error.code < 500:
                raise BadInput(error.message) from error
            raise attempt.decode.lost(f"failed in the middle: {error.message}") from error
        except TooLong as error:
            raise attempt.decode.lost(f"sent {error}") from error
        if block or editor.ended:
            self._began()
        if self._splice is not None and block:
            block = self._splice.edit(block)
        if editor.ended or not piece:
            if not (editor.ended or editor.finished):
                raise attempt.decode.lost("ended its stream before the answer was complete")
            self._over = True
            self._end("finished")  # the row is on its way to the disk while the block is on its way to the client
        if block:
            self._kept.add(block)
        return block

    async def _whole(self, attempt: Attempt) -> bytes:
        pieces: list[bytes] = []
        n_bytes = 0
        while piece := await attempt.piece():
            pieces.append(piece)
            n_bytes += len(piece)
            if n_bytes > MAX_ANSWER_BYTES:
                raise attempt.decode.lost(f"answered with more than {MAX_ANSWER_BYTES >> 20} MiB")
        self._began()
        body = b"".join(pieces)
        try:
            answer = msgspec.json.decode(body)
        except (msgspec.DecodeError, RecursionError) as error:
            raise attempt.decode.lost(f"answered no JSON: {error}") from error
        if not isinstance(answer, dict) or not isinstance(answer.get("choices"), list):
            raise attempt.decode.lost("answered something that has no choices")
        usages = usage_objects(answer)
        cached = await attempt.cached() if attempt.prefill is not None else None
        if cached is not None:
            for usage in usages:
                write_cached(usage, cached)
        if usages:
            self._body_usage = read_usage(usages[-1])
        if attempt.prefill is None:
            return body
        answer.pop("kv_transfer_params", None)  # between the servers
        return encode(answer)

    # --- servers that fail -------------------------------------------------------------------------------------------

    async def _admit(self) -> None:
        route = await self._core.admit(self._ask())
        self._admitted = True
        self.engine = route.decode
        self._believed = route.cached_tokens
        decode = self._servers[route.decode]
        prefill = self._prefill_for(decode, self._servers.get(route.prefill))
        again = f"-m{self._n_moves}" if self._n_moves else ""
        self._attempt = Attempt(self.parcel.path, f"{self.parcel.id}{again}", decode, prefill)

    def _prefill_for(self, decode: Upstream, chosen: Upstream | None) -> Upstream | None:
        """What the core chose, but for what the kinds cannot do."""
        kind = decode.server.kind
        if kind == "vllm" and self.parcel.n > 1:
            return None  # its blocks are handed over once, to one sequence
        if kind == "sglang" and chosen is None and decode.server.endpoint.role == "decode":
            others = [self._servers[name] for name in self._servers_of_model()]
            others = [server for server in others if server.server.endpoint.role == "prefill" and server.connected]
            chosen = next((server for server in others if server.name not in self._avoid), None)
            if chosen is None:
                raise Unavailable(f"{decode.name} computes no prompts, and no prefill server is there", retry_after_s=2)
        return chosen

    async def _move(self, error: EngineLost | Busy) -> None:
        """Another server, under fresh ids; the error itself when there is none to try."""
        assert self._attempt is not None
        self._close_attempt()
        self._n_moves += 1
        if self._n_moves > MOST_MOVES or self.parcel.job is not None:
            self._blame(error)
            raise error
        for server in (self._attempt.decode, self._attempt.prefill):
            innocent = isinstance(error, EngineLost) and server is not None and error.engine != server.name
            if server is not None and not innocent and server.name not in self._avoid:
                self._avoid.append(server.name)
        self._blame(error)
        if isinstance(error, Busy) and len(self._avoid) >= len(self._servers_of_model()):
            raise error
        log.warning("moving: %s", error.message, extra={"request_id": self.parcel.id})
        self._editor = StreamEditor(hides_usage=self.parcel.hides_usage)
        try:
            await self._admit()
        except Overloaded:
            raise
        except EmberlineError as none_left:
            raise error from none_left

    async def _resume(self, error: EngineLost) -> None:
        """Go on at another server behind what the client has seen, or raise."""
        assert self._attempt is not None
        found = continuation(self.parcel, self._attempt.decode.server.kind, self._kept)
        if found is None:
            self._blame(error)
            raise error
        while True:
            await self._move(error)
            fields, self._splice = found
            self._editor.adjust = self._splice.count
            try:
                return await self._begin(fields)
            except (EngineLost, Busy) as next_error:
                if isinstance(next_error, Busy):
                    raise error from next_error
                error = next_error

    def _blame(self, error: EngineLost | Busy) -> None:
        if isinstance(error, EngineLost) and error.engine not in self._lost:
            self._lost.append(error.engine)

    def _servers_of_model(self) -> list[str]:
        return [name for name, server in self._servers.items() if self.parcel.card.id in server.models]

    def _ask(self) -> RouteRequest:
        parcel, principal = self.parcel, self.parcel.principal
        left_s = None
        if parcel.deadline_s is not None:
            left_s = parcel.deadline_s - parcel.clock.elapsed_s()
            if left_s <= 0:
                raise DeadlineExceeded(f"not finished within {parcel.deadline_s:g} s")
        return RouteRequest(
            id=parcel.id,
            account=principal.account,
            key_id=principal.key_id,
            model=parcel.card.id,
            model_version=parcel.card.fingerprint,
            priority=parcel.priority.name.lower(),
            input_tokens=parcel.input_tokens,
            created_us=parcel.clock.created_us,
            affinity=None if parcel.session is None else f"{principal.account}/{parcel.session}",
            n=parcel.n,
            avoid=tuple(self._avoid),
            wait_s=RESTART_WAIT_S if self._n_moves else 0.0,
            reject_if_busy=parcel.reject_if_busy and not self._n_moves,
            engine="" if parcel.job is None else parcel.job.engine,
            keys=parcel.keys,
            max_tokens=parcel.max_tokens,
            lost=tuple(self._lost),
            deadline_s=left_s,
        )

    # --- the end -----------------------------------------------------------------------------------------------------

    async def _finish(self) -> None:
        self._close_attempt()
        await asyncio.shield(self._end("finished"))

    def _close_attempt(self) -> None:
        if self._attempt is not None:
            self._attempt.close()

    def _end(self, status: UsageStatus, error: Exception | None = None) -> "asyncio.Task[None]":
        """The one way out, taken once."""
        if self.settling is None:
            row = self._row(status)
            job = self.parcel.job
            settlement = Settlement(row, Counts(), [], job is not None, lost=tuple(self._lost))
            if job is not None:
                job.record_usage(row)
            self.settling = asyncio.create_task(self._core.settle(settlement))
            self.settling.add_done_callback(lambda task: log_end(self.engine, row, error, task))
            self.settling.add_done_callback(lambda task: self._on_end(self))
        return self.settling

    def _row(self, status: UsageStatus) -> UsageRow:
        parcel, usage = self.parcel, self.usage
        return UsageRow(
            id=parcel.id,
            account=parcel.principal.account,
            key_id=parcel.principal.key_id,
            model=parcel.card.id,
            model_version=parcel.card.fingerprint,
            priority=parcel.priority.name.lower(),
            input_tokens=usage.prompt_tokens,
            cached_by_tier=usage.cached_by_tier,
            output_tokens=usage.completion_tokens,
            reasoning_tokens=usage.reasoning_tokens,
            status=status,
            created_us=parcel.clock.created_us,
            first_token_us=self.first_token_us,
            finished_us=parcel.clock.now_us(),
        )
