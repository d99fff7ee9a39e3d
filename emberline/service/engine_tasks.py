"""Tasks for our own engine workers: each kind is checked, tokenized, and given the transport that computes it."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec

from emberline.catalog.model_card import ModelCard
from emberline.cluster.engine_client import EngineClient
from emberline.cluster.served_models import Served, ServedModels
from emberline.cluster.timings import Timings
from emberline.images.request_images import RequestImages
from emberline.protocol.errors import Unavailable, Unsupported
from emberline.protocol.events import SequenceIds
from emberline.protocol.frames import EngineInfo
from emberline.protocol.request import EncodeRequest, GenerateRequest, PredictRequest, Principal, SpeechRequest
from emberline.protocol.route_request import RouteRequest, route_request
from emberline.service.core import Core
from emberline.service.encode import EncodeCall, prepare_encoding, text_bytes
from emberline.service.engine_transport import EngineTransport
from emberline.service.predict import prepare_prediction, with_files
from emberline.service.prepare import Preparer
from emberline.service.request_run import Transport
from emberline.service.transcribe import SpeechCall, speech_route
from emberline.service.work import Task
from emberline.telemetry.metrics import INTER_TOKEN_BOUNDS_S, Counts, Histogram
from emberline.telemetry.request_log import Clock, JobContext, route_terms
from emberline.text.grammar.compiler_pool import GrammarCompiler
from emberline.text.text_model import TextModel
from emberline.upstream.target import Target

T = TypeVar("T")


def no_result() -> None:
    """Return None: the output of the task was its result."""


class Prepared(NamedTuple):
    """A task that is ready for admission."""

    route: RouteRequest
    transport: Transport[Any]
    result: Callable[[], Any] = no_result  # called once, after the last output
    inter_token: Counts | None = None  # latencies, filled by the transport
    ignores_reasoning: bool = False  # the request asks for reasoning, and its model does not reason


class ChatFormat(NamedTuple):
    """Rules that turn a conversation into the text of a prompt."""

    template: str = ""  # Jinja
    stops: tuple[str, ...] = ()  # texts that end a turn
    inserts: bool = False  # the model fills in the middle
    reasons: bool = False  # the model reasons before it answers


class EngineTasks:
    """Prepares tasks for the engine workers that this process is connected to."""

    def __init__(
        self,
        core: Core,
        served: ServedModels,
        engines: Mapping[str, EngineClient],
        grammars: GrammarCompiler,
        timings: Timings,
        images: RequestImages | None = None,
    ) -> None:
        self._served = served
        self._engines = engines  # by endpoint name
        self._grammars = grammars
        self._timings = timings
        self._images = images
        self._preparer = Preparer(core, grammars, images)

    async def prepare(
        self, task: Task, target: Target, principal: Principal, clock: Clock, job: JobContext | None
    ) -> Prepared:
        """Refuse everything that can be refused without an engine."""
        if isinstance(task, GenerateRequest):
            return await self._generate(task, target, principal, clock, job)
        if isinstance(task, EncodeRequest):
            return await self._encode(task, target, principal, clock, job)
        if isinstance(task, SpeechRequest):
            return await self._transcribe(task, target, principal, clock)
        if isinstance(task, PredictRequest):
            task = await with_files(task, target.card, principal, self._images)
            route, call = prepare_prediction(task, target.card, principal, self._engines, clock, job, self._timings)
            return Prepared(route, call, call.result)
        raise Unsupported(f"{task.model} makes no images, speech or video: models of providers do", param="model")

    async def _generate(
        self, request: GenerateRequest, target: Target, principal: Principal, clock: Clock, job: JobContext | None
    ) -> Prepared:
        served = await self._served.get(target.card)
        ignores_reasoning = request.reasoning.is_asked and not served.text.reasons
        if ignores_reasoning and request.reasoning.is_required:
            raise Unsupported(f'"{request.model}" does not support thinking: leave `think` out', param="think")
        prepared = await self._preparer.prepare(request, principal, served, self._info(served), clock)
        inter_token = Histogram(INTER_TOKEN_BOUNDS_S)
        transport = EngineTransport(prepared, self._engines, inter_token, job, self._timings)
        route = route_request(
            route_terms(request, clock, job),
            principal,
            served.card.id,
            prepared.info.fingerprint,
            input_tokens=prepared.prompt.n_ids,
            keys=prepared.keys,
            max_tokens=max(1, prepared.sampling.max_tokens or 0),  # 0 would be unknown
            images=len(prepared.images),
        )
        if job is not None:  # no later request continues its conversation
            return Prepared(route, transport, inter_token=inter_token.counts, ignores_reasoning=ignores_reasoning)

        def finish() -> SequenceIds:
            replies = transport.replies
            self._preparer.remember(prepared, replies)
            return SequenceIds(prepared.prompt.ids, replies[0][1])

        return Prepared(route, transport, finish, inter_token.counts, ignores_reasoning)

    async def _encode(
        self, request: EncodeRequest, target: Target, principal: Principal, clock: Clock, job: JobContext | None
    ) -> Prepared:
        served = await self._served.get(target.card)
        prepared = await self._preparer.run_off_loop(
            text_bytes(request), lambda: prepare_encoding(request, principal, served, self._info(served), clock)
        )
        call = EncodeCall(prepared, self._engines, job, self._timings)
        return Prepared(prepared.route(job), call, call.result)

    async def _transcribe(self, request: SpeechRequest, target: Target, principal: Principal, clock: Clock) -> Prepared:
        served = await self._served.get(target.card)
        served.check_speech()
        info = msgspec.structs.replace(self._info(served), model=served.card.id)
        call = SpeechCall(request, self._engines, self._timings)
        return Prepared(speech_route(request, principal, info, clock), call, call.result)

    async def chat_format(self, card: ModelCard) -> ChatFormat:
        """The chat template of a model of ours and the tokens that end its turns; empty if it generates no text."""
        served = await self._served.get(card)
        text = served.tokenizer
        if not isinstance(text, TextModel):
            return ChatFormat()
        spelled = {token_id: token for token, token_id in text.tokenizer.added.items()}
        ends = [spelled[token_id] for token_id in self._info(served).eos_ids if token_id in spelled]
        stops = (*text.chat_stops, *ends)
        return ChatFormat(text.template.source, stops, text.fill_in_middle is not None, text.reasons)

    async def count_tokens(self, request: GenerateRequest, principal: Principal, target: Target) -> int:
        """Count the tokens of the prompt as `prepare` would build it. No engine is asked."""
        return await self._preparer.count(request, principal, await self._served.get(target.card))

    async def tokenizer(self, target: Target) -> tuple[TextModel, int]:
        """The tokenizer of a model, and the tokens that its context has. No engine is asked."""
        served = await self._served.get(target.card)
        info = next((engine.info for engine in self._engines_of(served) if engine.info is not None), served.info)
        return served.text, served.card.context_window if info is None else info.context_len

    async def run_off_loop(self, n_bytes: int, work: Callable[[], T], renders: TextModel | None = None) -> T:
        """Do the work in a thread, if it would take the event loop too long (`Preparer.run_off_loop`)."""
        return await self._preparer.run_off_loop(n_bytes, work, renders)

    async def warm_up(self) -> None:
        """Prepare what only requests with grammars need, so that the first of them need not wait for it."""
        await self._grammars.start()
        for item in self._served.known():
            if not isinstance(item.tokenizer, TextModel):
                continue
            if item.text.images is not None and self._images is not None:
                await self._images.warm_up()
            await self._preparer.load_vocabulary(item.tokenizer)
            for engine in self._engines_of(item):
                engine.send_vocabulary()

    async def close(self) -> None:
        """End the threads and processes that prepare requests."""
        await self._preparer.close()
        if self._images is not None:
            self._images.close()
        await self._grammars.close()

    def _info(self, served: Served) -> EngineInfo:
        for engine in self._engines_of(served):
            if engine.info is not None:
                return engine.info
        if served.info is not None:  # it may be loaded for this request
            return served.info
        raise Unavailable(f"{served.card.id} is not ready: no engine has connected yet", retry_after_s=2)

    def _engines_of(self, served: Served) -> list[EngineClient]:
        return [engine for engine in self._engines.values() if served.card.id in engine.endpoint.models]
