"""The pipeline: resolve the model, render and tokenize, get workers, turn their output into events, finalize."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from emberline.catalog.aliases import AliasTable
from emberline.catalog.model_card import ModelCard
from emberline.cluster.cluster import ClusterStatus
from emberline.cluster.engine_client import EngineClient
from emberline.cluster.membership import WorkerChange
from emberline.cluster.served_models import Served, ServedModels
from emberline.cluster.timings import DEFAULTS, Timings
from emberline.net.periodic import every
from emberline.protocol.complete_response import Encoded
from emberline.protocol.errors import EmberlineError, Unavailable, Unsupported
from emberline.protocol.events import Completed, TextEvent
from emberline.protocol.frames import EngineInfo
from emberline.protocol.media import Media, MediaRequest
from emberline.protocol.member import Challenge, Signed
from emberline.protocol.rate_limits import RateLimits
from emberline.protocol.request import EncodeRequest, GenerateRequest, Principal, SpeechRequest, alias_caller
from emberline.protocol.route_request import RouteRequest, route_request
from emberline.protocol.speech import Transcript
from emberline.service import kv_cache
from emberline.service.core import CoreAccess
from emberline.service.encode import EncodeCall, prepare_encoding, text_bytes
from emberline.service.engine_transport import EngineTransport
from emberline.service.event_log import EventLogs
from emberline.service.models import Models
from emberline.service.prepare import Preparer
from emberline.service.request_run import RequestRun, Transport
from emberline.service.responses import ResponseStore
from emberline.service.transcribe import SpeechCall, speech_route
from emberline.service.validation import validate
from emberline.telemetry.health import Health
from emberline.telemetry.metrics import INTER_TOKEN_BOUNDS_S, Counts, Histogram
from emberline.telemetry.request_log import ONLY_ATTEMPT, AttemptContext, Clock, JobContext, route_terms
from emberline.telemetry.status import Status, StatusQuery
from emberline.text.grammar.compiler_pool import GrammarCompiler
from emberline.text.text_model import TextModel
from emberline.upstream.dialects.anthropic_relay import MessageAssembler
from emberline.upstream.dialects.chunks import BodyAssembler, ChunkReader
from emberline.upstream.dialects.dialect import MESSAGES
from emberline.upstream.models import UpstreamModels
from emberline.upstream.providers.whole_call import WholeCall
from emberline.upstream.target import Target
from emberline.upstream.transport import UpstreamTransport, passthrough
from emberline.upstream.upstream_request import UpstreamRequest

_ANY_VOCABULARY = 1 << 31  # upstream servers check token ids themselves

T = TypeVar("T")
AnyRequest = TypeVar("AnyRequest", GenerateRequest, EncodeRequest, SpeechRequest, MediaRequest)

log = logging.getLogger("emberline.request")


class Service:
    """Serves models on workers, whose connections it owns. Made by `open_service` and `open_http_worker`."""

    def __init__(
        self,
        core: CoreAccess,
        served: ServedModels,
        engines: Mapping[str, EngineClient],
        close_core: Callable[[], Awaitable[None]],
        grammars: GrammarCompiler,
        upstream: UpstreamModels | None = None,
        data_dir: Path | None = None,
        timings: Timings = DEFAULTS,
    ) -> None:
        self.core = core
        self._timings = timings
        self._exchange = None if data_dir is None else data_dir / kv_cache.FOLDER
        self.upstream = upstream if upstream is not None else UpstreamModels(())
        self._served = served
        self.models = Models(served, self.upstream, core.aliases)
        self.engines = engines  # by endpoint name
        self._close_core = close_core
        self._grammars = grammars
        self._preparer = Preparer(core, grammars)
        self._running: set[RequestRun[Any]] = set()  # not yet finalized
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        for engine in engines.values():
            engine.start()
        checkpoints = every(timings.checkpoint_s, self._send_checkpoint, log, "usage so far was not told to the core")
        self._checkpoints = asyncio.create_task(checkpoints)

    # --- queries -----------------------------------------------------------------------------------------------------

    @property
    def aliases(self) -> AliasTable:
        return self.core.aliases.table

    async def change_alias(self, name: str, targets: Mapping[str, int] | None) -> None:
        """Set an alias, or remove it; in effect in every HTTP worker once this returns, and after a restart."""
        if targets is not None:
            self.models.check_alias(name, targets)
        await self.core.operations.change_alias(name, targets)

    async def count_tokens(self, request: GenerateRequest, principal: Principal, target: Target | None = None) -> int:
        """Tokens of the prompt as `generate` would build it; no engine of ours is asked."""
        target = target or self._target(request, principal, None)
        if target.is_upstream:
            return await self.upstream.count_tokens(request, target)
        return await self._preparer.count(request, await self._served.get(target.card))

    def _target(
        self, request: AnyRequest, principal: Principal, card: ModelCard | None, attempt: AttemptContext | None = None
    ) -> Target:
        """The request's model as the principal may use it. A name that was not looked up yet, as a job's, is now."""
        if card is None:
            card = self.models.find(request.model, alias_caller(principal.account, request.session, request.id))
        return self.models.target(card, principal, None if attempt is None else attempt.own_key)

    @property
    def responses(self) -> ResponseStore:
        """Stored responses, for later requests to continue."""
        return self.core.responses

    @property
    def event_logs(self) -> EventLogs:
        return self.core.event_logs

    async def health(self) -> Health:
        """Not ok without the core, and while draining, so that load balancers send their requests elsewhere."""
        try:
            health = await self.core.operations.health()
        except Unavailable as error:
            health = Health(False, {"core": error.message})
        return Health(health.ok and not self._draining, {**health.detail, "draining": self._draining})

    async def metrics(self) -> bytes:
        return await self.core.operations.metrics()

    async def status(self, query: StatusQuery) -> Status:
        """Status of the whole server, for its operator."""
        found = await self.core.operations.status(query)
        found.ok &= not self._draining
        return found

    async def refresh_prices(self) -> None:
        await self.core.operations.refresh_prices()

    async def change_workers(self, change: WorkerChange) -> list[str]:
        """Workers join, leave or drain; returns their names."""
        return await self.core.cluster_admin.change_workers(change)

    async def join_challenge(self) -> Challenge:
        return await self.core.cluster_admin.join_challenge()

    async def announce(self, signed: Signed) -> Signed:
        """A worker announces itself to the cluster."""
        return await self.core.cluster_admin.announce(signed)

    async def cluster_status(self) -> ClusterStatus:
        return await self.core.cluster_admin.cluster_status()

    async def scaling_plan(self, model: str, limit: int) -> dict[str, Any]:
        """Observations and actions of the planner, with its reasons."""
        return await self.core.cluster_admin.scaling_plan(model, limit)

    async def set_scaling_bounds(self, model: str, changes: dict[str, Any] | None) -> dict[str, Any] | None:
        return await self.core.cluster_admin.set_scaling_bounds(model, changes)

    @property
    def kv_cache(self) -> kv_cache.KVCacheAdmin:
        """Cached KV of the engine workers, for its owners and the operator."""
        return kv_cache.KVCacheAdmin(list(self.engines.values()), self._exchange)

    async def load_model(self, model_id: str, action: Literal["load", "unload"]) -> ModelCard:
        """Load or unload a model of ours, as an operator asks; returns when it is done."""
        if self.models.is_upstream(card := self.models.find(model_id)):
            raise self._served.not_found(card.id)
        await self.core.operations.load_model(card.id, action)
        return card

    @property
    def n_running(self) -> int:
        """Number of requests that are not finalized yet."""
        return len(self._running)

    # --- lifecycle ---------------------------------------------------------------------------------------------------

    async def ready(self, timeout_s: float) -> bool:
        """Wait until every configured engine is connected; members of a cluster may be away for long."""
        names = {endpoint.name for item in self._served.known() for endpoint in item.endpoints}
        waits = [engine.wait_connected(timeout_s) for name, engine in self.engines.items() if name in names]
        return all(await asyncio.gather(*waits))

    async def warm_up(self) -> None:
        """Prepare what only requests with grammars need, so that the first of them need not wait for it."""
        await self._grammars.start()
        for item in self._served.known():
            if not isinstance(item.tokenizer, TextModel):
                continue
            await self._preparer.load_vocabulary(item.tokenizer)
            for engine in self._engines_of(item):
                engine.send_vocabulary()

    async def drain(self, limit_s: float) -> None:
        """Refuse new requests; return when the running ones are finalized, or after `limit_s`."""
        self._draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), limit_s)
        except TimeoutError:
            log.warning("%d requests still run after %g s", len(self._running), limit_s)

    async def close(self) -> None:
        """Cut the connections to all workers, finalize the requests that this ends, then close the core."""
        self._draining = True
        engines = self.engines.values()
        await asyncio.gather(*(engine.close(server_ends=True) for engine in engines), self.upstream.close())
        await self.drain(self._timings.close_wait_s)
        stopping = Unavailable("the server is shutting down")
        for run in tuple(self._running):  # whose consumers do not read, so they cannot end by themselves
            run.finalize("finished" if run.done else "failed", stopping)
        finalizing = [run.finalizing for run in self._running if run.finalizing is not None]
        await asyncio.gather(*finalizing, return_exceptions=True)
        self._checkpoints.cancel()
        await self._preparer.close()
        await self._grammars.close()
        await self._close_core()

    # --- the pipeline ------------------------------------------------------------------------------------------------

    async def generate(
        self,
        request: GenerateRequest,
        principal: Principal,
        job: JobContext | None = None,
        on_admit: Callable[[RateLimits | None], None] | None = None,
        on_complete: Callable[[Completed], None] | None = None,
        attempt: AttemptContext | None = None,
        card: ModelCard | None = None,
    ) -> AsyncGenerator[TextEvent, None]:
        """Started, deltas, a ChoiceDone per choice, Completed. A request that is refused raises before the first event.

        Once admitted, a request ends in one way, with one usage row: finished, failed, or cancelled by `aclose`.
        A job's owner writes the row itself. `on_admit` is called with the caller's rate limits, before the first event;
        `on_complete` with the terminal event, before it is yielded. `attempt` is a gateway's. `card` is that of the
        request's model, if its name was looked up already.
        """
        with self._accepting(request.id):
            target = self._target(request, principal, card, attempt)
            run, remember = await self._start(request, target, principal, job, attempt)
        if on_admit is not None:
            on_admit(run.route.rate_limits)
        async with run:
            while not run.done:
                for event in await run.step():
                    yield event
            await run.finish()
        remember()
        completed = run.completed
        if on_complete is not None:
            on_complete(completed)
        yield completed

    async def forward(
        self,
        request: UpstreamRequest,
        on_admit: Callable[[RateLimits | None], None] | None = None,
        on_complete: Callable[[Completed], None] | None = None,
        attempt: AttemptContext | None = None,
    ) -> AsyncGenerator[tuple[bytes, bool], None]:
        """The SSE lines of an upstream server nearly untouched, or one whole body if the client wants no stream.

        The flag marks the last item. It is yielded once the usage row is durable.
        """
        with self._accepting(request.route.id):
            assembler = MessageAssembler if request.path == MESSAGES else BodyAssembler
            make_decoder = (lambda: passthrough) if request.stream else assembler
            transport = UpstreamTransport(request, self.upstream.clients, make_decoder)
            run = await self._admit(request.route, transport, Clock(), attempt=attempt)
        if on_admit is not None:
            on_admit(run.route.rate_limits)
        async with run:
            while not transport.done:
                block = await run.step()
                if transport.done:
                    await run.finish()
                    if on_complete is not None:
                        on_complete(run.completed)
                    yield block, True
                elif block:
                    yield block, False
                elif transport.began and attempt is not None and attempt.on_began is not None:
                    attempt.on_began()

    async def encode(
        self,
        request: EncodeRequest,
        principal: Principal,
        job: JobContext | None = None,
        *,
        on_admit: Callable[[RateLimits | None], None] | None = None,
        on_complete: Callable[[Completed], None] | None = None,
        attempt: AttemptContext | None = None,
        card: ModelCard | None = None,
    ) -> Encoded:
        """The vectors, scores or labels of the request's texts. It ends in one way, as `generate` does."""
        with self._accepting(request.id):
            clock = Clock()
            target = self._target(request, principal, card, attempt)
            call: EncodeCall | WholeCall[Encoded]
            if target.is_upstream:
                route, call = self.upstream.whole_call(request, target, principal, route_terms(request, clock, job))
            else:
                served = await self._served.get(target.card)
                prepared = await self._preparer.run_off_loop(
                    text_bytes(request), lambda: prepare_encoding(request, principal, served, self._info(served), clock)
                )
                route, call = prepared.route(job), EncodeCall(prepared, self.engines, job, self._timings)
            run = await self._admit(route, call, clock, job, attempt=attempt)
        completed = await _complete(run, on_admit, on_complete)
        result = call.result()
        if on_complete is not None:
            result.usage = completed.usage
        return result

    async def transcribe(
        self,
        request: SpeechRequest,
        principal: Principal,
        *,
        on_admit: Callable[[RateLimits | None], None] | None = None,
        on_complete: Callable[[Completed], None] | None = None,
        attempt: AttemptContext | None = None,
        card: ModelCard | None = None,
    ) -> Transcript:
        """The text of recorded speech. It ends in one way, as `generate` does."""
        with self._accepting(request.id):
            clock = Clock()
            target = self._target(request, principal, card, attempt)
            call: SpeechCall | WholeCall[Transcript]
            if target.is_upstream:
                route, call = self.upstream.whole_call(request, target, principal, route_terms(request, clock))
            else:
                served = await self._served.get(target.card)
                served.check_speech()
                info = msgspec.structs.replace(self._info(served), model=served.card.id)
                route, call = (
                    speech_route(request, principal, info, clock),
                    SpeechCall(request, self.engines, self._timings),
                )
            run = await self._admit(route, call, clock, attempt=attempt)
        await _complete(run, on_admit, on_complete)
        return call.result()

    async def make_media(
        self,
        request: MediaRequest,
        principal: Principal,
        *,
        on_admit: Callable[[RateLimits | None], None] | None = None,
        on_complete: Callable[[Completed], None] | None = None,
        attempt: AttemptContext | None = None,
        card: ModelCard | None = None,
    ) -> Media:
        """Images, speech or video, made by a provider. It ends in one way, as `generate` does."""
        with self._accepting(request.id):
            clock = Clock()
            target = self._target(request, principal, card, attempt)
            if not target.is_upstream:
                message = f"{request.model} makes no images, speech or video: models of providers do"
                raise Unsupported(message, param="model")
            route, call = self.upstream.whole_call(request, target, principal, route_terms(request, clock))
            run = await self._admit(route, call, clock, attempt=attempt)
        await _complete(run, on_admit, on_complete)
        media: Media = call.result()
        return media

    @contextmanager
    def _accepting(self, request_id: str) -> Iterator[None]:
        """Refuses requests while draining, and counts all that are refused inside it."""
        try:
            if self._draining:
                raise Unavailable("the server is shutting down", retry_after_s=5)
            yield
        except EmberlineError as error:
            self.core.refused(error.kind)
            log.info("refused: %s", error.message, extra={"request_id": request_id, "error": error.kind})
            raise

    async def _start(
        self,
        request: GenerateRequest,
        target: Target,
        principal: Principal,
        job: JobContext | None,
        attempt: AttemptContext | None,
    ) -> tuple[RequestRun[list[TextEvent]], Callable[[], None]]:
        """Returns an admitted run, and what remembers the conversation once the run is done."""
        clock = Clock()
        if target.is_upstream:
            validate(request, _ANY_VOCABULARY)
            sent = await self.upstream.upstream_request(request, target, principal, route_terms(request, clock, job))
            reader = ChunkReader(request.n, request.sampling.stop, sent.route.input_tokens)
            upstream = UpstreamTransport(sent, self.upstream.clients, lambda: reader)
            return await self._admit(sent.route, upstream, clock, job, attempt=attempt), _nothing
        served = await self._served.get(target.card)
        prepared = await self._preparer.prepare(request, principal, served, self._info(served), clock)
        inter_token = Histogram(INTER_TOKEN_BOUNDS_S)
        engine = EngineTransport(prepared, self.engines, inter_token, job, self._timings)
        route = route_request(
            route_terms(request, clock, job),
            principal,
            served.card.id,
            prepared.info.fingerprint,
            input_tokens=prepared.prompt.n_ids,
            keys=prepared.keys,
            max_tokens=prepared.sampling.max_tokens or 0,
        )
        run = await self._admit(route, engine, clock, job, inter_token.counts, attempt)
        # No later request continues a job's conversation.
        return run, _nothing if job is not None else lambda: self._preparer.remember(prepared, engine.replies)

    async def _admit(
        self,
        request: RouteRequest,
        transport: Transport[T],
        clock: Clock,
        job: JobContext | None = None,
        inter_token: Counts | None = None,
        attempt: AttemptContext | None = None,
    ) -> RequestRun[T]:
        attempt = attempt or ONLY_ATTEMPT
        if attempt.is_retry:
            request = msgspec.structs.replace(request, is_retry=True)
        run = RequestRun(request, transport, self.core, clock, self._ended, job, inter_token, attempt)
        self._running.add(run)
        self._idle.clear()
        await run.admit()
        return run

    def runs_on_provider(self, name: str) -> bool:
        """True if a request of this process, running or waiting, is for a model of the provider."""
        return any(run.model.startswith(f"{name}/") for run in self._running)

    def _ended(self, run: RequestRun[Any]) -> None:
        self._running.discard(run)
        if not self._running:
            self._idle.set()

    def _send_checkpoint(self) -> None:
        """Tell the core what running requests have used, so that it is known should this process or the core die."""
        if rows := [row for run in self._running if (row := run.checkpoint()) is not None]:
            self.core.checkpoint(rows)

    def _info(self, served: Served) -> EngineInfo:
        for engine in self._engines_of(served):
            if engine.info is not None:
                return engine.info
        if served.info is not None:  # it may be loaded for this request
            return served.info
        raise Unavailable(f"{served.card.id} is not ready: no engine has connected yet", retry_after_s=2)

    def _engines_of(self, served: Served) -> list[EngineClient]:
        return [engine for engine in self.engines.values() if served.card.id in engine.endpoint.models]


def _nothing() -> None:
    """Remember nothing."""


async def _complete(
    run: RequestRun[Any],
    on_admit: Callable[[RateLimits | None], None] | None,
    on_complete: Callable[[Completed], None] | None,
) -> Completed:
    """Run a request whose result comes whole, to its end."""
    if on_admit is not None:
        on_admit(run.route.rate_limits)
    async with run:
        while not run.done:
            await run.step()
        await run.finish()
    completed = run.completed
    if on_complete is not None:
        on_complete(completed)
    return completed
