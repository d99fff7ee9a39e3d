"""One accepted request, from the engine it was given to its last token."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable

import msgspec

from emberline.accounts.usage import Status, UsageRow
from emberline.balancer.engine_client import EngineClient
from emberline.balancer.stream import Stream
from emberline.protocol.errors import DeadlineExceeded, EmberlineError, ErrorInfo, Unavailable, from_info
from emberline.protocol.events import Started, TextEvent, TokenDelta, Usage
from emberline.protocol.request import EngineRequest, Message
from emberline.service.choice import Choice
from emberline.service.core import Ask
from emberline.service.errand import Errand
from emberline.service.histogram import GAP_BOUNDS_S, Histogram
from emberline.service.parsed_choice import ParsedChoice
from emberline.service.prepare import Prepared

CONNECT_WAIT_S = 2.0  # for our own connection to an engine that the core already sees
RESTART_WAIT_S = 15.0  # for an engine to come back, when a request has lost its first one
DEADLINE_GRACE_S = 1.0  # the engine keeps deadlines; this catches an engine that does not answer

# Asks the core for an engine; the request holds room there until it is settled.
Admit = Callable[[Ask], Awaitable[EngineClient]]


class Run:
    """Owns the request's stream and choices. The pipeline steps it until it is done."""

    def __init__(self, prepared: Prepared, admit: Admit, errand: Errand | None = None) -> None:
        self.prepared = prepared
        self.errand = errand  # of queued work
        self.gaps = Histogram(GAP_BOUNDS_S)
        kind = ParsedChoice if prepared.parsed else Choice
        self.choices: list[Choice] = [kind(index, prepared, self.gaps) for index in range(prepared.request.n)]
        self.engine: EngineClient | None = None
        self.lost_engine: EngineClient | None = None  # the one that died before the first token
        self.first_token_us: int | None = None
        self.settling: asyncio.Task[None] | None = None  # the service's, once the request has ended
        self._n_open = len(self.choices)
        self._cached_by_tier: dict[str, int] = {}
        self._admit = admit
        self._by_id: dict[str, Choice] = {}
        self._stream: Stream | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def done(self) -> bool:
        return self._n_open == 0

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.prepared.prompt.n_ids,
            completion_tokens=sum(choice.n_tokens for choice in self.choices),
            reasoning_tokens=sum(choice.n_reasoning for choice in self.choices),
            cached_by_tier=self._cached_by_tier,
        )

    @property
    def replies(self) -> list[tuple[Message, bytes]]:
        """Each choice's message and token ids."""
        return [(choice.message, bytes(choice.output_ids)) for choice in self.choices]

    async def admit(self) -> None:
        """Get an engine; Overloaded or Unavailable when there is none for us."""
        self.engine = await self._admit(self._ask())

    async def step(self) -> list[TextEvent]:
        """Wait for tokens and turn all that are there into events; move once if the engine dies before the first."""
        try:
            if self._stream is None:
                self._stream = await self._open()
            return self._absorb(await self._stream.next())
        except Unavailable:
            assert self.engine is not None
            if self.first_token_us is not None or self.lost_engine is not None or self.engine.closing or self.errand:
                raise
        self.close()
        self.lost_engine = self.engine
        self.choices[0].output_ids.clear()  # all that it drew, unseen, is drawn again
        await self.admit()
        return []

    def close(self) -> None:
        """Abort what still runs in the engine."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        if self._timer is not None:
            self._timer.cancel()

    def row(self, status: Status) -> UsageRow:
        prepared, usage = self.prepared, self.usage
        return UsageRow(
            id=prepared.request.id,
            account=prepared.principal.account,
            key_id=prepared.principal.key_id,
            model=prepared.served.card.id,
            model_version=prepared.info.fingerprint,
            priority=prepared.request.priority.name.lower(),
            input_tokens=usage.prompt_tokens,
            cached_by_tier=usage.cached_by_tier,
            output_tokens=usage.completion_tokens,
            reasoning_tokens=usage.reasoning_tokens,
            status=status,
            created_us=prepared.clock.created_us,
            first_token_us=self.first_token_us,
            finished_us=prepared.clock.now_us(),
        )

    def _ask(self) -> Ask:
        request, principal = self.prepared.request, self.prepared.principal
        lost = self.lost_engine
        return Ask(
            id=request.id,
            account=principal.account,
            key_id=principal.key_id,
            model=self.prepared.served.card.id,
            model_version=self.prepared.info.fingerprint,
            priority=request.priority.name.lower(),
            input_tokens=self.prepared.prompt.n_ids,
            created_us=self.prepared.clock.created_us,
            affinity=None if request.session is None else f"{principal.account}/{request.session}",
            n=request.n,
            avoid=() if lost is None else (lost.name,),
            wait_s=0.0 if lost is None else min(RESTART_WAIT_S, self._time_left_s() or RESTART_WAIT_S),
            reject_if_busy=request.reject_if_busy and lost is None,
            engine="" if self.errand is None else self.errand.engine,
        )

    async def _open(self) -> Stream:
        assert self.engine is not None
        await self.engine.wait_connected(CONNECT_WAIT_S if self.lost_engine is None else RESTART_WAIT_S)
        left_s = self._time_left_s()
        stream = self.engine.stream(self._sequences(self.choices[:1], left_s))
        if left_s is not None:
            late = DeadlineExceeded(f"not finished within {self.prepared.request.deadline_s:g} s")
            self._timer = asyncio.get_running_loop().call_later(left_s + DEADLINE_GRACE_S, stream.fail, late)
        return stream

    def _time_left_s(self) -> float | None:
        deadline_s = self.prepared.request.deadline_s
        if deadline_s is None:
            return None
        left_s = deadline_s - self.prepared.clock.elapsed_s()
        if left_s <= 0:
            raise DeadlineExceeded(f"not started within {deadline_s:g} s")
        return left_s

    def _sequences(self, choices: Iterable[Choice], left_s: float | None) -> list[EngineRequest]:
        prepared, request = self.prepared, self.prepared.request
        retried = "" if self.lost_engine is None else "-again"
        made: list[EngineRequest] = []
        for choice in choices:
            sampling = prepared.sampling
            if choice.index and sampling.seed is not None:
                sampling = msgspec.structs.replace(sampling, seed=(sampling.seed + choice.index) % (1 << 64))
            sequence_id = request.id + (f"-{choice.index}" if choice.index else "") + retried
            self._by_id[sequence_id] = choice
            made.append(
                EngineRequest(
                    id=sequence_id,
                    prompt_ids=prepared.prompt.ids,
                    sampling=sampling,
                    salt=prepared.principal.salt,
                    session=request.session,
                    priority=request.priority,
                    deadline_s=left_s,
                    grammar=prepared.grammar,
                    thinking_limit=prepared.thinking_limit,
                )
            )
        return made

    def _absorb(self, deltas: list[TokenDelta]) -> list[TextEvent]:
        assert self._stream is not None
        events: list[TextEvent] = []
        for delta in deltas if len(deltas) == 1 else _merged(deltas):
            choice = self._by_id[delta.id]
            if delta.finish == "error" or delta.finish == "cancelled":
                choice.output_ids += delta.token_ids  # computed, so counted
                raise self._failure(delta.error)
            if self.first_token_us is None:
                events.append(self._start(delta))
            events += choice.push(delta)
            if choice.done is not None:
                self._n_open -= 1
                if delta.finish is None:  # a stop string: the engine does not know
                    self._stream.abort(delta.id)
        return events

    def _failure(self, info: ErrorInfo | None) -> EmberlineError:
        if info is None:
            return Unavailable("the engine gave the request up")
        error = from_info(info)
        if error.param == "grammar":  # which no caller has sent
            error.param = "tools" if self.prepared.request.output is None else "output"
        return error

    def _start(self, delta: TokenDelta) -> Started:
        """The first token is there, so the prompt's KV is too: the other choices find it in the cache."""
        assert self._stream is not None
        self.first_token_us = self.prepared.clock.now_us()
        if delta.usage is not None:
            self._cached_by_tier = delta.usage.cached_by_tier
        if len(self.choices) > 1:
            self._stream.submit(self._sequences(self.choices[1:], self._time_left_s()))
        return Started(self.usage)


def _merged(deltas: list[TokenDelta]) -> list[TokenDelta]:
    """Each sequence's deltas as one, so that tokens that waited together are sent together."""
    merged: dict[str, TokenDelta] = {}
    for delta in deltas:
        held = merged.setdefault(delta.id, delta)
        if held is not delta:
            held.token_ids += delta.token_ids
            held.finish = delta.finish
            held.error = delta.error
            if delta.logprobs is not None:
                held.logprobs = (held.logprobs or []) + delta.logprobs
    return list(merged.values())
