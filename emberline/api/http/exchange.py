"""One HTTP exchange: the request as an endpoint receives it, and the response it returns."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar
from urllib.parse import parse_qsl

import msgspec

from emberline.accounts.audit_log import Actor
from emberline.api.http.errors import Dialect, FieldNames, HeaderList
from emberline.api.http.rate_limit_headers import rate_limit_headers
from emberline.api.http.unknown_fields import HEADER, reasoning_warning, unknown_field_log, warning
from emberline.api.http.wire import Wire
from emberline.gateway.options import from_headers, merge
from emberline.gateway.stage_chain import StageChain, open_chain
from emberline.net.http_server import DISCONNECTED, Receive, Scope, Send
from emberline.protocol import trace_context
from emberline.protocol.errors import BadInput, EmberlineError, Unavailable, Unsupported
from emberline.protocol.events import SequenceIds, TextEvent, Usage
from emberline.protocol.gateway import GatewayOptions
from emberline.protocol.rate_limits import RateLimits
from emberline.protocol.request import (
    GenerateRequest,
    Principal,
    alias_caller,
    session_name,
)
from emberline.protocol.speech import MAX_AUDIO_BYTES
from emberline.service.event_collector import result_of
from emberline.service.work import Task, TaskEvents, TaskRunner, Work

if TYPE_CHECKING:  # the API needs the types of what it is given, not their imports
    from emberline.accounts.account_service import AccountService
    from emberline.accounts.auth import Authenticator
    from emberline.catalog.model_card import ModelCard
    from emberline.gateway.gateways import GatewayService
    from emberline.jobs.queue.queue import Queue
    from emberline.jobs.webhooks.service import WebhookService
    from emberline.service.core import ClusterAdmin, Operations
    from emberline.service.engine_tasks import ChatFormat
    from emberline.service.event_log import EventLogs
    from emberline.service.kv_cache import KVCacheAdmin
    from emberline.service.model_pulls import ModelPulls
    from emberline.service.models import ModelLookup
    from emberline.service.responses import ResponseStore
    from emberline.service.tokenization import TokenizedPrompt
    from emberline.upstream.target import Target

T = TypeVar("T")
Events = AsyncGenerator[TextEvent, None]

MAX_NAMED = 20  # models in an error
UPSTREAM = "provider"  # state of models that other servers have, which count where there are no others
JSON = b"application/json"
EVENT_STREAM = b"text/event-stream"
encode = msgspec.json.Encoder().encode
_SESSION_HEADERS = ("x-session-affinity", "x-claude-code-session-id", "session-id", "session_id", "x-session-id")
_NOT_LOADED = frozenset({"on_disk", "loading", "unloading", "failed"})  # states of a model that requests wait for
_STREAM_HEADERS: HeaderList = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Services(TaskRunner, Protocol):
    """The inference service as the API uses it; tests replace it with a fake."""

    async def count_tokens(
        self, request: GenerateRequest, principal: Principal, target: "Target | None" = None
    ) -> int: ...

    async def n_ahead(self, request_id: str) -> int | None:
        """Number of requests that wait for workers before this one. Returns None if this one does not wait."""

    async def chat_format(self, card: "ModelCard") -> "ChatFormat": ...

    async def tokenize(
        self, request: GenerateRequest, target: "Target", special: bool, entries: bool
    ) -> "TokenizedPrompt": ...

    async def detokenize(self, ids: list[int], target: "Target") -> str: ...

    async def tokenizer_info(self, target: "Target") -> dict[str, str | None]: ...

    @property
    def models(self) -> "ModelLookup": ...

    @property
    def operations(self) -> "Operations": ...

    @property
    def cluster_admin(self) -> "ClusterAdmin": ...

    @property
    def kv_cache(self) -> "KVCacheAdmin": ...

    @property
    def responses(self) -> "ResponseStore": ...

    @property
    def event_logs(self) -> "EventLogs":
        """Logs of streams that their clients may resume."""


class BatchQueue(Protocol):
    """The durable queue of this process, and the loader that reads submitted batches into it."""

    queue: "Queue"
    closing: asyncio.Event  # set at shutdown: streams that wait for a job end
    result_sizes: dict[tuple[str, int], int]  # bytes of a result file, by its id and the number of finished jobs

    def wake(self) -> None:
        """Tell the loader that a batch was submitted."""


class Reply(NamedTuple):
    """A response that is complete before it is sent."""

    status: int
    body: bytes
    content_type: bytes = JSON  # exactly this for JSON: some clients compare
    headers: HeaderList = []  # besides content-type, content-length and x-request-id; never mutated
    rest: Sequence[bytes] = ()  # of a large body: parts that follow `body`, each sent once the one before it is


def json_reply(body: Any, status: int = 200, headers: HeaderList | None = None) -> Reply:
    return Reply(status, encode(body), headers=headers or [])


def list_reply(rows: Sequence[dict[str, Any]], has_more: bool) -> Reply:
    """One page of an OpenAI list."""
    ends = {"first_id": rows[0]["id"] if rows else None, "last_id": rows[-1]["id"] if rows else None}
    return json_reply({"object": "list", "data": rows, **ends, "has_more": has_more})


class ClientDisconnected(Exception):
    """The client closed its connection before the response was complete."""


class LargeRequest(Exception):
    """Raised by an endpoint before it responds: the request is to be served by the HTTP worker for large ones."""

    def __init__(self, max_bytes: int = 0) -> None:
        self.max_bytes = max_bytes  # that are still to be read of the body


class RequestLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes in bytes and times in seconds that one request is held to."""

    max_body_bytes: int = 32 << 20
    max_audio_bytes: int = MAX_AUDIO_BYTES  # of a recording
    idle_s: float = 30.0  # the longest pause between two chunks of a body
    heartbeat_s: float = 15.0  # the longest pause in a stream of events
    websocket_idle_s: float = 900.0  # without a message
    websocket_age_s: float = 3600.0  # of a connection, as in OpenAI's API
    store_retry_s: float = 1.0  # before a stream of events looks again, where the store was away


