"""The ASGI application: check host and origin, route, authenticate, call the endpoint; one log entry per request."""

import asyncio
import logging
from dataclasses import dataclass
from urllib.parse import quote

from emberline import log as logs
from emberline.accounts.account_service import AccountService
from emberline.accounts.auth import Authenticator
from emberline.api.gateway.ai_binding import WRAPS, unwrap
from emberline.api.http.errors import error_body, error_headers
from emberline.api.http.exchange import (
    REQUEST_LIMITS,
    BatchQueue,
    ClientDisconnected,
    HttpExchange,
    LargeRequest,
    Reply,
    RequestLimits,
    Services,
    json_reply,
    while_connected,
)
from emberline.api.http.guard import Guard, preflight, with_cors_headers
from emberline.api.http.large_requests import LargeRequestRelay
from emberline.api.http.resumable import HEADER, send_resumable
from emberline.api.http.router import Policy, Router, authorize
from emberline.api.http.streaming import Response, Streaming, WebSocketSession, as_denial
from emberline.api.playground.assets import load as load_assets
from emberline.api.routes import ROUTES
from emberline.gateway.gateways import GatewayService
from emberline.jobs.webhooks.service import WebhookService
from emberline.net.held_bodies import held_bodies
from emberline.net.http_server import Receive, Scope, Send
from emberline.protocol import trace_context
from emberline.protocol.errors import BadInput, EmberlineError, Internal, NotFound, Unavailable
from emberline.service.model_pulls import ModelPulls
from emberline.telemetry.request_log import Clock
from emberline.telemetry.tracing import end_http_request, incoming

log = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499  # in the log only
PROBES = frozenset({"/health", "/metrics", "/api/ps", "/api/status"})  # polled every few seconds: logged at debug level
ASSETS = "/assets/"  # two dozen for a page: likewise


@dataclass(frozen=True)
class ApiSettings:
    auth: Authenticator
    hosts: tuple[str, ...] = ()  # allowed Host names besides loopback's and the connection's address; "*": any
    origins: tuple[str, ...] = ()  # allowed Origins besides our own; "*": any
    limits: RequestLimits = REQUEST_LIMITS


