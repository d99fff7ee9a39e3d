"""The ASGI app: guard, route, authorise, answer; every error in its caller's dialect, every request one log line."""

import asyncio
import logging
import time
from dataclasses import dataclass
from urllib.parse import quote

from emberline import log as logs
from emberline.accounts.auth import LOCAL_ACCOUNT, Authenticator
from emberline.api.batch_loader import BatchService
from emberline.api.http.call import ASGIApp, Backend, Call, ClientLeft, Receive, Reply, Scope, Send, json_reply
from emberline.api.http.errors import Dialect, error_body, error_headers
from emberline.api.http.guard import Guard, answering, preflight
from emberline.api.http.router import Policy, Router
from emberline.api.routes import ROUTES
from emberline.jobs.webhooks.service import WebhookService
from emberline.protocol.errors import EmberlineError, Internal, Unavailable

log = logging.getLogger(__name__)

CLIENT_LEFT = 499  # in the log only
PROBES = frozenset({"/health", "/metrics", "/api/ps"})  # asked every few seconds by machines and our own page


@dataclass(frozen=True)
class ApiSettings:
    auth: Authenticator
    hosts: tuple[str, ...] = ()  # names to answer to beside loopback's and the address dialled; "*": any
    origins: tuple[str, ...] = ()  # web pages that may call, beside our own; "*": any


def create_app(
    service: Backend, settings: ApiSettings, events: WebhookService | None = None, batches: BatchService | None = None
) -> ASGIApp:
    return App(service, settings, events, batches)


class App:
    def __init__(
        self,
        service: Backend,
        settings: ApiSettings,
        events: WebhookService | None = None,
        batches: BatchService | None = None,
    ) -> None:
        self._service = service
        self._events = events
        self._batches = batches
        self._auth = settings.auth
        self._guard = Guard(settings.hosts, settings.origins)
        self._router = Router(ROUTES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await _lifespan(receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        began = time.perf_counter()
        call = Call(scope, receive, send, self._service, self._auth, self._events, self._batches)
        context = logs.request_id.set(call.id)
        try:
            await self._serve(call)
        finally:
            _log_request(call, time.perf_counter() - began)
            logs.request_id.reset(context)

    async def _serve(self, call: Call) -> None:
        """Answer, whatever happens. Once the answer has begun (call.status is set) there is nothing left to say."""
        try:
            reply = await self._answer(call)
        except ClientLeft:
            call.status = call.status or CLIENT_LEFT
            return
        except EmberlineError as error:
            reply = error_reply(call.names.retell(error), call.dialect, call.id)
        except asyncio.CancelledError:
            if call.status:  # the stream has said it
                return
            reply = error_reply(Unavailable("the server is stopping"), call.dialect, call.id)
        except Exception:
            if call.status:
                raise
            log.exception("a request failed")
            failed = Internal("the request failed; the server's log has the reason under this request's id")
            reply = error_reply(failed, call.dialect, call.id)
        if reply is not None:
            await call.reply(reply)

    async def _answer(self, call: Call) -> Reply | None:
        scope = call.scope
        raw_path: bytes = scope.get("raw_path") or quote(scope["path"]).encode()
        call.dialect = self._router.dialect(raw_path)
        if origin := self._guard.check(scope):
            call.send = answering(call.send, origin)
            if reply := preflight(scope):
                return reply
        route, account, call.tail = self._router.match(scope["method"], raw_path)
        if route.policy is not Policy.OPEN:
            call.principal = self._auth.authenticate(call.headers, LOCAL_ACCOUNT if account is None else account)
        return await route.endpoint(call)


def error_reply(error: EmberlineError, dialect: Dialect, request_id: str) -> Reply:
    status, headers = error_headers(error, dialect, request_id)
    return json_reply(error_body(error, dialect, request_id), status, headers)


def _log_request(call: Call, took_s: float) -> None:
    scope = call.scope
    level = logging.DEBUG if scope["path"] in PROBES else logging.INFO
    if not log.isEnabledFor(level):
        return
    extra: dict[str, object] = {"status": call.status, "ms": round(took_s * 1000, 1)}
    if theirs := call.headers.get("x-request-id"):
        extra["client_request_id"] = theirs[:64]
    log.log(level, "%s %s", scope["method"], scope["path"][:200], extra=extra)


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return
