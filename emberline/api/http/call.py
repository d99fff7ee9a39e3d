"""The ASGI types, as this room uses them."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar
from urllib.parse import parse_qsl

import msgspec

from emberline.api.http.errors import Names
from emberline.protocol.errors import BadInput, EmberlineError, Unavailable
from emberline.protocol.events import TextEvent
from emberline.protocol.request import GenerateRequest, Principal

if TYPE_CHECKING:
    from emberline.accounts.auth import Authenticator
    from emberline.api.batch_loader import BatchService
    from emberline.api.http.errors import Dialect
    from emberline.catalog.model_card import ModelCard
    from emberline.jobs.webhooks.service import WebhookService
    from emberline.service.health import Health
    from emberline.service.responses import ResponseStore
    from emberline.upstream.models import UpstreamModels
    from emberline.upstream.request import UpstreamRequest

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]


HeaderList = list[tuple[bytes, bytes]]
JSON = b"application/json"
encode = msgspec.json.Encoder().encode


class Reply(NamedTuple):
    status: int
    body: bytes
    content_type: bytes = JSON  # exactly this for JSON: some clients compare
    headers: HeaderList = []  # beside content-type, content-length and x-request-id; never mutated


def json_reply(body: Any, status: int = 200, headers: HeaderList | None = None) -> Reply:
    return Reply(status, encode(body), headers=headers or [])


T = TypeVar("T")


class ClientLeft(Exception):
    """The client closed its connection; there is nobody to answer."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, or ClientLeft with `work` cancelled and cleaned up. The body must have been read."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_departure(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientLeft
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))
            if not task.cancelled():
                task.exception()  # retrieved: nobody is left to hear it


async def _departure(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


Events = AsyncGenerator[TextEvent, None]


class Backend(Protocol):
    @property
    def upstream(self) -> "UpstreamModels":
        """The models on upstream servers."""

    def upstream_card(self, model_id: str) -> "ModelCard | None":
        """The card of such a model."""

    def forward(self, request: "UpstreamRequest") -> "AsyncGenerator[tuple[bytes, bool], None]": ...

    @property
    def responses(self) -> "ResponseStore": ...

    def generate(self, request: GenerateRequest, principal: Principal) -> Events: ...

    async def count_tokens(self, request: GenerateRequest, principal: Principal) -> int: ...

    def models(self) -> "Sequence[ModelCard]": ...

    def resolve(self, model_id: str) -> "ModelCard": ...

    async def health(self) -> "Health": ...

    async def metrics(self) -> bytes: ...


_SESSION_HEADERS = ("x-session-affinity", "x-claude-code-session-id", "session-id", "session_id", "x-session-id")
_SSE_HEADERS: HeaderList = [
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Call:
    """What an endpoint is given. `id` is ours alone: a client's X-Request-Id is logged and goes no further."""

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        service: "Backend",
        auth: "Authenticator",
        events: "WebhookService | None" = None,
        batches: "BatchService | None" = None,
    ) -> None:
        self.scope = scope
        self.receive = receive
        self.send = send
        self.service = service
        self.auth = auth
        self._events = events
        self._batches = batches
        self.id = str(uuid.uuid4())
        # Of a repeated header, the first counts.
        fields: list[tuple[bytes, bytes]] = scope["headers"]
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(fields)}
        self.status = 0  # 0 until the answer has begun
        self.tail = ""  # what the route's {model} stands for
        self.names = Names()  # what the caller calls what the service may complain about
        self.dialect: Dialect
        self.principal: Principal  # set where the route's policy asks for a key

    @property
    def trusted(self) -> bool:
        """Whether the caller of an open route could have called one that needs a key."""
        try:
            self.auth.authenticate(self.headers)
        except EmberlineError:
            return False
        return True

    @property
    def events(self) -> "WebhookService":
        if self._events is None:
            raise Unavailable("this server was started without its store: it keeps no events")
        return self._events

    @property
    def has_queue(self) -> bool:
        return self._batches is not None

    @property
    def batches(self) -> "BatchService":
        if self._batches is None:
            raise Unavailable("this server was started without its store: it has no queue")
        return self._batches

    @property
    def session(self) -> str | None:
        """The conversation's name from the headers, first wins."""
        for name in _SESSION_HEADERS:
            if value := self.headers.get(name):
                return value
        return None

    def query(self) -> dict[str, str]:
        try:
            pairs = parse_qsl(self.scope["query_string"].decode("ascii"), errors="strict", max_num_fields=64)
        except ValueError as bad:
            raise BadInput(f"the query string cannot be read: {bad}") from None
        return dict(pairs)

    async def reply(self, reply: Reply) -> None:
        headers = [
            (b"content-type", reply.content_type),
            (b"content-length", b"%d" % len(reply.body)),
            (b"x-request-id", self.id.encode()),
            *reply.headers,
        ]
        await self.start(reply.status, headers)
        await self.send({"type": "http.response.body", "body": reply.body})

    async def start_stream(self, headers: HeaderList) -> None:
        await self.start(200, [*_SSE_HEADERS, (b"x-request-id", self.id.encode()), *headers])

    async def start(self, status: int, headers: HeaderList) -> None:
        self.status = status
        await self.send({"type": "http.response.start", "status": status, "headers": headers})
