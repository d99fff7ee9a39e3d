"""The pipeline: resolve, render and tokenise, get an engine, turn its tokens into text, settle."""

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence

from emberline.accounts.usage_ledger import UsageStatus
from emberline.balancer.route_request import RouteRequest
from emberline.catalog.model_card import ModelCard
from emberline.protocol.errors import EmberlineError, Internal, MalformedModelId, ModelNotFound, Unavailable
from emberline.protocol.events import Completed, TextEvent
from emberline.protocol.frames import EngineInfo
from emberline.protocol.request import GenerateRequest, Principal
from emberline.service.core import Core, Memory, Settlement
from emberline.service.engine_client import EngineClient
from emberline.service.health import Health
from emberline.service.job_context import JobContext
from emberline.service.prepare import Prepared, Preparer, Served
from emberline.service.request_log import Clock, log_end
from emberline.service.responses import ResponseStore
from emberline.service.run import Placed, Run
from emberline.text.grammar.compiler import GrammarCompiler
from emberline.upstream.relay import Relay

_MODEL_ID = re.compile(r"@?[A-Za-z0-9][A-Za-z0-9._:+-]*(/[A-Za-z0-9][A-Za-z0-9._:+-]*)*")
_MODEL_ID_CHARS = 256
CLOSE_WAIT_S = 1.0  # for consumers of streams to notice that they were cut

log = logging.getLogger("emberline.request")


