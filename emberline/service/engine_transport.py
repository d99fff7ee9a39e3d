"""A request on our own engines: token deltas in, text events out; the prompt on a prefill worker where there is one."""

import asyncio
import logging
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import lru_cache

import msgspec

from emberline.cluster.engine_client import EngineClient, EngineStream
from emberline.cluster.prefill_handover import Prefill, hand_over, prefill_id, why_not_handed_over
from emberline.cluster.timings import DEFAULTS, Timings
from emberline.protocol.errors import EmberlineError, ErrorInfo, Internal, Unavailable, from_info
from emberline.protocol.events import (
    DraftUsage,
    PromptEcho,
    PromptLogprobs,
    Started,
    TextEvent,
    TokenDelta,
    Usage,
)
from emberline.protocol.request import EngineRequest, Message
from emberline.protocol.route_request import Fault, Route, client_of
from emberline.protocol.trace_context import Phase, TraceContext, TraceDetails
from emberline.service.choice_decoder import ChoiceDecoder, ParsingChoiceDecoder
from emberline.service.prepare import Prepared
from emberline.service.prompt_report import PromptReport
from emberline.telemetry.metrics import Histogram
from emberline.telemetry.request_log import JobContext, in_flight_id
from emberline.telemetry.tracing import PROVIDER

encode = msgspec.json.Encoder().encode
_log = logging.getLogger(__name__)


@lru_cache(1024)
def _tell(problem: str) -> None:
    """Log a problem of two workers once, and not for every request."""
    _log.warning("%s; the decode worker computes them itself", problem)


