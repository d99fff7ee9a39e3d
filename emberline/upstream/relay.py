"""The models that other people's servers offer here, and the pipeline of their requests."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from emberline.catalog.model_card import ModelCard, PathSource
from emberline.config import ConfigError
from emberline.protocol.errors import DeadlineExceeded, EmberlineError, EngineLost, Unavailable, Unsupported
from emberline.protocol.events import Completed, Started, TextEvent
from emberline.protocol.request import GenerateRequest, Principal
from emberline.service.core import Core
from emberline.service.job_context import JobContext
from emberline.service.validation import validate
from emberline.text.prompt import Prompt, build_prompt
from emberline.text.text_model import TextModel
from emberline.text.tokenizer import OFF_LOOP_BYTES
from emberline.upstream.chunks import ChunkReader, Unreadable
from emberline.upstream.client import DEFAULT_CONTEXT, Upstream
from emberline.upstream.config import UpstreamConfig
from emberline.upstream.http_client import Broken
from emberline.upstream.kv_events import chain_keys, key_root
from emberline.upstream.request import CHAT, COMPLETIONS, UpstreamRequest, byte_keys, estimated_tokens
from emberline.upstream.request_body import body_of
from emberline.upstream.run import UpstreamRun


def card_of(model: str, servers: Sequence[Upstream]) -> ModelCard:
    kinds = sorted({server.server.kind for server in servers})
    lengths = [server.info.context_len for server in servers if server.info is not None]
    return ModelCard(
        id=model,
        aliases=(),
        description=f"Served elsewhere ({', '.join(kinds)}): {', '.join(server.name for server in servers)}.",
        author=model.split("/")[0].lstrip("@") if "/" in model else kinds[0],
        context_window=min(lengths, default=DEFAULT_CONTEXT),
        source=PathSource(""),
        created_at=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3],
        fingerprint=f"{kinds[0]}:{model}",
    )


ANY_VOCABULARY = 1 << 31  # token ids are checked where the vocabulary is known
CLOSE_WAIT_S = 1.0

log = logging.getLogger("emberline.request")


class Relay:
    """Made by `open_relay`. Shares the core with the pipeline of our own engines."""

    def __init__(self, core: Core, servers: Mapping[str, Upstream], texts: Mapping[str, TextModel]) -> None:
        self._core = core
        self._servers = servers  # by endpoint name
        self._texts = texts  # tokenizers of models that have one here, by id
        ids = dict.fromkeys(model for server in servers.values() for model in server.models)
        self._cards = {model: card_of(model, self._of(model)) for model in ids}
        self._by_name = {model.lower(): card for model, card in self._cards.items()}
        self._running: set[UpstreamRun] = set()
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    def models(self) -> list[ModelCard]:
        return list(self._cards.values())

    def find(self, model_id: str) -> ModelCard | None:
        return self._by_name.get(model_id.lower())

    def kind_of(self, card: ModelCard) -> str:
        return self._of(card.id)[0].server.kind

    def salted(self, card: ModelCard, principal: Principal) -> dict[str, Any]:
        """What keeps tenants' caches apart, on servers that know how."""
        if self.kind_of(card) not in ("vllm", "sglang"):
            return {}
        return {"cache_salt": principal.salt.hex()} if principal.salt else {}

    def text_of(self, card: ModelCard) -> TextModel | None:
        return self._texts.get(card.id)

    # --- the pipelines -----------------------------------------------------------------------------------------------

    async def open(self, parcel: UpstreamRequest) -> UpstreamRun:
        """A passage whose answer has begun. What is refused is raised, and leaves no trace but a count."""
        if self._draining:
            raise Unavailable("the server is shutting down", retry_after_s=5)
        passage = UpstreamRun(parcel, self._core, self._servers, self._ended)
        self._running.add(passage)
        self._idle.clear()
        try:
            await passage.open()
        except BaseException as error:
            await passage.__aexit__(type(error), error, None)
            if isinstance(error, EmberlineError) and not passage.admitted:
                self._refused(parcel.id, error)
            raise
        return passage

    async def generate(
        self, request: GenerateRequest, principal: Principal, job: JobContext | None = None
    ) -> AsyncGenerator[TextEvent, None]:
        """As `Service.generate`, over a server's chunks."""
        try:
            async with asyncio.timeout(request.deadline_s):
                parcel = await self._parcel(request, principal, job)
                passage = await self.open(parcel)
        except TimeoutError:
            raise DeadlineExceeded(f"not started within {request.deadline_s:g} s") from None
        reader = ChunkReader(request.n, request.sampling.stop)
        async with passage:
            yield Started(passage.usage)
            while block := await self._in_time(passage):
                try:
                    events = list(reader.feed(block))
                except Unreadable as error:
                    lost = EngineLost(passage.engine, str(error))
                    await passage.fail(lost)
                    raise lost from error
                for event in events:
                    yield event
        if not reader.done:
            raise EngineLost(passage.engine, "ended its answer without saying why")
        yield Completed(passage.usage)

    async def count_tokens(self, request: GenerateRequest) -> int:
        """By our own copy of the tokenizer, or as a server counts."""
        card = self._by_name[request.model.lower()]
        if (text := self.text_of(card)) is not None:
            return (await _tokenised(request, text)).n_ids
        server = next((server for server in self._of(card.id) if server.server.kind == "vllm"), None)
        if server is None:
            raise Unsupported(f"the server of {card.id} counts no tokens before it answers")
        fields = body_of(request, "vllm")
        asked: dict[str, Any] = {name: fields[name] for name in ("messages", "prompt", "tools") if name in fields}
        return await _counted(server, {"model": card.id, **asked})

    async def keys_of(self, request: GenerateRequest, card: ModelCard, text: TextModel) -> tuple[bytes, int]:
        """Keys over token ids, as the server's own KV events have them, and how many tokens there are."""
        prompt = await _tokenised(request, text)
        return chain_keys(key_root(self.kind_of(card), card.id), prompt.ids), prompt.n_ids

    # --- its life ----------------------------------------------------------------------------------------------------

    def start(self, watch: bool) -> None:
        """Connect. Only the core watches the servers' health and load."""
        for server in self._servers.values():
            server.start(watch)

    async def drain(self, limit_s: float) -> None:
        self._draining = True
        try:
            async with asyncio.timeout(limit_s):
                await self._idle.wait()
        except TimeoutError:
            log.warning("%d relayed requests still run after %g s", len(self._running), limit_s)

    async def close(self) -> None:
        """Cut the connections; whoever still reads is told."""
        self._draining = True
        await asyncio.gather(*(server.close() for server in self._servers.values()))
        await self.drain(CLOSE_WAIT_S)
        for passage in tuple(self._running):
            await passage.__aexit__(None, None, None)
        settling = [passage.settling for passage in self._running if passage.settling is not None]
        await asyncio.gather(*settling, return_exceptions=True)

    # --- inside ------------------------------------------------------------------------------------------------------

    async def _parcel(self, request: GenerateRequest, principal: Principal, job: JobContext | None) -> UpstreamRequest:
        card = self._by_name[request.model.lower()]
        validate(request, ANY_VOCABULARY)
        fields = {"model": card.id, **body_of(request, self.kind_of(card)), **self.salted(card, principal)}
        tools = msgspec.json.encode(fields.get("tools"))
        prompt = bytes(fields["messages"])[:-1] if "messages" in fields else msgspec.json.encode(fields["prompt"])
        if (text := self.text_of(card)) is not None:
            keys, n_tokens = await self.keys_of(request, card, text)
        else:
            keys = byte_keys(card.id, principal.salt, tools, prompt)
            n_tokens = estimated_tokens(len(tools) + len(prompt))
        return UpstreamRequest(
            id=request.id,
            card=card,
            principal=principal,
            path=CHAT if request.messages is not None else COMPLETIONS,
            fields=fields,
            keys=keys,
            input_tokens=n_tokens,
            n=request.n,
            max_tokens=request.sampling.max_tokens or 0,
            priority=request.priority,
            session=request.session,
            reject_if_busy=request.reject_if_busy,
            deadline_s=request.deadline_s,
            job=job,
        )

    async def _in_time(self, passage: UpstreamRun) -> bytes:
        parcel = passage.parcel
        if parcel.deadline_s is None:
            return await passage.block()
        try:
            async with asyncio.timeout(max(0.0, parcel.deadline_s - parcel.clock.elapsed_s())):
                return await passage.block()
        except TimeoutError:
            raise DeadlineExceeded(f"not finished within {parcel.deadline_s:g} s") from None

    def _of(self, model: str) -> list[Upstream]:
        return [server for server in self._servers.values() if model in server.models]

    def _refused(self, request_id: str, error: EmberlineError) -> None:
        self._core.refused(error.kind)
        log.info("refused: %s", error.message, extra={"request_id": request_id, "error": error.kind})

    def _ended(self, passage: UpstreamRun) -> None:
        self._running.discard(passage)
        if not self._running:
            self._idle.set()


