"""The pipeline that every task passes, whichever API or queue it came by: stages, admission, output, the usage row."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

import msgspec

from emberline.catalog.model_card import ModelCard
from emberline.images.request_images import RequestImages
from emberline.protocol.complete_response import Encoded
from emberline.protocol.errors import BadInput, EmberlineError, Unavailable, Unsupported
from emberline.protocol.events import Completed, Cost, TextEvent
from emberline.protocol.request import GenerateRequest, PredictRequest, Principal, alias_caller
from emberline.service import tokenization
from emberline.service.core import Core
from emberline.service.engine_tasks import EngineTasks, Prepared
from emberline.service.in_flight import InFlight
from emberline.service.models import Models
from emberline.service.request_run import RequestRun
from emberline.service.validation import validate
from emberline.service.work import Begun, RelayRequest, Stage, Tap, Task, TaskEvents, Work
from emberline.telemetry.request_log import AttemptContext, Clock, route_terms
from emberline.text.text_model import TextModel
from emberline.upstream.dialects.anthropic_relay import MessageAssembler
from emberline.upstream.dialects.chunks import BodyAssembler, ChunkReader
from emberline.upstream.dialects.dialect import MESSAGES
from emberline.upstream.models import UpstreamModels
from emberline.upstream.target import Target
from emberline.upstream.transport import UpstreamTransport
from emberline.upstream.upstream_request import LinkedImages, UpstreamRequest

_ANY_VOCABULARY = 1 << 31  # upstream servers check token ids themselves

T = TypeVar("T")

log = logging.getLogger("emberline.request")


class Pipeline:
    """Runs tasks on our engine workers, on upstream servers and at providers."""

    def __init__(
        self,
        core: Core,
        models: Models,
        engines: EngineTasks,
        upstream: UpstreamModels,
        in_flight: InFlight,
        images: RequestImages | None = None,
    ) -> None:
        self._core = core
        self._images = images
        self._models = models
        self._engines = engines
        self._upstream = upstream
        self._in_flight = in_flight

    async def run(self, work: Work) -> TaskEvents:
        """Run a task to its end: finished, failed, or cancelled by `aclose`. A refusal raises before the first item.

        Once admitted, a task ends in one way, with one usage row; a job's owner writes the row itself. The row is
        durable before the terminal event, and before the last bytes of a relayed reply.
        """
        begun: list[Stage] = []
        try:
            for stage in work.stages:
                begun.append(stage)
                await stage.begin(work)
            if work.replay is not None:
                work.is_done = True  # nothing is left to compute: a client that leaves has had its answer
                for event in work.replay:
                    if type(event) is Completed:
                        work.completed = event
                        if work.wants_cost:
                            _state_cost(event)
                    yield event
            else:
                if work.attempts is None:
                    run, transport, output, result = await self._start(work, work.card, work.attempt)
                else:
                    run, transport, output, result = await work.attempts(partial(self._start, work))
                is_relayed, taps, step = type(work.task) is RelayRequest, work.taps, run.step
                async with run:
                    while True:
                        is_done = transport.done
                        if is_relayed:
                            if is_done:
                                break
                            if output:
                                yield output
                        elif taps:
                            for event in output or ():
                                try:
                                    passed = await _tapped(taps, event)
                                except Exception:  # what was computed of a reply that a rule ends is paid
                                    await asyncio.shield(run.finalize("finished" if is_done else "cancelled"))
                                    raise
                                for one in passed:
                                    yield one
                        else:
                            for event in output or ():
                                yield event
                        if is_done:
                            break
                        output = await step()
                    await run.finish()
                completed = run.completed
                completed.result = output if is_relayed else result()
                work.completed = completed
                if work.wants_cost:
                    _state_cost(completed)
                if isinstance(completed.result, Encoded):
                    completed.result.usage = completed.usage
                if taps:
                    for event in (await _tapped(taps, completed))[:-1]:
                        yield event
                work.is_done = True
                yield completed
        except BaseException as error:
            if not begun:
                raise
            told = _end(work, begun, None if work.is_done and not isinstance(error, Exception) else error)
            if told is None or told is error:
                raise
            raise told from error
        if begun:
            _end(work, begun, None)

    async def count_tokens(self, request: GenerateRequest, principal: Principal, target: Target | None = None) -> int:
        """Count the tokens of the prompt as `run` would build it. No engine of ours is asked."""
        if target is None:
            caller = alias_caller(principal.account, request.session, request.id)
            target = self._models.target(self._models.find(request.model, principal.account, caller), principal)
        if target.is_upstream:
            return await self._upstream.count_tokens(await self._inlined(request, target, principal), target)
        return await self._engines.count_tokens(request, principal, target)

    async def tokenize(
        self, request: GenerateRequest, target: Target, special: bool, entries: bool
    ) -> tokenization.TokenizedPrompt:
        """Tokenize the prompt of a request (`tokenization.tokenize`)."""
        return await tokenization.tokenize(self, request, target, special, entries)

    async def detokenize(self, ids: list[int], target: Target) -> str:
        """The text of token ids, special tokens included."""
        return await tokenization.detokenize(self, ids, target)

    async def tokenizer_info(self, target: Target) -> dict[str, str | None]:
        """The special tokens of a model by their names in chat templates, and its chat template."""
        return await tokenization.tokenizer_info(self, target)

    async def tokenizer(self, target: Target) -> tuple[TextModel, int]:
        """The tokenizer of a model, and the tokens that its context has. Raises Unsupported if it is not here."""
        if not target.is_upstream:
            return await self._engines.tokenizer(target)
        if (text := self._upstream.texts.get(target.card.id)) is None:
            raise tokenization.unknown_tokenizer(target.card.id)
        return text, target.card.context_window

    async def run_off_loop(self, n_bytes: int, work: Callable[[], T], renders: TextModel | None = None) -> T:
        """Do the work in a thread, if it would take the event loop too long (`Preparer.run_off_loop`)."""
        return await self._engines.run_off_loop(n_bytes, work, renders)

    async def _start(self, work: Work, card: ModelCard | None, attempt: AttemptContext) -> Begun:
        """Admit an attempt at the work and wait for its first output. An attempt that fails before is finalized."""
        task, clock, is_draining = work.task, Clock(), self._in_flight.is_draining
        # A body that must not be relayed is refused like one that cannot be decoded: its endpoint tells of it.
        is_counted = is_draining or type(task) is not RelayRequest
        try:
            if is_draining:
                raise Unavailable("the server is shutting down", retry_after_s=5)
            if card is None:  # as of a job, whose name was not looked up yet
                account = work.principal.account
                card = self._models.find(task.model, account, alias_caller(account, task.session, task.id))
            if attempt.id:
                task = msgspec.structs.replace(task, id=attempt.id, model=card.id)
            target = work.target or self._models.target(card, work.principal, work.own_key)
            prepared = await self._prepare(work, task, target, clock)
            route, transport, result, inter_token, work.ignores_reasoning = prepared
            is_counted = True
            if attempt.is_retry:
                route = msgspec.structs.replace(route, is_retry=True)
            ended = self._in_flight.ended
            run = RequestRun(route, transport, self._core, clock, ended, work.job, inter_token, attempt)
            self._in_flight.add(run)
            await run.admit()
        except EmberlineError as error:
            if is_counted:
                self._core.refused(error.kind)
                log.info("refused: %s", error.message, extra={"request_id": task.id, "error": error.kind})
            raise
        work.admitted_ns, work.rate_limits = time.monotonic_ns(), run.route.rate_limits
        output, step = None, run.step
        try:
            while not output and not transport.done:
                output = await step()
                if not output and transport.began and attempt.on_began is not None:
                    attempt.on_began()
        except BaseException as error:
            await run.__aexit__(type(error), error, error.__traceback__)
            raise
        return Begun(run, transport, output, result)

    async def _prepare(self, work: Work, task: Task, target: Target, clock: Clock) -> Prepared:
        clients = self._upstream.clients
        if isinstance(task, RelayRequest):
            sent = task.make(target, task.id)
            if sent.task is not None:
                sent.task = await self._inlined(sent.task, target, work.principal)
            if sent.linked is not None:
                await self._put_images(sent, sent.linked, work.principal)
            if task.canonical is not None and target.card.id in self._upstream.texts:
                with suppress(EmberlineError):  # not all that its server takes can be rendered here
                    sent.route = await self._upstream.with_token_keys(sent.route, task.canonical(), target)
            assembler = MessageAssembler if sent.path == MESSAGES else BodyAssembler
            return Prepared(sent.route, UpstreamTransport(sent, clients, None if sent.stream else assembler))
        if target.where == "engine":
            return await self._engines.prepare(task, target, work.principal, clock, work.job)
        terms = route_terms(task, clock, work.job)
        if isinstance(task, GenerateRequest):
            validate(task, _ANY_VOCABULARY)
            task = await self._inlined(task, target, work.principal)
            sent = await self._upstream.upstream_request(task, target, work.principal, terms)
            if sent.as_events:
                return Prepared(sent.route, UpstreamTransport(sent, clients))
            reader = ChunkReader(task.n, task.sampling.stop, sent.route.input_tokens)
            return Prepared(sent.route, UpstreamTransport(sent, clients, lambda: reader))
        if isinstance(task, PredictRequest):
            raise BadInput(f"{target.card.id} makes no predictions from inputs of its own", param="model")
        route, call = self._upstream.whole_call(task, target, work.principal, terms)
        return Prepared(route, call, call.result)

    async def _inlined(self, request: GenerateRequest, target: Target, principal: Principal) -> GenerateRequest:
        """The request with those images in it that the target's server cannot read, or must not fetch."""
        if self._images is None or not any(message.parts for message in request.messages or ()):
            return request
        return await self._images.inline(request, principal.account, fetches_itself=target.fetches_images)

    async def _put_images(self, sent: UpstreamRequest, linked: LinkedImages, principal: Principal) -> None:
        """Put the images that the client has named into a relayed body."""
        if self._images is None:
            first = linked.links[0]
            raise first.named(Unsupported("this server reads no images: send it as a data: URL"))
        urls = await self._images.data_urls(linked.links, principal.account)
        linked.put(sent.fields, urls)
        most = sent.route.max_input_tokens + sum(map(len, urls))
        sent.route = msgspec.structs.replace(sent.route, max_input_tokens=most)


async def _tapped(taps: Sequence[Tap], event: TextEvent) -> Sequence[TextEvent]:
    """Pass an event through all taps. Returns the events to hand out now."""
    events: Sequence[TextEvent] = (event,)
    for tap in taps:
        events = [passed for one in events for passed in await tap(one)]
    return events


def _state_cost(completed: Completed) -> None:
    """State the cost in the usage, for a client that wants to know it."""
    completed.usage = msgspec.structs.replace(completed.usage, cost=Cost(completed.cost_pico))


def _end(work: Work, begun: list[Stage], error: BaseException | None) -> BaseException | None:
    for stage in reversed(begun):
        error = stage.end(work, error)
    return error
