"""One HTTP call through a gateway: its requests are planned, checked, answered by the cache or a model, and logged.

It stands before the pipeline, which every attempt goes through once: admission, limits, prices and the usage row are
the pipeline's. What differs for the caller is which model answers, and that one log row says all about it.
"""

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from emberline.accounts.usage_row import UsageRow
from emberline.catalog.model_card import ModelCard
from emberline.gateway.attempts import LOCAL, Attempt, Attempts, PlanStep, final_error, tries_next
from emberline.gateway.guardrails import HeldReply, applicable
from emberline.gateway.log import LogRow, shortened
from emberline.gateway.moderation import Moderator
from emberline.gateway.options import cache_ttl_s, is_operators_timeout, retry_policy
from emberline.gateway.pipeline import OnAdmit, OnComplete, Pipeline
from emberline.gateway.response_cache import CachedReply, request_digest
from emberline.gateway.routing import Counter, Plan, plan
from emberline.gateway.service import GatewayService
from emberline.protocol.complete_response import Answer, Encoded
from emberline.protocol.errors import EmberlineError, ModelNotFound
from emberline.protocol.events import Completed, Started, TextEvent, Usage
from emberline.protocol.gateway import GatewayOptions, GatewaySettings, StepConfig
from emberline.protocol.media import Media, MediaRequest
from emberline.protocol.provider import OwnKey
from emberline.protocol.rate_limits import RateLimits
from emberline.protocol.request import EncodeRequest, GenerateRequest, Principal, SpeechRequest, alias_caller
from emberline.protocol.speech import Transcript
from emberline.service.event_collector import ChoiceCollector, events_of
from emberline.telemetry.request_log import AttemptContext, never
from emberline.upstream.target import Target
from emberline.upstream.upstream_request import UpstreamRequest

T = TypeVar("T")