class EngineTransport:
    """Owns the request's token stream and one decoder per choice."""

    def __init__(
        self,
        prepared: Prepared,
        engines: Mapping[str, EngineClient],
        inter_token: Histogram,
        job: JobContext | None = None,
        timings: Timings = DEFAULTS,
    ) -> None:
        self.restart_wait_s = timings.restart_wait_s
        self.deadline_grace_s = timings.deadline_grace_s
        self._timings = timings
        self._n_prefilled = 0  # prompt tokens that were computed, of a request that ended before its first token
        self.began = False
        self.trace: TraceContext | None = None
        self.provider = PROVIDER
        self.operation = "text_completion" if prepared.request.messages is None else "chat"
        self._opened_s = 0.0  # of the current attempt, monotonic
        self._engine_wait_s = 0.0  # its sequence waited in the engine before its prefill
        self._prepared = prepared
        self._engines = engines  # by endpoint name
        self._id = in_flight_id(prepared.request.id, job)
        self._on_delta = None if job is None else job.on_delta
        decoder = ParsingChoiceDecoder if prepared.parsed else ChoiceDecoder
        self._choices = [decoder(index, prepared, inter_token) for index in range(prepared.request.n)]
        self._n_open = len(self._choices)
        max_tokens = prepared.sampling.max_tokens
        self._max_tokens = sys.maxsize if max_tokens is None else max_tokens  # of each choice
        self._prompt = PromptReport(prepared) if prepared.request.returns_prompt else None  # None: not wanted back
        # One worker computes a prompt whose log-probabilities are wanted, or which has no reply.
        self._alone = max_tokens == 0 or prepared.sampling.prompt_logprobs is not None
        self._started = False  # the first token of any attempt is there
        self._drafts: dict[str, DraftUsage] = {}  # of every sequence so far, if the client wants to know
        self._cached_by_tier: dict[str, int] | None = None  # as reported by the first attempt that produced a token
        self._attempt = 0
        self._deadline_at_s: float | None = None  # monotonic
        self._decode: EngineClient | None = None
        self._prefill_engine: EngineClient | None = None
        self._prefill: Prefill | None = None
        self._stream: EngineStream | None = None
        self._by_id: dict[str, ChoiceDecoder] = {}  # by sequence id
        self._failed: EmberlineError | None = None  # raised once the events before it are delivered
        if job is not None and job.resume_from is not None:
            (choice,) = self._choices
            choice.push(job.resume_from)
            self._prompt = None  # an earlier attempt has told of it
            self._n_open -= choice.done is not None

    @property
    def done(self) -> bool:
        return self._n_open == 0

    @property
    def cached_tokens(self) -> int:
        return sum((self._cached_by_tier or {}).values())

    @property
    def usage(self) -> Usage:
        """Token counts so far. The prompt counts in full with the first token; of a request that was aborted or failed
        before it, as far as the engine says it was computed."""
        n_tokens = n_reasoning = 0
        for choice in self._choices:
            n_tokens += choice.n_tokens
            n_reasoning += choice.n_reasoning
        is_computed = bool(self._started or n_tokens)
        return Usage(
            prompt_tokens=self._prepared.prompt.n_ids if is_computed else self._n_prefilled,
            image_tokens=self._prepared.image_tokens if is_computed else 0,
            completion_tokens=n_tokens,
            reasoning_tokens=n_reasoning,
            cached_by_tier=self._cached_by_tier or {},
            drafts=self._draft_usage() if self._prepared.request.speculation.report else None,
        )

    def _draft_usage(self) -> DraftUsage:
        found = self._drafts.values()
        return DraftUsage(sum(each.drafted for each in found), sum(each.accepted for each in found))

    @property
    def replies(self) -> list[tuple[Message, bytes]]:
        """Each choice's message and token ids."""
        return [(choice.message, bytes(choice.output_ids)) for choice in self._choices]

    async def open(self, route: Route, attempt: int, deadline_s: float | None) -> None:
        self.began, self._n_prefilled = False, 0
        if self._prompt is not None:
            self._prompt.restart()
        self._attempt = attempt
        self._opened_s, self._engine_wait_s = time.monotonic(), 0.0
        self._deadline_at_s = None if deadline_s is None else self._opened_s + deadline_s
        decode = self._decode = client_of(self._engines, route.decode)
        has_prefill = bool(route.prefill) and not self._alone
        prefill = self._prefill_engine = client_of(self._engines, route.prefill) if has_prefill else None
        wait_s = self._timings.reconnect_wait_s if attempt else self._timings.connect_wait_s
        for engine in (decode, prefill):
            if engine is not None:
                await engine.wait_connected(wait_s)
        if prefill is not None and (problem := why_not_handed_over(prefill, decode)):
            _tell(problem)
            prefill = self._prefill_engine = None
        # Before the first token there is one sequence: the others find its prompt in the cache.
        choices = self._choices if self._started else self._choices[:1]
        first, *others = self._sequences(choice for choice in choices if choice.done is None)
        if prefill is None:
            self._stream = decode.stream([first, *others])
        else:
            self._stream, self._prefill = hand_over(prefill, decode, first)
            if others:
                self._stream.submit(others)

    async def next(self) -> list[TextEvent]:
        """Wait for tokens; all that have arrived become events at once."""
        if self._failed is not None:
            raise self._failed
        assert self._stream is not None
        deltas = await self._stream.next()
        if not self._started and self._prefill is not None and any(delta.token_ids for delta in deltas):
            self._set_cached(await self._prefill.cached_by_tier())
        events: list[TextEvent] = []
        for delta in deltas if len(deltas) == 1 else _merged(deltas):
            if self._prompt is None:
                self._absorb(delta, events)
                continue
            self._prompt.take(delta)
            if delta.token_ids or delta.finish is not None:
                is_first = not self._started and delta.finish not in ("error", "cancelled")
                told = await self._prompt.told() if is_first else None
                self._absorb(delta, events)
                if told is not None:
                    events[1:1] = [PromptEcho(choice.index, told) for choice in self._choices]
        return events

    def fault(self, error: EmberlineError) -> Fault:
        """The core sees lost connections itself; failed steps and KV transfers are seen here only."""
        if not isinstance(error, Unavailable | Internal) or self._decode is None:
            return Fault(False)
        decode, prefill = self._decode, self._prefill_engine
        told_by_prefill = self._prefill is not None and self._prefill.error is error
        if isinstance(error, Internal):  # not retried: it may be the request that an engine cannot compute
            return Fault(False, lost=(prefill.name if prefill is not None and told_by_prefill else decode.name,))
        if prefill is None:
            return Fault(not decode.closing, (decode.name,))
        lost: tuple[str, ...] = ()
        if error.param == "transfer":
            lost = (decode.name if told_by_prefill else prefill.name,)
        return Fault(not decode.closing, (decode.name, prefill.name), lost)

    def trace_details(self, content: bool) -> TraceDetails:
        phases: list[Phase] = []
        worker = self._prefill_engine or self._decode
        where = {"emberline.worker": "" if worker is None else worker.name}
        # The decode worker's own wait is the one for the KV.
        waited_s = self._engine_wait_s if self._prefill is None else self._prefill.waited_s
        if waited_s:
            phases.append(Phase("engine_queue", self._opened_s, self._opened_s + waited_s, where))
        if self._prefill is not None and self._prefill.first_block_s is not None:
            ended_s = self._prefill.ended_s or time.monotonic()
            phases.append(Phase("kv_transfer", self._prefill.first_block_s, ended_s, where))
        phases += [phase for choice in self._choices if (phase := choice.tool_phase) is not None]
        finished = tuple(choice.done.finish for choice in self._choices if choice.done is not None)
        if not content:
            return TraceDetails(tuple(phases), finished)
        request = self._prepared.request
        asked: object = request.messages or request.prompt or []
        replies = [choice.message for choice in self._choices]
        return TraceDetails(tuple(phases), finished, encode(asked).decode(), encode(replies).decode())

    async def settle(self) -> None:
        """Abort the sequences and count what the engines computed for them, tokens that nobody has read included."""
        ending = [part.end() for part in (self._stream, self._prefill) if part is not None]
        with suppress(TimeoutError):
            async with asyncio.timeout(self._timings.settle_wait_s):
                await asyncio.gather(*ending)
        for delta in [] if self._stream is None else self._stream.unread:
            choice = self._by_id[delta.id]
            if choice.done is None:
                choice.output_ids += delta.token_ids[: 4 * (self._max_tokens - choice.n_tokens)]
                self._count_prefilled(delta)
        if self._prefill is not None:
            self._n_prefilled = max(self._n_prefilled, self._prefill.n_prefilled)

    def _count_prefilled(self, delta: TokenDelta) -> None:
        """Take in what the delta of a sequence that ended early says about its prompt."""
        if delta.usage is None:
            return
        if self._prefill is None:
            self._set_cached(delta.usage.cached_by_tier)
        if delta.usage.partial:
            self._n_prefilled = max(self._n_prefilled, delta.usage.prompt_tokens)

    def close(self) -> None:
        self._failed = None
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        if self._prefill is not None:
            if self._prefill.known_cached is not None:
                self._set_cached(self._prefill.known_cached)
            self._prefill.close()
            self._prefill = None

    def _absorb(self, delta: TokenDelta, events: list[TextEvent]) -> None:
        assert self._stream is not None
        choice = self._by_id[delta.id]
        if delta.finish == "error" or delta.finish == "cancelled":
            error = self._error(delta.error)
            self._failed = self._failed or error
            if isinstance(error, Unavailable):
                return  # what it has drawn last, another engine draws again
            self._count_prefilled(delta)
            if not delta.token_ids:
                return
            delta.finish = None
        if delta.waited_s:
            self._engine_wait_s = delta.waited_s
        if not self._started:
            self._start(delta)
            events.append(Started(self.usage))
        self.began = True
        if delta.usage is not None and delta.usage.drafts is not None:
            self._drafts[delta.id] = delta.usage.drafts
        n_left = self._max_tokens - choice.n_tokens
        if len(delta.token_ids) >= 4 * n_left:
            _cut(delta, n_left)
        if self._on_delta is not None:
            self._on_delta(delta)
        events += choice.push(delta)
        if choice.done is not None:
            self._n_open -= 1
            self._stream.abort(delta.id)  # after a stop string or a cut the engine would go on
            if choice.done.finish == "tool_calls" and self._decode is not None:
                self._decode.called_tools([delta.id])
                if self._prefill_engine is not None:
                    self._prefill_engine.called_tools([prefill_id(delta.id)])

    def _start(self, delta: TokenDelta) -> None:
        """The first token is there, so the prompt's KV is cached: submit the other choices."""
        assert self._stream is not None
        self._started = True
        if delta.usage is not None and self._prefill is None:
            self._set_cached(delta.usage.cached_by_tier)
        if len(self._choices) > 1 and self._failed is None:
            try:
                self._stream.submit(self._sequences(self._choices[1:]))
            except Unavailable as error:
                self._failed = error

    def _sequences(self, choices: Iterable[ChoiceDecoder]) -> list[EngineRequest]:
        prepared, request = self._prepared, self._prepared.request
        suffix = f"-m{self._attempt}" if self._attempt else ""
        deadline_s = None
        if self._deadline_at_s is not None:
            deadline_s = max(0.001, self._deadline_at_s - time.monotonic())
        made: list[EngineRequest] = []
        for choice in choices:
            sampling = prepared.sampling
            if self._started and sampling.prompt_logprobs is not None:
                sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
            if choice.index and sampling.seed is not None:
                sampling = msgspec.structs.replace(sampling, seed=(sampling.seed + choice.index) % (1 << 64))
            sequence_id = self._id + (f"-{choice.index}" if choice.index else "") + suffix
            self._by_id[sequence_id] = choice
            made.append(
                EngineRequest(
                    id=sequence_id,
                    prompt_ids=prepared.prompt.ids,
                    sampling=sampling,
                    salt=prepared.principal.salt,
                    session=request.session,
                    cache_ttl_s=request.cache_ttl_s,
                    session_final=request.session_final,
                    priority=request.priority,
                    deadline_s=deadline_s,
                    grammar=prepared.grammar,
                    thinking_limit=prepared.thinking_limit,
                    speculation=request.speculation,
                    output_ids=bytes(choice.output_ids),
                    keys=prepared.keys,
                    images=prepared.images,
                    trace_id="" if self.trace is None else self.trace.trace_id,
                )
            )
        return made

    def _set_cached(self, cached_by_tier: dict[str, int]) -> None:
        """Later attempts are not counted: what they find in caches, the first may have computed."""
        if self._cached_by_tier is None:
            self._cached_by_tier = cached_by_tier

    def _error(self, info: ErrorInfo | None) -> EmberlineError:
        if info is None:
            return Unavailable("the engine gave the request up")
        error = from_info(info)
        if error.param == "grammar":  # not a field of any API
            error.param = "tools" if self._prepared.request.output is None else "output"
        return error


