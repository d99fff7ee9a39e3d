"""The models that upstream servers offer here: cards, tokenizers, and requests in the form that their servers take."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import msgspec

from emberline.catalog.model_card import ModelCard, PathSource
from emberline.config import ConfigError
from emberline.net.http_client import ConnectionFailed
from emberline.net.periodic import every
from emberline.protocol.errors import ModelNotFound, Unsupported
from emberline.protocol.media import MAX_IMAGE_TOKENS, MediaRequest
from emberline.protocol.provider import OwnKey
from emberline.protocol.request import EncodeRequest, GenerateRequest, Principal, Speculation, SpeechRequest
from emberline.protocol.route_request import RouteRequest, RouteTerms, route_request
from emberline.protocol.speech import max_audio_ms
from emberline.text.prompt import Prompt, build_prompt
from emberline.text.template_renderer import LocalRenderer, RendererFactory
from emberline.text.text_model import TextModel
from emberline.text.tokenizers.tokenizer import OFF_LOOP_BYTES
from emberline.upstream.dialects.anthropic import message_request
from emberline.upstream.dialects.dialect import BYTES_PER_TOKEN, CHAT, COMPLETIONS, Dialect
from emberline.upstream.providers.attempt import count_tokens
from emberline.upstream.providers.client import ProviderClient
from emberline.upstream.providers.directory import ProviderDirectory, remote_name
from emberline.upstream.providers.whole_call import WholeCall, whole_task
from emberline.upstream.servers.client import DEFAULT_CONTEXT, UpstreamClient, UpstreamConfig
from emberline.upstream.servers.kv_events import chain_keys, key_root
from emberline.upstream.target import Target
from emberline.upstream.upstream_request import (
    UpstreamRequest,
    body_of,
    byte_keys,
    check_known,
    tool_fields,
)

DISCOVERY_S = 15.0
_RETRY_S = 0.5
_TOKENIZE_S = 10.0
_MAX_TOKENIZE_BYTES = 64 << 20

log = logging.getLogger("emberline.balancer")


class UpstreamModels:
    """Owns the clients of all upstream servers. Raises ConfigError for a tokenizer that cannot be loaded."""

    def __init__(
        self,
        clients: Sequence[UpstreamClient],
        describe: Callable[[ModelCard], ModelCard] = lambda card: card,
        providers: ProviderDirectory | None = None,
        templates: RendererFactory = LocalRenderer,
    ) -> None:
        """`describe` adds to a card what the operator knows of the model; `templates` run the chat templates."""
        self._describe = describe
        self._templates = templates
        self.providers = ProviderDirectory() if providers is None else providers
        self.clients = {client.name: client for client in (*clients, *self.providers.clients.values())}
        self.providers.on_new.append(lambda client: self.clients.__setitem__(client.name, client))
        self.providers.on_gone.append(lambda client: self.clients.pop(client.name, None))
        self.texts: dict[str, TextModel] = {}  # by model, where the tokenizer is configured
        for client in clients:
            for model in client.models:
                if client.config.tokenizer and model not in self.texts:
                    self.texts[model] = _load_tokenizer(client.config, templates)
        self._make_cards()

    def _make_cards(self) -> None:
        servers = (client for client in self.clients.values() if not isinstance(client, ProviderClient))
        ids = dict.fromkeys(model for client in servers for model in client.models)
        self._by_name = {model.lower(): self._describe(_card(model, self._serving(model))) for model in ids}
        self._kinds = {model: self._serving(model)[0].config.kind for model in ids}

    async def load_tokenizer(self, client: UpstreamClient) -> None:
        """Load the tokenizer in another thread. Requests do not need it: without it their prefix keys are over
        bytes."""
        for model in client.models:
            if client.config.tokenizer and model not in self.texts:
                self.texts[model] = await asyncio.to_thread(_load_tokenizer, client.config, self._templates)

    def add(self, client: UpstreamClient) -> None:
        """A server joins."""
        self.clients[client.name] = client
        self._make_cards()

    def remove(self, name: str) -> UpstreamClient | None:
        """A server has left; its client is the caller's to close."""
        client = self.clients.pop(name, None)
        self._make_cards()
        return client

    def start(self, watch: bool) -> None:
        """Connect. Only the core watches the servers' health and load."""
        for client in self.clients.values():
            client.start(watch)

    async def wait_probed(self, timeout_s: float) -> None:
        """Wait until every server has answered a probe or failed one, for `timeout_s` at most."""
        await asyncio.gather(*(client.wait_probed(timeout_s) for client in self.clients.values()))

    def abort(self, name: str, reason: str) -> None:
        """The core has lost this endpoint: its requests here fail over too."""
        if (client := self.clients.get(name)) is not None:
            client.abort(reason)

    async def close(self) -> None:
        self.providers.close()
        await asyncio.gather(*(client.close() for client in self.clients.values()))

    async def sweep_providers(self, interval_s: float, is_used: Callable[[ProviderClient], bool]) -> None:
        """Remove unused providers whose last key was removed, every `interval_s`, until cancelled."""

        async def sweep() -> None:
            await asyncio.gather(*(client.close() for client in self.providers.sweep(is_used)))

        await every(interval_s, sweep, log, "unused providers could not be removed")

    def cards(self) -> list[ModelCard]:
        return [*self._by_name.values(), *self.providers.cards()]

    def lists(self, model_id: str) -> bool:
        """True if `cards` has a card of this id. Makes no card."""
        return model_id in self._kinds or self.providers.lists(model_id)

    def find(self, model_id: str, account: str | None) -> ModelCard | None:
        """The card of the model with this id, if the account can see it; `account` None: the operator."""
        return self._by_name.get(model_id.lower()) or self.providers.find(model_id, account)

    def target(self, card: ModelCard, principal: Principal, own_key: OwnKey | None = None) -> Target:
        """The model as a request of this account uses it.

        Raises Forbidden if there is no key for its provider, and ModelNotFound if its server has left."""
        if (client := self.providers.client_of(card)) is None:
            if (kind := self._kinds.get(card.id)) is None:
                raise ModelNotFound(f"no server has {card.id} any more", param="model")
            return Target(card, "server", card.id, kind)
        access, provider = self.providers.access(client, principal, own_key), client.provider
        takes_any = access.is_own_url if access.pool is not None else provider.is_hosted
        return Target(card, "provider", remote_name(card), access.traits or provider.traits, access, takes_any)

    def provider_of(self, card: ModelCard) -> str:
        """The owner of a model, as the gateway's logs and circuit breakers name it."""
        if (provider := self.providers.client_of(card)) is not None:
            return provider.provider.name
        if not (serving := self._serving(card.id)):
            raise ModelNotFound(f"no server has {card.id} any more", param="model")
        return serving[0].name

    def n_servers(self, card: ModelCard) -> int:
        """Return the number of servers that may serve a request one after the other."""
        return 1 if self.providers.client_of(card) is not None else len(self._serving(card.id))

    def cache_salt(self, target: Target, principal: Principal) -> dict[str, Any]:
        """The field that keeps tenants' prefix caches apart, for servers that know it."""
        known = target.kind in ("vllm", "sglang") and principal.salt
        return {"cache_salt": principal.salt.hex()} if known else {}

    def whole_call(
        self,
        request: EncodeRequest | SpeechRequest | MediaRequest,
        target: Target,
        principal: Principal,
        terms: RouteTerms,
    ) -> tuple[RouteRequest, WholeCall[Any]]:
        """A call that a provider answers with one result. Raises Unsupported if its API has none of the kind."""
        client = self.providers.client_of(target.card)
        if client is None:
            raise Unsupported(f"{target.card.id} is on an upstream server: only generation is relayed", param="model")
        access = target.provider_access
        task = whole_task(access.traits or client.provider.kind, target.remote, request)
        n_bytes = 0 if isinstance(request, SpeechRequest) else len(task.call.body)
        route = route_request(
            terms,
            principal,
            target.card.id,
            target.card.fingerprint,
            input_tokens=max(1, n_bytes // BYTES_PER_TOKEN),
            max_tokens=_max_output_tokens(request),
            context_len=target.card.context_window,
            max_input_tokens=n_bytes,
            max_audio_ms=_max_audio_ms(request),
            images=request.n_images if isinstance(request, MediaRequest) else 0,
            slots=access.slots,
        )
        return route, WholeCall(task, access, self.clients, request.id)

    def route_request(
        self,
        terms: RouteTerms,
        target: Target,
        principal: Principal,
        prompt: Sequence[bytes],
        max_tokens: int,
        body_bytes: int,
        images: int = 0,
    ) -> RouteRequest:
        """A generating request as admission sees it, with prefix keys over the bytes of the prompt.

        A provider has one server, so its requests need no keys. `body_bytes` are those of the whole body, which the
        server may put into its prompt."""
        card, n_bytes = target.card, sum(map(len, prompt))
        return route_request(
            terms,
            principal,
            card.id,
            card.fingerprint,
            input_tokens=max(1, n_bytes // BYTES_PER_TOKEN),
            keys=b"" if target.where == "provider" else byte_keys(card.id, principal.salt, *prompt),
            max_tokens=max_tokens,
            context_len=card.context_window,
            max_input_tokens=max(n_bytes, body_bytes),  # no token is shorter than a byte
            images=images,
            slots="" if target.access is None else target.access.slots,
        )

    async def with_token_keys(self, route: RouteRequest, request: GenerateRequest, target: Target) -> RouteRequest:
        """The route with prefix keys over token ids, as in the server's own KV events, if its tokenizer is here."""
        model = target.card.id
        if (text := self.texts.get(model)) is None:
            return route
        prompt = await _tokenize(request, text)
        keys = chain_keys(key_root(target.kind, model), prompt.ids)
        return msgspec.structs.replace(route, keys=keys, input_tokens=prompt.n_ids)

    def check(self, request: GenerateRequest, target: Target) -> None:
        """Raise Unsupported for a setting that the API of a translated target lacks."""
        client = self.providers.client_of(target.card)
        assert client is not None, "only providers have dialects"
        cast(Dialect, target.provider_access.api or client.api).check(request)

    async def upstream_request(
        self, request: GenerateRequest, target: Target, principal: Principal, terms: RouteTerms
    ) -> UpstreamRequest:
        """A canonical request as the target's server takes it."""
        n_images = sum(part.kind == "image" for message in request.messages or () for part in message.parts)
        if target.is_translated:
            if request.speculation != Speculation():
                check_known("speculation", target.kind)
            self.check(request, target)
            prompt = msgspec.json.encode(request.messages)[:-1]
            size, most = len(msgspec.json.encode(request)), request.sampling.max_tokens or 0
            tools = msgspec.json.encode(tool_fields(request).get("tools"))
            route = self.route_request(terms, target, principal, (tools, prompt), most, size, n_images)
            only = {"model": target.remote}
            return UpstreamRequest(route, CHAT, only, access=target.access, task=request, as_events=True)
        salt = self.cache_salt(target, principal)
        fields = {"model": target.remote, **body_of(request, target.kind), **salt}
        prompt = bytes(fields["messages"])[:-1] if "messages" in fields else msgspec.json.encode(fields["prompt"])
        others = {name: value for name, value in fields.items() if name not in ("messages", "prompt")}
        route = self.route_request(
            terms,
            target,
            principal,
            (msgspec.json.encode(fields.get("tools")), prompt),
            max_tokens=request.sampling.max_tokens or 0,
            body_bytes=len(prompt) + len(msgspec.json.encode(others)),
            images=n_images,
        )
        if not n_images:
            route = await self.with_token_keys(route, request, target)
        path = CHAT if request.messages is not None else COMPLETIONS
        return UpstreamRequest(route, path, fields, access=target.access)

    async def count_tokens(self, request: GenerateRequest, target: Target) -> int:
        """Tokens of the prompt by our own copy of the tokenizer, or as a vLLM server or Anthropic counts them."""
        card = target.card
        if (text := self.texts.get(card.id)) is not None:
            return (await _tokenize(request, text)).n_ids
        if (provider := self.providers.client_of(card)) is not None:
            name = provider.provider.name
            if target.kind != "anthropic":
                raise Unsupported(f"provider {name} cannot count tokens")
            body = message_request(name, request, target.remote)
            counted = {field: value for field, value in body.items() if field not in ("max_tokens", "stream")}
            return await count_tokens(provider, target.provider_access, counted)
        client = next((client for client in self._serving(card.id) if client.config.kind == "vllm"), None)
        if client is None:
            raise Unsupported(f"the server of {card.id} cannot count tokens")
        fields = body_of(request, "vllm")
        asked: dict[str, Any] = {name: fields[name] for name in ("messages", "prompt", "tools") if name in fields}
        return await _count_remotely(client, {"model": card.id, **asked})

    def _serving(self, model: str) -> list[UpstreamClient]:
        return [client for client in self.clients.values() if model in client.models]


def _max_output_tokens(request: EncodeRequest | SpeechRequest | MediaRequest) -> int:
    """Tokens that a provider may count for a result that is no text: their cost is reserved."""
    return max(1, MAX_IMAGE_TOKENS * request.n_images) if isinstance(request, MediaRequest) else 1


def _max_audio_ms(request: EncodeRequest | SpeechRequest | MediaRequest) -> int:
    if isinstance(request, SpeechRequest):
        return max_audio_ms(request.audio)
    return int(request.video_s * 1000) if isinstance(request, MediaRequest) else 0


def _card(model: str, clients: Sequence[UpstreamClient]) -> ModelCard:
    kinds = sorted({client.config.kind for client in clients})
    lengths = [client.info.context_len for client in clients if client.info is not None]
    return ModelCard(
        id=model,
        aliases=(),
        description=f"Served elsewhere ({', '.join(kinds)}): {', '.join(client.name for client in clients)}.",
        author=model.split("/")[0].lstrip("@") if "/" in model else kinds[0],
        context_window=min(lengths, default=DEFAULT_CONTEXT),
        source=PathSource(""),
        created_at=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3],
        fingerprint=f"{kinds[0]}:{model}",
    )


def _load_tokenizer(config: UpstreamConfig, templates: RendererFactory) -> TextModel:
    path = Path(config.tokenizer).expanduser()
    try:
        return TextModel.load(path, templates)
    except (ValueError, OSError) as error:
        raise ConfigError(f"endpoint {config.name}: tokenizer {path}: {error}", param="endpoints") from None


async def _tokenize(request: GenerateRequest, text: TextModel) -> Prompt:
    n_chars = sum(len(message.content) for message in request.messages or ()) + len(request.prompt or "")
    if n_chars <= OFF_LOOP_BYTES and not text.template.blocks:
        return build_prompt(text, request)
    return await asyncio.get_running_loop().run_in_executor(None, build_prompt, text, request)


async def _count_remotely(client: UpstreamClient, body: dict[str, Any]) -> int:
    try:
        exchange = await client.pool.post("/tokenize", msgspec.json.encode(body), timeout_s=_TOKENIZE_S)
        answer = msgspec.json.decode(await exchange.read(_MAX_TOKENIZE_BYTES))
    except (ConnectionFailed, msgspec.DecodeError) as error:
        raise client.lost(f"does not count tokens: {error}") from error
    count = answer.get("count") if isinstance(answer, dict) else None
    if exchange.status != 200 or type(count) is not int:
        raise client.lost(f"answered {exchange.status} when asked to count tokens")
    return count


async def discover(configs: Sequence[UpstreamConfig]) -> list[UpstreamClient]:
    """Clients of the servers, one per model that a server has.

    Servers whose models are not configured are asked; the others may come up later. ConfigError where none answers.
    """
    clients = [UpstreamClient(config) for config in configs]
    await asyncio.gather(*(_ask_models(client) for client in clients if not client.models))
    return [single for client in clients for single in _one_per_model(client)]


def _one_per_model(client: UpstreamClient) -> list[UpstreamClient]:
    if len(client.models) == 1:
        return [client]
    client.pool.close()
    endpoint = client.config.endpoint
    named = [msgspec.structs.replace(endpoint, name=f"{endpoint.name}:{m}", models=(m,)) for m in client.models]
    return [UpstreamClient(msgspec.structs.replace(client.config, endpoint=one)) for one in named]


async def _ask_models(client: UpstreamClient) -> None:
    problem = ""
    try:
        async with asyncio.timeout(DISCOVERY_S):
            while True:
                try:
                    await client.ask_models()
                    return
                except ConnectionFailed as error:
                    problem = str(error)
                    log.warning("endpoint %s: %s", client.name, problem)
                await asyncio.sleep(_RETRY_S)
    except TimeoutError:
        raise ConfigError(
            f'endpoint {client.name} does not tell its models ({problem}): start it first, or give models = ["…"]',
            param="endpoints",
        ) from None