class GatewayCall:
    """Made by `open_call`. Most calls make one request; `completions` may make several at once."""

    def __init__(
        self,
        owner: GatewayService,
        settings: GatewaySettings,
        options: GatewayOptions,
        principal: Principal,
        pipeline: Pipeline,
        log_id: str,
        floor: GatewaySettings | None = None,
    ) -> None:
        """`floor`: the operator's gateway, whose rules no option of a request loosens."""
        self.settings = settings
        self.floor = floor
        self.options = options
        self.owner = owner
        self.principal = principal
        self.pipeline = pipeline
        asked = options.collect_log_payload
        self.logs_content = settings.log_content if asked is None else asked
        self.collects_log = settings.collect_logs if options.collect_log is None else options.collect_log
        if floor is not None:
            self.logs_content |= floor.log_content
            self.collects_log |= floor.collect_logs
        self.begin_step()
        self._log_id = log_id
        self._n_requests = 0
        self._cards: dict[tuple[str, str], ModelCard] = {}  # by name and caller
        self._plan: tuple[str, Plan] | None = None  # of the next request, and the name of its model
        self._open: _Request | None = None  # of a universal request whose earlier steps have failed
        self._shown: _Request | None = None  # whose headers the response has

    def begin_step(self, number: int = 0, step: StepConfig | None = None, has_next: bool = False) -> None:
        """Begin a step of a universal request; any other request is one step. `has_next`: a failure is not the end."""
        self.first_step, self.step, self.has_next_step = number, step, has_next
        self.own_key: OwnKey | None = None  # a provider's, which the client sends along
        self.ttl_s = cache_ttl_s(self.settings, self.options, step)
        self.retry_policy = retry_policy(self.settings, self.options, step, self.floor)
        # Whether replies, or prompts, must be read, and cannot be passed on as they come.
        guards = self.settings.guardrails
        self.reads_replies = bool(self.ttl_s or self.logs_content or (guards and applicable(guards, "response")))
        self.reads_prompts = self.reads_replies or bool(guards)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The gateway's headers of the response."""
        shown = self._shown
        if shown is None:
            return []
        found = [(b"cf-aig-step", b"%d" % shown.row.step)]
        if self.collects_log:
            found.append((b"cf-aig-log-id", shown.row.id.encode()))
        for name, value in (
            (b"cf-aig-cache-status", shown.row.cache_status),
            (b"cf-aig-model", shown.row.model),
            (b"cf-aig-provider", shown.row.provider),
        ):
            if value:
                found.append((name, value.encode("latin-1", "replace")))
        return found

    def plan(self, model: str, session: str | None, request_id: str) -> Plan:
        """The models that the next request tries, planned once. Planning does not count for the limits of routes."""
        caller = alias_caller(self.principal.account, session, request_id)
        if self._plan is None or (self._plan[0], self._plan[1].caller) != (model, caller):
            self._plan = model, plan(self.settings, model, self.options.metadata or {}, caller, self)
        return self._plan[1]

    def take_plan(self, model: str, session: str | None, request_id: str) -> Plan:
        """The plan of a request that begins now. Another request of the same call is planned anew."""
        found, self._plan = self.plan(model, session, request_id), None
        return found

    def card(self, model: str, caller: str) -> ModelCard:
        """The model with this name, looked up once for the call. Raises ModelNotFound if there is none."""
        key = model, caller
        if (found := self._cards.get(key)) is None:
            found = self._cards[key] = self.pipeline.models.find(model, caller)
        return found

    def target(self, card: ModelCard) -> Target:
        """The model as a request of this call uses it. Raises Forbidden if the caller may not use it."""
        return self.pipeline.models.target(card, self.principal, self.own_key)

    def use_model(self, model: str, session: str | None, request_id: str) -> ModelCard:
        """The model that is tried first. Raises ModelNotFound if there is none that could be tried."""
        models, caller, *_ = self.plan(model, session, request_id)
        for number, name in enumerate(models):
            try:
                return self.card(name, caller)
            except ModelNotFound:
                if number == len(models) - 1:
                    raise
        raise AssertionError("a plan has a model")

    def relays(self, models: Plan) -> bool:
        """True if upstream servers compute all models of the plan."""
        try:
            return all(self.pipeline.models.is_upstream(self.card(name, models.caller)) for name in models.models)
        except EmberlineError:  # there is no such model: whether another one is tried is decided where it is asked
            return False

    def has_room(self, counter: Counter) -> bool:
        return self.owner.counters.has_room(self.principal.account, self.settings.name, counter)

    # --- requests ----------------------------------------------------------------------------------------------------

    async def generate(
        self, request: GenerateRequest, on_admit: OnAdmit | None = None, on_complete: OnComplete | None = None
    ) -> AsyncGenerator[TextEvent, None]:
        """Generate a reply, as `Service.generate` does, or answer from the cache."""
        with self._request(request.id, request.model, request.api) as run:
            run.begin(self.take_plan(request.model, request.session, request.id))
            if self.logs_content:
                run.row.request = shortened(msgspec.json.encode(request.messages or request.prompt).decode())
            await run.moderator.check_prompt(request)
            digest = ""
            if self.ttl_s:
                digest = run.digest(request)
                if (cached := await run.cached(digest)) is not None and cached.answer is not None:
                    for event in replay(cached.answer, on_complete):
                        yield event
                    return

            async def start(attempt: Attempt) -> tuple[TextEvent, AsyncGenerator[TextEvent, None]]:
                asked = msgspec.structs.replace(request, id=attempt.id, model=attempt.step.model)
                events = self.pipeline.generate(
                    asked,
                    self.principal,
                    on_admit=run.admitting(on_admit),
                    on_complete=run.completing(on_complete),
                    attempt=run.context(attempt),
                    card=attempt.step.card,
                )
                return await _first_of(events), events

            first, events = await run.attempt(start)
            async with aclosing(events):
                async for event in _Reply(self, run, request.n, digest).checked(first, events):
                    yield event

    async def forward(
        self,
        make: Callable[[Target, str], Awaitable[UpstreamRequest]],
        models: Plan,
        request_id: str,
        requested: str,
        api: str,
        on_admit: OnAdmit | None = None,
        on_complete: OnComplete | None = None,
    ) -> AsyncGenerator[tuple[bytes, bool], None]:
        """Relay a reply, as `Service.forward` does. `make` makes the request for a target and an id.

        All models of the plan are on upstream servers."""
        with self._request(request_id, requested, api) as run:
            run.begin(models)
            self._plan = None

            async def start(
                attempt: Attempt,
            ) -> tuple[tuple[bytes, bool], AsyncGenerator[tuple[bytes, bool], None]]:
                asked = await make(self.target(attempt.step.card), attempt.id)
                context = run.context(attempt, bills_failure=asked.stream)
                blocks = self.pipeline.forward(asked, run.admitting(on_admit), run.completing(on_complete), context)
                return await _first_of(blocks), blocks

            first, blocks = await run.attempt(start)
            async with aclosing(blocks):
                block, is_last = first
                while not is_last:
                    yield block, is_last
                    block, is_last = await anext(blocks)
                run.answered()
                yield block, is_last

    async def encode(
        self, request: EncodeRequest, on_admit: OnAdmit | None = None, on_complete: OnComplete | None = None
    ) -> Encoded:
        """Encode texts, as `Service.encode` does, or answer from the cache."""
        with self._request(request.id, request.model, request.api) as run:
            run.begin(self.take_plan(request.model, request.session, request.id))
            texts = (*request.texts, request.query or "")
            await run.moderator.check_texts(texts, is_text=not request.token_ids)
            digest = run.digest(request) if self.ttl_s else ""
            if digest and (cached := await run.cached(digest)) is not None and cached.encoded is not None:
                if on_complete is not None:
                    on_complete(Completed(cached.encoded.usage, None, 0))
                return cached.encoded

            async def start(attempt: Attempt) -> Encoded:
                return await self.pipeline.encode(
                    msgspec.structs.replace(request, id=attempt.id, model=attempt.step.model),
                    self.principal,
                    on_admit=on_admit,
                    on_complete=run.completing(on_complete),
                    attempt=run.context(attempt),
                    card=attempt.step.card,
                )

            encoded = await run.attempt(start)
            run.answered(digest=digest, encoded=encoded)
            return encoded

    async def transcribe(
        self, request: SpeechRequest, on_admit: OnAdmit | None = None, on_complete: OnComplete | None = None
    ) -> Transcript:
        """Transcribe speech, as `Service.transcribe` does."""

        async def start(attempt: Attempt, completing: OnComplete, context: AttemptContext) -> Transcript:
            asked = msgspec.structs.replace(request, id=attempt.id, model=attempt.step.model)
            return await self.pipeline.transcribe(
                asked,
                self.principal,
                on_admit=on_admit,
                on_complete=completing,
                attempt=context,
                card=attempt.step.card,
            )

        texts = (request.prompt,)
        return await self.whole(request.id, request.model, request.api, request.session, start, on_complete, texts)

    async def make_media(
        self, request: MediaRequest, on_admit: OnAdmit | None = None, on_complete: OnComplete | None = None
    ) -> Media:
        """Make images, speech or video, as `Service.make_media` does."""

        async def start(attempt: Attempt, completing: OnComplete, context: AttemptContext) -> Media:
            asked = msgspec.structs.replace(request, id=attempt.id, model=attempt.step.model)
            return await self.pipeline.make_media(
                asked,
                self.principal,
                on_admit=on_admit,
                on_complete=completing,
                attempt=context,
                card=attempt.step.card,
            )

        texts = [value for value in request.fields.values() if isinstance(value, str)]
        return await self.whole(request.id, request.model, request.api, request.session, start, on_complete, texts)

    async def whole(
        self,
        request_id: str,
        model: str,
        api: str,
        session: str | None,
        start: Callable[[Attempt, OnComplete, AttemptContext], Awaitable[T]],
        on_complete: OnComplete | None = None,
        texts: Sequence[str] = (),
    ) -> T:
        """A request of any other kind, whose result comes whole and is not cached. `texts`: for the guardrails."""
        with self._request(request_id, model, api) as run:
            run.begin(self.take_plan(model, session, request_id))
            await run.moderator.check_texts(texts)
            completing = run.completing(on_complete)
            found = await run.attempt(lambda attempt: start(attempt, completing, run.context(attempt)))
            run.answered()
            return found

    def _request(self, request_id: str, model: str, api: str) -> "_Request":
        run = self._open
        if run is None:
            log_id = self._log_id if not self._n_requests else f"{self._log_id}-{self._n_requests + 1}"
            run = _Request(self, log_id, request_id, model, api)
            self._n_requests += 1
        self._shown = self._shown or run
        self._open = None
        return run

    def keep_open(self, run: "_Request") -> None:
        """A step of a universal request has failed; the next one goes on with its log row."""
        self._open = run

    def log_failure(self, error: EmberlineError) -> None:
        """The last step of a universal request could not even be asked: the log row ends with that."""
        if (run := self._open) is not None:
            self._open = None
            run.fail(error)
            run.log()