REQUEST_LIMITS = RequestLimits()


class HttpExchange:
    """A request and its response. `id` is generated here; a client's X-Request-Id is logged and not used otherwise."""

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        service: Services,
        auth: "Authenticator",
        webhooks: "WebhookService | None" = None,
        batches: BatchQueue | None = None,
        relays_large: bool = False,
        accounts: "AccountService | None" = None,
        gateways: "GatewayService | None" = None,
        pulls: "ModelPulls | None" = None,
        limits: RequestLimits = REQUEST_LIMITS,
    ) -> None:
        self.scope = scope
        self.limits = limits
        self.receive = receive
        self.send = send
        self.service = service
        self._auth = auth
        self._webhooks = webhooks
        self._batches = batches
        self._accounts = accounts
        self._gateways = gateways
        self._pulls = pulls
        self._gateway: StageChain | None = None  # the same as `gateway`, once that is known
        self.gateway_name = ""  # of the path; empty: it names none
        self.wire: Wire | None = None  # the JSON body, once it was read
        self.named_model: str | None = None  # the model that the body names
        self.card: ModelCard | None = None  # the model that the request is for, once it was looked up
        self.target: Target | None = None  # the same for this caller, if the endpoint had to know how it is reached
        self.is_audited = False  # what it does is in the audit log
        self.audit_target = ""  # what an admin's act is done to, for the audit log; empty: `path_param`
        self.relays_large = relays_large  # large requests are for another process: endpoints raise LargeRequest
        self.unknown_form_fields: tuple[str, ...] = ()  # that the endpoint has found in a multipart form
        self.received: list[bytes] = []  # of the body, as far as it has been read
        self.body_complete = False
        self.held_bytes = 0  # of its body, in memory
        self.id = str(uuid.uuid4())
        # Of a repeated header, the first counts.
        fields: list[tuple[bytes, bytes]] = scope["headers"]
        self.headers: dict[str, str] = {}
        for name, value in reversed(fields):
            self.headers[name.decode("latin-1")] = value.decode("latin-1")
        # The client's session id: the header's, else the body's. Every look-up of the request's model uses it.
        self.header_session = session_name(*map(self.headers.get, _SESSION_HEADERS))
        self.session = self.header_session
        self.status = 0  # of the response; 0 until its headers are sent
        self.route = ""  # the path of its route, with placeholders; empty: there is none
        self.query_schemas: Mapping[str, Any] = {}  # JSON schemas of the route's query parameters
        self.path_param = ""  # the value of the route's {id} or {model}
        self.field_names = FieldNames()
        self.rate_limits: RateLimits | None = None  # of a caller who exceeds them
        self.wants_cost = self.headers.get("x-emberline-cost", "").lower() in ("true", "1")
        self.wants_queue_position = self.headers.get("x-emberline-queue-position", "").lower() in ("true", "1")
        self.works: list[Work] = []  # that the call has the service run
        self.dialect: Dialect
        self.principal: Principal  # set on routes that need a key

    @property
    def needs_key(self) -> bool:
        return self._auth.needs_key

    @property
    def shares_kv(self) -> bool:
        """Accounts share cached KV: it is not known whose it is."""
        return self._auth.shares_kv

    def salt_of(self, account: str) -> bytes:
        """Salt of an account's cached KV."""
        return self._auth.salt_of(account)

    @property
    def trusted(self) -> bool:
        """True if the caller of an open route is an admin."""
        try:
            return self._auth.check(self.scope["headers"]).is_admin
        except EmberlineError:
            return False

    def known_models(self) -> "list[ModelCard]":
        """On an open route, the models that the caller may use; none if it has not proven who it is."""
        try:
            caller = self._auth.check(self.scope["headers"])
        except EmberlineError:
            return []
        return self._seen_by(caller)

    def models(self) -> "list[ModelCard]":
        """Models that the caller may use, with the prices that are valid now."""
        cards = self._seen_by(self.principal)
        if self._accounts is None:
            return cards
        prices, now_us = self._accounts.prices.table, time.time_ns() // 1000
        current = {card.id: prices.find(card.id, now_us) for card in cards if prices.history(card.id)}
        return [msgspec.structs.replace(card, price=current.get(card.id, card.price)) for card in cards]

    def _seen_by(self, caller: "Principal") -> "list[ModelCard]":
        account = None if caller.is_admin else caller.account
        cards = [card for card in self.service.models.cards() if card.is_seen_by(account)]
        return [card for card in cards if caller.may_use((card.id, *card.aliases))]

    @property
    def webhooks(self) -> "WebhookService":
        if self._webhooks is None:
            raise Unavailable("this server was started without a store: it keeps no events")
        return self._webhooks

    @property
    def has_accounts(self) -> bool:
        return self._accounts is not None

    @property
    def accounts(self) -> "AccountService":
        if self._accounts is None:
            raise Unavailable("this server was started without a store: it has no accounts")
        return self._accounts

    def actor(self) -> Actor:
        """Return the actor for an audit entry that the endpoint makes itself. Only the connection tells the client's
        address."""
        self.is_audited = True
        client = self.scope.get("client")
        return Actor(self.principal.key_id or "local", client[0] if client else "")

    @property
    def has_pulls(self) -> bool:
        return self._pulls is not None

    @property
    def pulls(self) -> "ModelPulls":
        if self._pulls is None:
            raise Unavailable("this server adds no models")
        return self._pulls

    @property
    def has_gateways(self) -> bool:
        return self._gateways is not None

    @property
    def gateways(self) -> "GatewayService":
        if self._gateways is None:
            raise Unavailable("this server was started without a store: it has no gateways")
        return self._gateways

    @cached_property
    def gateway(self) -> StageChain | None:
        """The gateway that the request goes through, as its path, its body or a header says. Returns None if none."""
        options = from_headers(self.headers)
        if options is None and not self.gateway_name:
            return None
        return self._open_gateway(options or GatewayOptions())

    def use_gateway(self, options: GatewayOptions) -> StageChain:
        """Open the gateway that the body asks for; the headers count for what the body leaves out."""
        found = self.gateway = self._open_gateway(merge(options, from_headers(self.headers)))
        return found

    def _open_gateway(self, options: GatewayOptions) -> StageChain:
        name = self.gateway_name
        self._gateway = open_chain(self.gateways, options, self.principal, self.service, self.id, name)
        return self._gateway

    def refuse_gateway(self, field: str) -> None:
        """Refuse a gateway for a request that is queued: a gateway answers at once."""
        if self.gateway is not None:
            raise Unsupported(f"a gateway answers at once: leave `{field}` out, or the gateway", param=field)

    def use_model(self, name: str) -> "ModelCard":
        """Look up the model that the request is for, once, and keep it as `card`.

        Through a gateway it is the model that is tried first. Raises ModelNotFound if there is no such model."""
        if self.gateway is not None:
            self.card = self.gateway.rules.use_model(name, self.session, self.id)
        else:
            caller = self.id if not self.session else alias_caller(self.principal.account, self.session, self.id)
            self.card = self.service.models.find(name, self.principal.account, caller)
        return self.card

    def model_card(self, name: str) -> "ModelCard":
        """The model that was looked up when the body was read, or now if its first look could not read the name."""
        return self.card or self.use_model(name)

    def only_model(self) -> str:
        """The id of the model for a request that names none: the only one named at start; without such a model, the
        only one on this machine; else the only one of other servers. Raises BadInput unless there is exactly one.

        The choice does not depend on what happens to be loaded: the same request would reach different models."""
        every, known = [card.id for card in self.models()], self.service.models
        ids = [model for model in every if known.state(model) != UPSTREAM] or every
        candidates = [model for model in ids if known.is_named_at_start(model)] or ids
        if len(candidates) == 1:
            return candidates[0]
        if not ids:
            raise BadInput("`model` is missing", param="model")
        others = f" and {len(ids) - MAX_NAMED} others" if len(ids) > MAX_NAMED else ""
        raise BadInput(f"`model` is missing: name one of {', '.join(ids[:MAX_NAMED])}{others}", param="model")

    @property
    def has_queue(self) -> bool:
        return self._batches is not None

    @property
    def batches(self) -> BatchQueue:
        if self._batches is None:
            raise Unavailable("this server was started without a store: it has no queue")
        return self._batches

    @property
    def queue(self) -> "Queue":
        return self.batches.queue

    @property
    def session_final(self) -> bool:
        """True if the client says that its session ends with this request."""
        value = self.headers.get("x-session-final") or "false"
        if value not in ("true", "false"):
            raise BadInput("`x-session-final` must be true or false", param="x-session-final")
        return value == "true"

    @property
    def traceparent(self) -> str:
        """The trace that the request belongs to, for work that it queues; empty if it is not traced."""
        trace = trace_context.current.get()
        return "" if trace is None else trace.traceparent

    @property
    def id_headers(self) -> HeaderList:
        """The request id, and neurons, as Cloudflare's clients read them from a generation's response."""
        ids, cost_pico, neurons = (b"cf-ai-req-id", self.id.encode()), 0, None
        for work in self.works:
            completed = work.completed
            if completed is not None and completed.price is not None and completed.cost_pico is not None:
                cost_pico += completed.cost_pico
                neurons = completed.price.neurons(cost_pico)
        return [ids] if not neurons else [ids, (b"cf-ai-neurons", neurons.encode())]

    @property
    def loading_model(self) -> str:
        """The model of the request if it must be loaded first, or is being loaded; else empty."""
        card = self.card
        return card.id if card is not None and self.service.models.state(card.id) in _NOT_LOADED else ""

    @property
    def admitted_ns(self) -> int:
        """Monotonic time when a loaded model took the task that was run last; 0 if none has yet."""
        return self.works[-1].admitted_ns if self.works else 0

    @property
    def sequence_ids(self) -> SequenceIds | None:
        """Token ids of the task that ended last. Returns None if our engines have not computed it."""
        completed = self.works[-1].completed if self.works else None
        return completed.result if completed is not None and isinstance(completed.result, SequenceIds) else None

    @property
    def usage(self) -> Usage:
        """Usage of the task that ended last, with its cost if the client asked for that."""
        return next((work.completed.usage for work in reversed(self.works) if work.completed is not None), Usage())

    @cached_property
    def query(self) -> dict[str, str]:
        """Query parameters that have a value. Raises BadInput for an empty number, boolean or choice of the route."""
        try:
            text = self.scope["query_string"].decode("ascii")
            pairs = parse_qsl(text, keep_blank_values=True, errors="strict", max_num_fields=64)
        except ValueError as bad:
            raise BadInput(f"the query string cannot be parsed: {bad}") from None
        if any("\0" in value for _, value in pairs):  # which PostgreSQL takes in no text
            raise BadInput("the query string contains a NUL character")
        for name, value in pairs:
            if not value and name in self.query_schemas and not _takes_any_text(self.query_schemas[name]):
                raise BadInput(f"`{name}` is empty: give it a value, or leave it out", param=name)
        found = {name: value for name, value in pairs if value}
        for name, schema in self.query_schemas.items():
            if name in found:
                _check_choice(name, found[name], schema)
        return found

    def int_param(self, name: str, default: int, least: int, most: int) -> int:
        text = self.query.get(name)
        return default if text is None else parse_int(text, name, least, most)

    def enum_param(self, name: str, allowed: Sequence[str], default: str) -> str:
        text = self.query.get(name, default)
        if text not in allowed:
            raise BadInput(f"`{name}` must be one of {', '.join(allowed)}", param=name)
        return text

    def bool_param(self, name: str, default: bool = False) -> bool:
        return self.enum_param(name, ("true", "false"), "true" if default else "false") == "true"

    def run(self, task: Task) -> TaskEvents:
        """Run a task for the caller, through the gateway if there is one."""
        if isinstance(task, GenerateRequest) and self.session_final:
            task = msgspec.structs.replace(task, session_final=True)
        work, gateway = Work(task, self.principal, wants_cost=self.wants_cost), self.gateway
        if gateway is not None:
            gateway.apply(work)
        elif (card := self.card) is not None:
            models = self.service.models
            if task.session != self.session and task.model.lower() in models.aliases.aliases:
                # A session that only the task itself has decides what an alias stands for.
                account = self.principal.account
                card = models.find(task.model, account, alias_caller(account, task.session, self.id))
            work.card, work.target = card, self.target if card is self.card else None
        self.works.append(work)
        return self.service.run(work)

    async def result(self, task: Task) -> Any:
        """Run a task whose result comes whole. Returns its result. A client that disconnects cancels the task."""
        return await while_connected(self, result_of(self.run(task)))

    async def count_tokens(self, request: GenerateRequest) -> int:
        """Tokens of the request's prompt. A gateway's routes and rules are for requests that generate."""
        return await self.service.count_tokens(request, self.principal, self.target_of(request.model))

    def target_of(self, model: str) -> "Target":
        """Resolve how the caller reaches a model. Raises Forbidden if the key may not use it."""
        own_key = None if self.gateway is None else self.gateway.rules.own_key
        return self.service.models.target(self.model_card(model), self.principal, own_key)

    async def reply(self, reply: Reply) -> None:
        headers = [
            (b"content-type", reply.content_type),
            (b"content-length", b"%d" % (len(reply.body) + sum(map(len, reply.rest)))),
            (b"x-request-id", self.id.encode()),
            *reply.headers,
        ]
        await self.start(reply.status, headers)
        await self.send({"type": "http.response.body", "body": reply.body, "more_body": bool(reply.rest)})
        for part in reply.rest:
            await self.send({"type": "http.response.body", "body": part, "more_body": True})
        if reply.rest:
            await self.send({"type": "http.response.body", "body": b""})

    async def start_stream(self, headers: HeaderList, content_type: bytes = EVENT_STREAM) -> None:
        """Send the headers of an event stream."""
        fixed = [(b"content-type", content_type), *_STREAM_HEADERS]
        await self.start(200, [*fixed, (b"x-request-id", self.id.encode()), *headers])

    async def start(self, status: int, headers: HeaderList) -> None:
        self.status = status
        limits = self.rate_limits
        for work in reversed(self.works):
            limits = limits or work.rate_limits
        if limits is not None:
            headers = [*headers, *rate_limit_headers(limits, self.dialect)]
        if self._gateway is not None:
            headers = [*headers, *self._gateway.headers()]
        warnings: list[bytes] = []
        if unknown := self.unknown_form_fields if self.wire is None else self.wire.unknown:
            warnings.append(warning(unknown))
        if self.wire is not None and self.works and self.works[-1].ignores_reasoning:
            warnings.append(reasoning_warning(self.wire.fields, self.works[-1].task.model))
        for value in warnings:
            unknown_field_log.add_warning(self.route, value)
        if warnings:
            headers = [*headers, (HEADER.encode(), b"; ".join(warnings))]
        await self.send({"type": "http.response.start", "status": status, "headers": headers})


