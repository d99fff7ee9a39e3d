"""A call whose reply comes whole: embeddings, transcripts, images, speech, video."""

import asyncio
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import msgspec

from emberline.net.http_client import MAX_REPLY_BYTES, ConnectionFailed
from emberline.protocol.errors import BadInput, EmberlineError, EngineLost, Unsupported
from emberline.protocol.events import Usage
from emberline.protocol.media import MediaRequest
from emberline.protocol.request import EncodeRequest, SpeechRequest
from emberline.protocol.route_request import Fault, Route, client_of
from emberline.protocol.trace_context import TraceContext, TraceDetails, current
from emberline.upstream.dialects import gemini_media, openai_media
from emberline.upstream.dialects.dialect import BYTES_PER_TOKEN, ProviderCall, UnreadableReply, WholeReply, WholeTask
from emberline.upstream.providers.access import Access
from emberline.upstream.providers.attempt import connection_failure
from emberline.upstream.providers.client import ProviderClient
from emberline.upstream.providers.errors import ProviderFailed, hide_key, raise_status
from emberline.upstream.servers.attempt import MAX_ERROR_BYTES
from emberline.upstream.servers.client import UpstreamClient

UNSEEN_PROMPT_TOKENS = 10_000  # that a provider may add to a prompt; beyond that, its count is absurd
OFF_LOOP_BYTES = 256 << 10  # a larger body is read in a thread
POLL_TIMEOUT_S = 30.0

T = TypeVar("T")


class WholeCall(Generic[T]):
    """A transport for `RequestRun` with one output, the result."""

    restart_wait_s = 0.0
    deadline_grace_s = 0.0
    cached_tokens = 0

    def __init__(
        self, task: WholeTask[T], access: Access, clients: Mapping[str, UpstreamClient], request_id: str
    ) -> None:
        self.operation = task.operation
        self.provider = ""
        self.trace: TraceContext | None = current.get()
        self.began = False
        self.done = False
        self.usage = Usage()
        self._task = task
        self._access = access
        self._clients = clients
        self._request_id = request_id
        self._client: ProviderClient | None = None
        self._result: list[T] = []

    def result(self) -> T:
        (result,) = self._result
        return result

    async def open(self, route: Route, attempt: int, deadline_s: float | None) -> None:
        client = client_of(self._clients, route.decode)
        assert isinstance(client, ProviderClient)
        self._client, self.provider = client, client.provider.name

    async def next(self) -> None:
        task = self._task
        reply = await self._send(task.call)
        try:
            if task.poll is not None:
                reply = await task.poll(reply, self._fetch)
            self.began = True
            if len(reply.body) > OFF_LOOP_BYTES:
                result, self.usage = await asyncio.to_thread(task.read, reply)
            else:
                result, self.usage = task.read(reply)
        except UnreadableReply as error:
            assert self._client is not None
            raise ProviderFailed(self._client.provider.name, f"sent {hide_key(str(error), self._access.key)}") from None
        except BadInput as error:  # what was asked for cannot be made
            raise BadInput(hide_key(error.message, self._access.key)[:500], param=error.param) from None
        if self.usage.prompt_tokens > len(task.call.body) + UNSEEN_PROMPT_TOKENS:
            self.usage = msgspec.structs.replace(self.usage, prompt_tokens=len(task.call.body) // BYTES_PER_TOKEN)
        self._result.append(result)
        self.done = True

    def fault(self, error: EmberlineError) -> Fault:
        """Not asked again: a provider bills what it computes."""
        is_to_blame = isinstance(error, EngineLost) and not self._access.is_own_url and self._client is not None
        return Fault(False, lost=(self._client.name,) if is_to_blame and self._client is not None else ())

    def trace_details(self, content: bool) -> TraceDetails:
        return TraceDetails()

    async def settle(self) -> None:
        """Nothing more is known: other servers do not say what they computed of a request that was aborted."""

    def close(self) -> None:
        pass  # an exchange that is not complete was closed where it ended

    async def _send(self, call: ProviderCall) -> WholeReply:
        client, access = self._client, self._access
        assert client is not None
        api, pool, timeout_s = access.api or client.api, access.pool or client.pool, client.provider.timeout_s
        ids = f"x-request-id: {self._request_id}\r\n{'' if self.trace is None else self.trace.headers}"
        headers = f"{ids}{api.authorization(access.key)}{api.headers}"
        try:
            exchange = await pool.post(call.path, call.body, headers, timeout_s, content_type=call.content_type)
            try:
                body = await exchange.read(MAX_REPLY_BYTES if exchange.status == 200 else MAX_ERROR_BYTES)
            finally:
                exchange.close()
        except ConnectionFailed as error:
            raise connection_failure(client, error) from error
        except BadInput as error:  # the account's own address may not be reached
            raise BadInput(f"provider {client.provider.name}: {error.message}", param="model") from None
        if exchange.status != 200:
            raise_status(client.provider.name, exchange.status, exchange.headers, body, access.key)
        return WholeReply(body, exchange.headers.get("content-type", ""))

    async def _fetch(self, path: str) -> WholeReply:
        client, access = self._client, self._access
        assert client is not None
        api, pool = access.api or client.api, access.pool or client.pool
        try:
            status, body = await pool.get(
                path, POLL_TIMEOUT_S, MAX_REPLY_BYTES, api.authorization(access.key) + api.headers
            )
        except ConnectionFailed as error:
            raise connection_failure(client, error) from error
        if status != 200:
            raise_status(client.provider.name, status, {}, body, access.key)
        return WholeReply(body, "")


def whole_task(kind: str, model: str, request: EncodeRequest | SpeechRequest | MediaRequest) -> WholeTask[Any]:
    """The call that a request for embeddings, a transcript or media becomes in the API of a provider.

    Raises Unsupported if the API has no such call."""
    if kind == "anthropic":
        raise Unsupported("Anthropic's API has no embeddings, images or speech", param="model")
    if kind == "any-llm":
        raise Unsupported("providers of kind any-llm have chats only", param="model")
    if kind == "gemini":
        if isinstance(request, EncodeRequest):
            return gemini_media.embeddings(model, request)
        if isinstance(request, MediaRequest):
            return gemini_media.media(model, request)
        raise Unsupported("Gemini's API has no transcriptions: send the audio in a chat", param="model")
    if isinstance(request, EncodeRequest):
        return openai_media.embeddings(model, request)
    if isinstance(request, SpeechRequest):
        return openai_media.transcription(model, request)
    return openai_media.media(model, request)