def open_call(
    owner: GatewayService,
    options: GatewayOptions,
    principal: Principal,
    pipeline: Pipeline,
    log_id: str,
    gateway: str = "",
) -> GatewayCall:
    """GatewayNotFound where the account has no such gateway."""
    account, name = principal.account, gateway or options.id
    settings, floor = owner.settings.find(account, name), owner.settings.floor(account, name)
    return GatewayCall(owner, settings, options, principal, pipeline, log_id, floor)


class _Request:
    """One request and its log row, which is written when it is left."""

    def __init__(self, call: GatewayCall, log_id: str, request_id: str, model: str, api: str) -> None:
        self._call = call
        self._plan = Plan(())
        self._is_answered = False
        self._began_s = time.monotonic()
        self._attempts = Attempts(request_id, call.principal.account, call.owner.breakers)
        self.moderator = Moderator(call.settings, call.pipeline, call.principal, request_id, call.own_key)
        self.row = LogRow(
            id=log_id,
            account=call.principal.account,
            gateway=call.settings.name,
            created_us=time.time_ns() // 1000,
            key_id=call.principal.key_id,
            api=api,
            requested=model,
            event_id=call.options.event_id or "",
        )

    def begin(self, models: Plan) -> None:
        self._plan = models
        account, gateway = self._call.principal.account, self._call.settings.name
        for counter in models.rates:
            self._call.owner.counters.add(account, gateway, counter, 1)

    # --- the cache ---------------------------------------------------------------------------------------------------

    def digest(self, request: GenerateRequest | EncodeRequest) -> str:
        """The key of the request's reply in the cache. The guardrails, routes and fallbacks of the gateway are part of
        it, and the models that aliases stand for: a reply that other rules let through is not served."""
        call, settings = self._call, self._call.settings
        models = [self._model_id(model) for model in self._plan.models]
        judges = [self._model_id(rule.model) for rule in settings.guardrails if rule.model]
        rules = msgspec.json.encode(
            [settings.guardrails, judges, settings.routes, settings.fallbacks], order="deterministic"
        )
        return request_digest(call.principal.account, settings.name, models, request, call.options.cache_key, rules)

    def _model_id(self, model: str) -> str:
        """The id of the model that a name stands for; the name itself if there is none, as a fallback may answer."""
        try:
            return self._call.card(model, self._plan.caller).id
        except EmberlineError:
            return model

    async def cached(self, digest: str) -> CachedReply | None:
        """A reply from the cache, if the caller may use its model."""
        call = self._call
        found = await call.owner.cache.get(call.principal.account, digest)
        if found is not None and not self._may_use(found.model):
            found = None
        self.row.cache_status = "MISS" if found is None else "HIT"
        if found is not None:
            self._is_answered = True
            usage = found.answer.usage if found.answer is not None else Usage()
            self._take(usage, 0)
            self.row.model, self.row.provider = found.model, found.provider
            self.row.ttft_us = self._elapsed_us()
            if found.answer is not None and call.logs_content:
                self.row.response = _text(found.answer)
        return found

    def _may_use(self, model: str) -> bool:
        models = self._call.pipeline.models
        try:
            models.check_scope(models.find(model), self._call.principal)
        except EmberlineError:  # also if the model is gone
            return False
        return True

    # --- attempts ----------------------------------------------------------------------------------------------------

    async def attempt(self, start: Callable[[Attempt], Awaitable[T]]) -> T:
        call, last = self._call, len(self._plan.models) - 1
        policy = call.retry_policy
        for number, model in enumerate(self._plan.models):
            self.row.model, self.row.provider, self.row.step = model, "", call.first_step + number
            try:
                step = self._step(model, self.row.step)
                self.row.model, self.row.provider = step.model, step.provider
                found = await self._attempts.begin(step, policy, start)
                self.row.ttft_us = self._elapsed_us()
                return found
            except EmberlineError as error:
                if number == last or not tries_next(error):
                    raise
        raise AssertionError("a plan has a model")

    def _step(self, model: str, number: int) -> PlanStep:
        """Raises ModelNotFound if there is no such model."""
        pipeline, card = self._call.pipeline, self._call.card(model, self._plan.caller)
        is_upstream = pipeline.models.is_upstream(card)
        return PlanStep(card, pipeline.upstream.provider_of(card) if is_upstream else LOCAL, number)

    def context(self, attempt: Attempt, bills_failure: bool = True) -> AttemptContext:
        """Make the context of an attempt. Our own fleets move a request between their workers; a provider has one,
        which is asked again by us. Only the operator's timeout makes an attempt free."""
        call, max_failovers = self._call, None
        if attempt.step.provider != LOCAL:
            max_failovers = call.pipeline.upstream.n_servers(attempt.step.card) - 1
        timed_out = attempt.timed_out if is_operators_timeout(call.retry_policy, call.floor) else never
        return AttemptContext(
            is_retry=attempt.is_retry,
            max_failovers=max_failovers,
            bills_failure=bills_failure,
            on_began=attempt.on_began,
            timed_out=timed_out,
            on_end=self._count,
            own_key=call.own_key,
        )

    def admitting(self, on_admit: OnAdmit | None) -> OnAdmit:
        def admit(rate_limits: RateLimits | None) -> None:
            self._attempts.was_admitted = True
            if on_admit is not None:
                on_admit(rate_limits)

        return admit

    def completing(self, on_complete: OnComplete | None) -> OnComplete:
        def complete(completed: Completed) -> None:
            self._take(completed.usage, completed.cost_pico)
            if on_complete is not None:
                on_complete(completed)

        return complete

    def _take(self, usage: Usage, cost_pico: int | None) -> None:
        """Log what an answer used. The client's own cost replaces the price in the log, and nowhere else."""
        row = self.row
        row.input_tokens, row.output_tokens = usage.prompt_tokens, usage.completion_tokens
        row.cached_tokens, row.cost_pico = usage.cached_tokens, cost_pico
        if (custom := self._call.options.custom_cost) is not None and row.cache_status != "HIT":
            row.cost_pico = custom.cost_pico(usage.prompt_tokens, usage.completion_tokens)

    def _count(self, row: UsageRow) -> None:
        """Count what an attempt cost, finished or not, for the budgets of the route that chose its model."""
        call, cost_pico = self._call, row.cost_pico
        if call.settings.custom_cost_counts and (custom := call.options.custom_cost) is not None:
            cost_pico = custom.cost_pico(row.input_tokens, row.output_tokens)
        for counter in self._plan.budgets:
            call.owner.counters.add(row.account, call.settings.name, counter, cost_pico or 0)

    def answered(self, answer: Answer | None = None, digest: str = "", encoded: Encoded | None = None) -> None:
        """The reply is complete, whether or not the client reads its last byte: it is cached, if that was asked for."""
        call, row = self._call, self.row
        self._is_answered = True
        if answer is not None and call.logs_content:
            row.response = _text(answer)
        if digest and (answer is not None or encoded is not None):
            expires_us = time.time_ns() // 1000 + call.ttl_s * 1_000_000
            reply = CachedReply(
                answer=answer, encoded=encoded, model=row.model, provider=row.provider, expires_us=expires_us
            )
            call.owner.cache.put(row.account, digest, reply)

    # --- its end -----------------------------------------------------------------------------------------------------

    def __enter__(self) -> "_Request":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        row, call = self.row, self._call
        if self._is_answered and not isinstance(error, Exception):
            error = None  # nobody reads behind the last event
        self._attempts.ended(error)
        told: EmberlineError | None = None
        if isinstance(error, EmberlineError):
            if call.has_next_step and tries_next(error) and row.ttft_us is None:
                call.keep_open(self)
                return
            told = self.fail(error)
        elif error is not None:
            row.status = "error" if isinstance(error, Exception) else "cancelled"
            row.error = "internal" if isinstance(error, Exception) else ""
        self.log()
        if told is not None and told is not error:
            raise told from error

    def fail(self, error: EmberlineError) -> EmberlineError:
        """Note the failure in the log row. Returns the error for the client."""
        told = final_error(error, len(self._attempts.made))
        self.row.status, self.row.error, self.row.message = "error", told.kind, told.message
        return told

    def log(self) -> None:
        row, call = self.row, self._call
        if not call.collects_log:
            return
        row.duration_us = self._elapsed_us()
        if call.options.metadata:
            row.metadata = msgspec.json.encode(call.options.metadata).decode()
        if self._attempts.made:
            row.attempts = msgspec.json.encode(self._attempts.made).decode()
        if self.moderator.flags:
            row.flags = msgspec.json.encode(self.moderator.flags).decode()
        call.owner.logs.add(row)

    def _elapsed_us(self) -> int:
        return int((time.monotonic() - self._began_s) * 1e6)