def _cut(delta: TokenDelta, n_left: int) -> None:
    """At its token limit a reply ends, whatever the engine sends: only its first `n_left` tokens count."""
    if len(delta.token_ids) == 4 * n_left and delta.finish is not None:
        return
    delta.token_ids = delta.token_ids[: 4 * n_left]
    delta.finish = "length"
    if delta.logprobs is not None:
        delta.logprobs = delta.logprobs[:n_left]


def _merged(deltas: list[TokenDelta]) -> list[TokenDelta]:
    """Each sequence's deltas as one, so that tokens that waited together are sent together."""
    merged: dict[str, TokenDelta] = {}
    for delta in deltas:
        held = merged.setdefault(delta.id, delta)
        if held is not delta:
            held.token_ids += delta.token_ids
            held.finish = delta.finish
            held.error = delta.error
            if delta.usage is not None:  # the last one counts all, drafts included
                held.usage = delta.usage
            if delta.logprobs is not None:
                held.logprobs = (held.logprobs or []) + delta.logprobs
            if delta.prompt_logprobs is not None:
                told = [part for part in (held.prompt_logprobs, delta.prompt_logprobs) if part is not None]
                held.prompt_logprobs = PromptLogprobs.joined(told)
            held.usage, held.waited_s = held.usage or delta.usage, held.waited_s or delta.waited_s
    return list(merged.values())