async def _tokenised(request: GenerateRequest, text: TextModel) -> Prompt:
    n_chars = sum(len(message.content) for message in request.messages or ()) + len(request.prompt or "")
    if n_chars <= OFF_LOOP_BYTES:
        return build_prompt(text, request)
    return await asyncio.get_running_loop().run_in_executor(None, build_prompt, text, request)


async def _counted(server: Upstream, body: dict[str, Any]) -> int:
    try:
        exchange = await server.pool.post("/tokenize", msgspec.json.encode(body), silent_s=10.0)
        answer = msgspec.json.decode(await exchange.read(64 << 20))
    except (Broken, msgspec.DecodeError) as error:
        raise server.lost(f"does not count tokens: {error}") from error
    count = answer.get("count") if isinstance(answer, dict) else None
    if exchange.status != 200 or type(count) is not int:
        raise server.lost(f"answered {exchange.status} when asked to count tokens")
    return count


DISCOVERY_S = 15.0
_RETRY_S = 0.5

open_log = logging.getLogger("emberline.balancer")


async def discover(servers: Sequence[UpstreamConfig]) -> list[Upstream]:
    """Connections to the servers, one for each model that a server has.

    Those whose models are not configured are asked; the others may come up later. ConfigError where nobody answers.
    """
    upstreams = [Upstream(server) for server in servers]
    await asyncio.gather(*(_ask(upstream) for upstream in upstreams if not upstream.models))
    return [single for upstream in upstreams for single in _singles(upstream)]