class _Reply:
    """The events of an answer on their way to the client: checked by the guardrails, collected where it is needed."""

    def __init__(self, call: GatewayCall, run: _Request, n_choices: int, digest: str) -> None:
        """`digest`: under which it is cached; empty: it is not."""
        rules = run.moderator.reply_rules
        self._run = run
        self._digest = digest
        self._moderator = run.moderator
        self._held = HeldReply(any(rule.hold == "whole" for rule in rules)) if rules else None
        collects = call.ttl_s or call.logs_content
        self._choices = [ChoiceCollector() for _ in range(n_choices)] if collects else []
        self._usage = Usage()

    async def checked(
        self, first: TextEvent, events: AsyncGenerator[TextEvent, None]
    ) -> AsyncGenerator[TextEvent, None]:
        for event in await self._pass(first):
            yield event
        async for event in events:
            if type(event) is Completed:
                self._usage = event.usage
                if self._held is not None:
                    for held in await self._release(self._held):
                        yield held
                self._run.answered(self._answer(), self._digest)
                yield event
            elif self._held is None and not self._choices:
                yield event
            else:
                for passed in await self._pass(event):
                    yield passed

    async def _pass(self, event: TextEvent) -> Sequence[TextEvent]:
        if self._choices and not isinstance(event, Started | Completed):
            self._choices[event.index].add(event)
        if self._held is None:
            return (event,)
        text = self._held.add(event)
        return () if text is None else await self._release(self._held)

    async def _release(self, held: HeldReply) -> Sequence[TextEvent]:
        await self._moderator.check_reply(held.text())
        return held.take()

    def _answer(self) -> Answer | None:
        return Answer([choice.choice() for choice in self._choices], self._usage) if self._choices else None


def replay(answer: Answer, on_complete: OnComplete | None) -> list[TextEvent]:
    """The events of a cached reply, which costs nothing."""
    completed = Completed(msgspec.structs.replace(answer.usage, cost=None), None, 0)
    if on_complete is not None:
        on_complete(completed)
    return [Started(answer.usage), *events_of(answer), completed]


async def _first_of(items: AsyncGenerator[Any, None]) -> Any:
    """Closes them if there is none."""
    try:
        return await anext(items)
    except BaseException:
        await items.aclose()
        raise


def _text(answer: Answer) -> str:
    return shortened(msgspec.json.encode(answer.choices).decode())