class Service:
    """Serves models out of engines, whose connections it owns. Made by `open_service` and `open_http_worker`."""

    def __init__(
        self,
        core: Core,
        served: Sequence[Served],
        engines: Mapping[str, EngineClient],
        close_core: Callable[[], Awaitable[None]],
        grammars: GrammarCompiler,
        relay: Relay | None = None,
    ) -> None:
        self.core = core
        self.relay = relay  # of models on other people's servers
        self._served = {item.card.id: item for item in served}
        self._names = {name.lower(): item for item in reversed(served) for name in (*item.card.aliases, item.card.id)}
        self._engines = engines  # by endpoint name
        self._close_core = close_core
        self._grammars = grammars
        self._preparer = Preparer(core, grammars)
        self._running: set[Run] = set()
        self._settling: set[asyncio.Task[None]] = set()
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        for engine in engines.values():
            engine.start()

    # --- what doors ask ----------------------------------------------------------------------------------------------

    def models(self) -> list[ModelCard]:
        elsewhere = self.relay.models() if self.relay is not None else ()
        return [*(item.card for item in self._served.values()), *elsewhere]

    def relayed(self, model_id: str) -> ModelCard | None:
        """The card of a model that other people's servers compute; of two with one name, ours counts."""
        if self.relay is None or model_id.lower() in self._names:
            return None
        return self.relay.find(model_id)

    def resolve(self, model_id: str) -> ModelCard:
        """The card of a model by id or alias, in any case of letters."""
        return self.relayed(model_id) or self._resolve(model_id).card

    async def count_tokens(self, request: GenerateRequest, principal: Principal) -> int:
        """Tokens of the prompt as `generate` would build it; no engine of ours is asked."""
        if self.relay is not None and self.relayed(request.model):
            return await self.relay.count_tokens(request)
        return await self._preparer.count(request, self._resolve(request.model))

    @property
    def responses(self) -> ResponseStore:
        """Answers kept for later requests to continue."""
        return self.core.responses

    async def health(self) -> Health:
        """Not ok while draining, so that balancers in front send their requests elsewhere."""
        health = await self.core.health()
        return Health(health.ok and not self._draining, {**health.detail, "draining": self._draining})

    async def metrics(self) -> bytes:
        return await self.core.metrics()

    # --- its life ----------------------------------------------------------------------------------------------------

    async def ready(self, timeout_s: float) -> bool:
        """Wait until every engine is connected."""
        waits = (engine.wait_connected(timeout_s) for engine in self._engines.values())
        return all(await asyncio.gather(*waits))

    async def warm_up(self) -> None:
        """Make ready what only requests with grammars need, so that the first of them need not wait for it."""
        await self._grammars.start()
        for item in self._served.values():
            await self._preparer.spell(item.text)
            for endpoint in item.endpoints:
                self._engines[endpoint.name].teach()

    async def drain(self, limit_s: float) -> None:
        """Refuse new requests; return when those that run have ended, or after `limit_s`."""
        self._draining = True
        if self.relay is not None:
            await self.relay.drain(limit_s)
        try:
            await asyncio.wait_for(self._idle.wait(), limit_s)
        except TimeoutError:
            log.warning("%d requests still run after %g s", len(self._running), limit_s)

    async def close(self) -> None:
        """Cut the connections to the engines, settle what that ends, then close the core."""
        self._draining = True
        if self.relay is not None:
            await self.relay.close()
        await asyncio.gather(*(engine.close() for engine in self._engines.values()))
        await self.drain(CLOSE_WAIT_S)
        for run in tuple(self._running):  # whose consumers read nothing: they cannot end by themselves
            self._end(run, "finished" if run.done else "failed", Unavailable("the server is shutting down"))
        while self._settling:
            await asyncio.gather(*self._settling, return_exceptions=True)
        self._preparer.close()
        await self._grammars.close()
        await self._close_core()

    # --- the pipeline ------------------------------------------------------------------------------------------------

    def generate(
        self, request: GenerateRequest, principal: Principal, job: JobContext | None = None
    ) -> AsyncGenerator[TextEvent, None]:
        """Started, deltas, a ChoiceDone per choice, Completed. What is refused is raised before the first event.

        Once admitted, a request ends in one way, with one usage row: finished, failed, or cancelled by `aclose`.
        A queued request comes with its JobContext, whose owner records the usage row.
        """
        if self.relay is not None and self.relayed(request.model):
            return self.relay.generate(request, principal, job)
        return self._generate(request, principal, job)

    async def _generate(
        self, request: GenerateRequest, principal: Principal, job: JobContext | None
    ) -> AsyncGenerator[TextEvent, None]:
        run = await self._accept(request, principal, job)
        try:
            while not run.done:
                for event in await run.step():
                    yield event
            await self._finish(run)
        except (asyncio.CancelledError, GeneratorExit):
            self._end(run, "finished" if run.done else "cancelled")
            raise
        except EmberlineError as error:
            self._end(run, "failed", error)
            raise
        except Exception as error:
            log.exception("a request failed", extra={"request_id": request.id})
            self._end(run, "failed", error)
            raise Internal("the request failed; the log has it under its id") from error
        finally:
            run.close()
        yield Completed(run.usage)

    async def _accept(self, request: GenerateRequest, principal: Principal, job: JobContext | None) -> Run:
        try:
            prepared = await self._prepare(request, principal)
            return await self._admitted(Run(prepared, self._admit, self.core.began, job))
        except EmberlineError as error:
            self.core.refused(error.kind)
            log.info("refused: %s", error.message, extra={"request_id": request.id, "error": error.kind})
            raise

    async def _prepare(self, request: GenerateRequest, principal: Principal) -> Prepared:
        clock = Clock()
        if self._draining:
            raise Unavailable("the server is shutting down", retry_after_s=5)
        served = self._resolve(request.model)
        return await self._preparer.prepare(request, principal, served, self._info(served), clock)

    async def _admitted(self, run: Run) -> Run:
        """From here on the request counts as running, until `_end`."""
        self._running.add(run)
        self._idle.clear()
        try:
            await run.admit()
        except asyncio.CancelledError:
            self._end(run, "cancelled")  # the core may have granted it all the same
            raise
        except BaseException:
            self._left(run)
            raise
        return run

    async def _admit(self, ask: RouteRequest) -> Placed:
        route = await self.core.admit(ask)
        return Placed(self._engines[route.decode], self._engines[route.prefill] if route.prefill else None)

    def _resolve(self, model_id: str) -> Served:
        served = self._names.get(model_id.lower())
        if served is not None:
            return served
        if len(model_id) > _MODEL_ID_CHARS or not _MODEL_ID.fullmatch(model_id):
            raise MalformedModelId(f"{model_id[:_MODEL_ID_CHARS]!r} is not a model id", param="model")
        raise ModelNotFound(f"no model {model_id} here; there are {', '.join(self._served)}", param="model")

    def _info(self, served: Served) -> EngineInfo:
        for endpoint in served.endpoints:
            if (info := self._engines[endpoint.name].info) is not None:
                return info
        raise Unavailable(f"{served.card.id} is not ready: no engine has connected yet", retry_after_s=2)

    # --- the end -----------------------------------------------------------------------------------------------------

    async def _finish(self, run: Run) -> None:
        """Return once the usage row is durable."""
        memories: list[Memory] = []  # nobody goes on with queued work
        try:
            if run.job is None:
                memories = await self._preparer.memories(run.prepared, run.replies)
        except Exception:  # the next turn is slower, nothing worse
            log.exception("a conversation was not remembered", extra={"request_id": run.prepared.request.id})
        await asyncio.shield(self._end(run, "finished", memories=memories))

    def _end(
        self, run: Run, status: UsageStatus, error: Exception | None = None, memories: Sequence[Memory] = ()
    ) -> "asyncio.Task[None]":
        """The one way out, taken once: settling goes on whatever becomes of the caller."""
        if run.settling is None:
            row = run.row(status)
            booked = run.job is not None
            settlement = Settlement(row, run.gaps.counts, list(memories), booked)
            if run.job is not None:
                run.job.record_usage(row)
            run.settling = asyncio.create_task(self.core.settle(settlement))
            self._settling.add(run.settling)
            run.settling.add_done_callback(self._settling.discard)
            run.settling.add_done_callback(lambda task: log_end(run.engine, row, error, task))
            self._left(run)
        return run.settling

    def _left(self, run: Run) -> None:
        self._running.discard(run)
        if not self._running:
            self._idle.set()