def _check_choice(name: str, text: str, schema: Mapping[str, Any]) -> None:
    """Raise BadInput for a value that is none of a parameter's choices."""
    choices = schema.get("enum", ())
    if schema.get("type") == "boolean":
        text, choices = text.lower(), ("true", "false")
    if choices and text not in choices:
        raise BadInput(f"`{name}` must be one of {', '.join(choices)}", param=name)


def _takes_any_text(schema: Mapping[str, Any]) -> bool:
    return schema.get("type") == "string" and "enum" not in schema


def parse_int(text: str, name: str, least: int, most: int) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 12 and least <= int(text) <= most):
        raise BadInput(f"`{name}` must be an integer from {least} to {most}", param=name)
    return int(text)


async def while_connected(call: HttpExchange, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`; if the client disconnects first, cancel it and raise ClientDisconnected.

    The request body must have been read, so that nothing but the disconnect is still to be received. `work` runs in a
    task of its own: each token resumes that task, and not all the coroutines that wait for the end of the response. A
    cancellation of the caller's task cancels `work`.
    """
    working = asyncio.create_task(work)
    has_left = False

    def left(disconnected: "asyncio.Future[None]") -> None:
        nonlocal has_left
        if not disconnected.cancelled():
            disconnected.exception()  # retrieved, so that asyncio does not log it
            has_left = working.cancel()

    disconnected: asyncio.Future[None] | None = call.scope.get(DISCONNECTED)
    watcher = None  # of servers other than ours, which tell of a disconnect by a message alone
    if disconnected is None:
        disconnected = watcher = asyncio.create_task(_disconnect(call.receive))
    disconnected.add_done_callback(left)
    caller = asyncio.current_task()
    assert caller is not None
    try:
        return await working
    except (Exception, asyncio.CancelledError):
        if not has_left or caller.cancelling():  # else the server stops
            raise
        raise ClientDisconnected from None
    finally:
        disconnected.remove_done_callback(left)
        if watcher is not None:
            watcher.cancel()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
