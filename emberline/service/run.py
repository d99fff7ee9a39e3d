"""One accepted request, from the engine it was given to its last token."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

import msgspec

from emberline.accounts.usage_ledger import UsageRow, UsageStatus
from emberline.balancer.route_request import RouteRequest
from emberline.protocol.errors import DeadlineExceeded, EmberlineError, ErrorInfo, Unavailable, from_info
from emberline.protocol.events import Started, TextEvent, TokenDelta, Usage
from emberline.protocol.request import EngineRequest, Message
from emberline.service.choice_decoder import ChoiceDecoder, ParsingChoiceDecoder
from emberline.service.engine_client import EngineClient, EngineStream
from emberline.service.job_context import JobContext
from emberline.service.metrics import GAP_BOUNDS_S, Histogram
from emberline.service.prefill_handover import Prefill, hand_over
from emberline.service.prepare import Prepared

CONNECT_WAIT_S = 2.0  # for our own connection to an engine that the core already sees
RECONNECT_WAIT_S = 15.0  # the same, once an engine was lost: the core may not have seen its death yet
RESTART_WAIT_S = 60.0  # for an engine to come back, when a request has lost one: it may have weights to load
DEADLINE_GRACE_S = 1.0  # the engine keeps deadlines; this catches an engine that does not answer
MOST_MOVES = 3  # in a row, no token in between: a request that loses more engines may be what kills them


@dataclass(frozen=True, slots=True)
class Placed:
    """The engines that a request was given."""

    decode: EngineClient
    prefill: EngineClient | None = None  # None: decode computes the prompt, too


# Asks the core for engines; the request holds room there until it is settled.
Admit = Callable[[RouteRequest], Awaitable[Placed]]

# Tells the core that the engines have brought a first token, and how much of the prompt they found in their caches.
Began = Callable[[str, int], None]

log = logging.getLogger("emberline.request")


class Run:
    """Owns the request's stream and choices. The pipeline steps it until it is done."""

    def __init__(self, prepared: Prepared, admit: Admit, began: Began, job: JobContext | None = None) -> None:
        self.prepared = prepared
        self.job = job  # set for a queued job
        self.gaps = Histogram(GAP_BOUNDS_S)
        kind = ParsingChoiceDecoder if prepared.parsed else ChoiceDecoder
        self.choices: list[ChoiceDecoder] = [kind(index, prepared, self.gaps) for index in range(prepared.request.n)]
        self.placed: Placed | None = None
        self.first_token_us: int | None = None
        self.settling: asyncio.Task[None] | None = None  # the service's, once the request has ended
        self._n_open = len(self.choices)
        self._cached_by_tier: dict[str, int] | None = None  # once it is known
        self._admit = admit
        self._began = began
        self._told = False  # the core, of the engines that it has now
        self._n_moves = 0  # in all; ids are made of it
        self._n_stuck = 0  # since the last token
        self._avoid: list[str] = []  # engines that it was on when it had to move
        self._lost: tuple[str, ...] = ()  # the one whose fault it was
        self._failed: Unavailable | None = None  # of a sequence, to be dealt with once the events before it are told
        self._prefill: Prefill | None = None
        self._by_id: dict[str, ChoiceDecoder] = {}
        self._stream: EngineStream | None = None
        self._timer: asyncio.TimerHandle | None = None
        if job is not None and job.resume_from is not None:
            self._take_up(job.resume_from)

    @property
    def done(self) -> bool:
        return self._n_open == 0

    @property
    def engine(self) -> str:
        """The name of the one that writes the reply; empty before there is one."""
        return self.placed.decode.name if self.placed is not None else ""

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.prepared.prompt.n_ids,
            completion_tokens=sum(choice.n_tokens for choice in self.choices),
            reasoning_tokens=sum(choice.n_reasoning for choice in self.choices),
            cached_by_tier=self._cached_by_tier or {},
        )

    @property
    def replies(self) -> list[tuple[Message, bytes]]:
        """Each choice's message and token ids."""
        return [(choice.message, bytes(choice.output_ids)) for choice in self.choices]

    async def admit(self) -> None:
        """Get engines; Overloaded or Unavailable when there are none for us."""
        self.placed = await self._admit(self._ask())

    async def step(self) -> list[TextEvent]:
        """Wait for tokens and turn all that are there into events. A lost engine's work goes on at another."""
        try:
            if self._failed is not None:
                raise self._failed
            if self._stream is None:
                self._stream = await self._open()
            deltas = await self._stream.next()
            if self.first_token_us is None and self._prefill is not None and any(delta.token_ids for delta in deltas):
                self._found(await self._prefill.cached_by_tier())
            return self._absorb(deltas)
        except Unavailable as error:
            if not self._may_move:
                raise
            self._leave(error)
        await self.admit()
        return []

    def close(self) -> None:
        """Abort what still runs in the engine."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        if self._prefill is not None:
            self._prefill.close()
            self._prefill = None
        if self._timer is not None:
            self._timer.cancel()

    def row(self, status: UsageStatus) -> UsageRow:
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

    @property
    def _may_move(self) -> bool:
        """Queued work goes back to its queue instead: an engine that dies under it is to be noticed there."""
        assert self.placed is not None
        return self._n_stuck < MOST_MOVES and not self.placed.decode.closing and self.job is None

    def _leave(self, error: Unavailable) -> None:
        """Give up the engines. What clients have seen is kept: the reply goes on behind it, under new ids."""
        assert self.placed is not None
        self._lost = self._blamed(error)
        if self._prefill is not None and self._prefill.told is not None:
            self._found(self._prefill.told)
        self.close()
        self._failed = None
        self._told = False
        self._n_moves += 1
        self._n_stuck += 1
        for engine in (self.placed.decode, self.placed.prefill):
            if engine is not None and engine.name not in self._avoid:
                self._avoid.append(engine.name)
        log.warning(
            "moving: %s",
            error.message,
            extra={"request_id": self.prepared.request.id, "tokens": sum(choice.n_tokens for choice in self.choices)},
        )

    def _blamed(self, error: Unavailable) -> tuple[str, ...]:
        """A lost connection is seen by the core, too; who does not push its KV, or does not take it, is not."""
        assert self.placed is not None
        if error.param != "transfer" or self.placed.prefill is None:
            return ()
        told_by_prefill = self._prefill is not None and self._prefill.error is error
        return ((self.placed.decode if told_by_prefill else self.placed.prefill).name,)

    def _ask(self) -> RouteRequest:
        request, principal = self.prepared.request, self.prepared.principal
        return RouteRequest(
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
            keys=self.prepared.keys,
            max_tokens=self.prepared.sampling.max_tokens or 0,
            deadline_s=self._time_left_s(),
            avoid=tuple(self._avoid),
            lost=self._lost,
            wait_s=min(RESTART_WAIT_S, self._time_left_s() or RESTART_WAIT_S) if self._n_moves else 0.0,
            reject_if_busy=request.reject_if_busy and not self._n_moves,
            engine="" if self.job is None else self.job.engine,
        )

    async def _open(self) -> EngineStream:
        assert self.placed is not None
        decode, prefill = self.placed.decode, self.placed.prefill
        for engine in (decode, prefill):
            if engine is not None:
                await engine.wait_connected(RECONNECT_WAIT_S if self._n_moves else CONNECT_WAIT_S)
        left_s = self._time_left_s()
        begun = self.choices[:1] if self.first_token_us is None else self.choices
        first, *others = self._sequences([choice for choice in begun if choice.done is None], left_s)
        if prefill is None:
            stream = decode.stream([first, *others])
        else:
            stream, self._prefill = hand_over(prefill, decode, first)
            if others:
                stream.submit(others)
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

    def _sequences(self, choices: Iterable[ChoiceDecoder], left_s: float | None) -> list[EngineRequest]:
        prepared, request = self.prepared, self.prepared.request
        moved = f"-m{self._n_moves}" if self._n_moves else ""
        made: list[EngineRequest] = []
        for choice in choices:
            sampling = prepared.sampling
            if choice.index and sampling.seed is not None:
                sampling = msgspec.structs.replace(sampling, seed=(sampling.seed + choice.index) % (1 << 64))
            sequence_id = request.id + (f"-{choice.index}" if choice.index else "") + moved
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
                    output_ids=bytes(choice.output_ids),
                    keys=prepared.keys,
                )
            )
        return made

    def _absorb(self, deltas: list[TokenDelta]) -> list[TextEvent]:
        assert self._stream is not None
        events: list[TextEvent] = []
        for delta in deltas if len(deltas) == 1 else _merged(deltas):
            choice = self._by_id[delta.id]
            if delta.finish == "error" or delta.finish == "cancelled":
                self._fail(choice, delta)
                continue
            if self.first_token_us is None:
                events.append(self._start(delta))
            if not self._told:
                self._told = True
                self._began(self.prepared.request.id, self.usage.cached_tokens)
            if self.job is not None and self.job.on_delta is not None:
                self.job.on_delta(delta)
            self._n_stuck = 0
            events += choice.push(delta)
            if choice.done is not None:
                self._n_open -= 1
                if delta.finish is None:  # a stop string: the engine does not know
                    self._stream.abort(delta.id)
        return events

    def _take_up(self, delta: TokenDelta) -> None:
        """Go on behind what another attempt drew and told."""
        (choice,) = self.choices
        choice.push(delta)
        self._n_open -= choice.done is not None

    def _found(self, cached_by_tier: dict[str, int]) -> None:
        """What lay in caches. After a move that is known already: the rest was computed here, if in vain."""
        if self._cached_by_tier is None:
            self._cached_by_tier = cached_by_tier

    def _fail(self, choice: ChoiceDecoder, delta: TokenDelta) -> None:
        """A sequence ended without its reply. What can go on elsewhere does, once the other events are told."""
        error = self._error(delta.error)
        if isinstance(error, Unavailable) and self._may_move:
            self._failed = error
            return
        choice.output_ids += delta.token_ids  # computed, so counted
        raise error

    def _error(self, info: ErrorInfo | None) -> EmberlineError:
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
        if delta.usage is not None and self._prefill is None:
            self._found(delta.usage.cached_by_tier)
        if len(self.choices) > 1:
            try:
                self._stream.submit(self._sequences(self.choices[1:], self._time_left_s()))
            except Unavailable as error:
                self._failed = error
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