def _singles(upstream: Upstream) -> list[Upstream]:
    if len(upstream.models) == 1:
        return [upstream]
    upstream.pool.close()
    endpoint = upstream.server.endpoint
    named = [msgspec.structs.replace(endpoint, name=f"{endpoint.name}:{m}", models=(m,)) for m in upstream.models]
    return [Upstream(msgspec.structs.replace(upstream.server, endpoint=one)) for one in named]


async def _ask(server: Upstream) -> None:
    problem = ""
    try:
        async with asyncio.timeout(DISCOVERY_S):
            while True:
                try:
                    await server.ask_models()
                    return
                except Broken as error:
                    problem = str(error)
                    open_log.warning("endpoint %s: %s", server.name, problem)
                await asyncio.sleep(_RETRY_S)
    except TimeoutError:
        raise ConfigError(
            f'endpoint {server.name} does not tell its models ({problem}): start it first, or give models = ["…"]',
            param="endpoints",
        ) from None


def open_relay(core: Core, servers: Sequence[Upstream]) -> Relay:
    """The service starts and closes the servers' connections with its own."""
    texts: dict[str, TextModel] = {}
    for server in servers:
        for model in server.models:
            if server.server.tokenizer and model not in texts:
                texts[model] = _tokenizer(server)
    return Relay(core, {server.name: server for server in servers}, texts)


def _tokenizer(server: Upstream) -> TextModel:
    path = Path(server.server.tokenizer).expanduser()
    try:
        return TextModel.load(path)
    except (ValueError, OSError) as error:
        raise ConfigError(f"endpoint {server.name}: tokenizer {path}: {error}", param="endpoints") from None