class App:
    def __init__(
        self,
        service: Services,
        settings: ApiSettings,
        webhooks: WebhookService | None = None,
        batches: BatchQueue | None = None,
        large_requests: LargeRequestRelay | None = None,
        accounts: AccountService | None = None,
        gateways: GatewayService | None = None,
        pulls: ModelPulls | None = None,
    ) -> None:
        """Create the app. Without `large_requests`, this process serves large requests itself."""
        self._large_requests = large_requests
        self._service = service
        self._webhooks = webhooks
        self._accounts = accounts
        self._gateways = gateways
        self._pulls = pulls
        self._batches = batches
        self._auth = settings.auth
        self._limits = settings.limits
        self._guard = Guard(settings.hosts, settings.origins)
        self._router = Router(ROUTES)
        load_assets()  # reads and compresses them now, not at the first request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await _lifespan(receive, send)
        if scope["type"] == "websocket":
            scope, send = {**scope, "method": "GET"}, as_denial(send)
        if WRAPS in dict(scope["headers"]):
            scope = unwrap(scope)
        clock = Clock()
        relays_large = self._large_requests is not None
        call = HttpExchange(
            *(scope, receive, send, self._service, self._auth, self._webhooks, self._batches, relays_large),
            accounts=self._accounts,
            gateways=self._gateways,
            pulls=self._pulls,
            limits=self._limits,
        )
        context = logs.request_id.set(call.id)
        traced, parent = (None, None) if scope["path"] in PROBES else incoming(call.headers)
        trace_token = trace_context.current.set(traced)
        try:
            await self._serve(call)
        finally:
            held_bodies.release(call)
            if traced is not None:
                end_http_request(traced, parent, clock, scope["method"], call.route, call.status, call.id)
            _log_request(call, clock)
            trace_context.current.reset(trace_token)
            logs.request_id.reset(context)

    async def _serve(self, call: HttpExchange) -> None:
        """Send a response to every request. Once one has started (call.status is set), no error can be reported."""
        try:
            reply = await self._dispatch(call)
            if isinstance(reply, Streaming):
                reply = await _deliver(call, reply)
            elif isinstance(reply, WebSocketSession):
                return await reply.serve(call, self)
        except ClientDisconnected:
            call.status = call.status or CLIENT_CLOSED_REQUEST
            return
        except EmberlineError as error:
            reply = _error_reply(call, call.field_names.rename(error))
        except asyncio.CancelledError:
            if call.status:  # the stream has sent its error event
                return
            reply = _error_reply(call, Unavailable("the server is stopping"))
        except Exception:
            if call.status:
                raise
            log.exception("a request failed")
            reply = _error_reply(
                call, Internal("the request failed; the server's log has the reason under this request's id")
            )
        if reply is not None:
            await call.reply(reply)

    async def _dispatch(self, call: HttpExchange) -> Response | None:
        scope = call.scope
        raw_path: bytes = scope.get("raw_path") or quote(scope["path"]).encode()
        found = self._router.find(raw_path)
        call.dialect = found.dialect
        origin = self._guard.readable_by(scope) if "origin" in call.headers else None
        if origin is not None:
            call.send = with_cors_headers(call.send, origin)
        self._guard.check(scope)
        if origin is not None and (reply := preflight(scope)):
            return reply
        route = found.route(scope["method"])
        if scope["type"] == "websocket" and not route.opens_websocket:
            raise BadInput(f"{route.path} is no WebSocket: send the request without `Upgrade`", param="upgrade")
        if "\0" in found.path_param and "{id}" in route.path:  # PostgreSQL takes it in no text
            raise NotFound("no id contains a NUL character")
        call.path_param, call.route, call.gateway_name = found.path_param, route.path, found.gateway
        call.query_schemas = route.query or {}
        if route.policy is not Policy.OPEN:
            call.principal = await self._auth.authenticate(scope["headers"], found.account)
            if call.principal.role != "admin":
                authorize(call.principal, route)
        if route.query:
            _ = call.query  # refuses what the route's schemas do not allow, also where the endpoint does not look
        try:
            response = await route.endpoint(call)
        except LargeRequest as large:
            max_bytes = large.max_bytes
        else:
            if route.policy is Policy.ADMIN and route.method != "GET" and not call.is_audited and call.has_accounts:
                target = call.audit_target or call.path_param
                await call.accounts.audit.record(call.actor(), f"{route.method} {route.path}", target)
            return response
        # Not inside `except`: the exception's frames hold the body, and a relayed stream may last for minutes.
        assert self._large_requests is not None
        await self._large_requests.relay(call, max_bytes)
        return None


async def _deliver(call: HttpExchange, streaming: Streaming) -> Reply | None:
    """Send a response as it is produced. Returns the reply to send instead, if it fails before its first byte."""
    response: Response = streaming
    while isinstance(response, Streaming):
        resumable = HEADER in call.headers and response.failed is not None
        try:
            return await while_connected(call, send_resumable(call, response) if resumable else response.send(call))
        except EmberlineError as error:
            if call.status or response.otherwise is None:
                raise
            failure = error
        # Not inside `except`: the error's frames hold the body.
        response = await response.otherwise(failure)
    assert not isinstance(response, WebSocketSession), "a handshake is answered at once"
    return response


def _error_reply(call: HttpExchange, error: EmberlineError) -> Reply:
    status, headers = error_headers(error, call.dialect, call.id)
    call.rate_limits = error.rate_limits or call.rate_limits
    return json_reply(error_body(error, call.dialect, call.id), status, headers)


def _log_request(call: HttpExchange, clock: Clock) -> None:
    """Log a request, at debug level if it is a probe or if its task has a line of its own (`telemetry/request_log.py`).

    A task's line has neither an error's status nor the client's own request id."""
    scope = call.scope
    is_probe = scope["path"] in PROBES or scope["path"].startswith(ASSETS)
    has_line = call.works and call.works[-1].admitted_ns and call.status < 400 and "x-request-id" not in call.headers
    is_quiet = is_probe or has_line
    level = logging.DEBUG if is_quiet else logging.INFO
    if not log.isEnabledFor(level):
        return
    extra: dict[str, object] = {"status": call.status, "ms": round(clock.elapsed_s() * 1000, 1)}
    if client_id := call.headers.get("x-request-id"):
        extra["client_request_id"] = client_id[:64]
    log.log(level, "%s %s", scope["method"], scope["path"][:200], extra=extra)


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return
