"""One attempt of a request: an exchange with the decode server and, when disaggregated, one with a prefill server."""

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import msgspec

from emberline.net.http_client import MAX_REPLY_BYTES, ConnectionFailed, Exchange, retry_after_s
from emberline.protocol.errors import BadInput, ContextExceeded, EmberlineError, Overloaded, TooLarge
from emberline.protocol.trace_context import TraceContext
from emberline.upstream.dialects.sse import cached_of
from emberline.upstream.servers.client import UpstreamClient
from emberline.upstream.servers.disaggregation import Adapter, BadPrefillReply, Fields, encode

CACHED_WAIT_S = 2.0  # for the prefill server's reply once the decode server's is at its usage
RELEASE_S = 10.0  # for the decode server to fetch blocks of a cancelled request, so that prefill can free them
MAX_ERROR_BYTES = 64 << 10
_MAX_MESSAGE_CHARS = 1000
CONTEXT_EXCEEDED = re.compile(
    r"maximum context length|context[ _]length|max_model_len|longer than the model|prompt is too long"
    r"|exceeds the maximum number of tokens",
    re.IGNORECASE,
)

log = logging.getLogger("emberline.balancer")
_releases: set[asyncio.Task[None]] = set()  # keeps the tasks alive


class UpstreamBusy(Overloaded):
    """HTTP 429: another server may have room. No fault of the server's."""


class Attempt:
    """`open`, then read the exchange, then `close`: closing early aborts the work on both servers."""

    def __init__(
        self,
        path: str,
        request_id: str,
        decode: UpstreamClient,
        prefill: UpstreamClient | None = None,
        trace: TraceContext | None = None,
    ) -> None:
        self.decode = decode
        self.prefill = prefill
        self._path = path
        # Sent to both servers, so that their logs and traces can be joined.
        self._ids = f"x-request-id: {request_id}\r\n{'' if trace is None else trace.headers}"
        self._exchange: Exchange | None = None
        self._prefilling: asyncio.Task[bytes] | None = None  # where both exchanges run at once
        self._prefill_error: EmberlineError | None = None
        self._cached: int | None = None
        self._sent = False  # the decode server has the request, or will have it

    async def open(self, fields: Fields) -> Exchange:
        """The decode server's reply, its status 200. EngineLost names the server at fault.

        A reply that is cut off raises ConnectionFailed where it is read; `failure` says what that means."""
        prefill = self.prefill
        adapter = None if prefill is None else self.decode.adapter
        if prefill is None or adapter is None:
            once = prefill is not None
            self._exchange = await _checked(self.decode, self._path, encode(fields), self._ids, once=once)
            return self._exchange
        try:
            await adapter.learn(prefill.peer, prefill.fetch)
            plan = adapter.plan(fields, prefill.peer)
        except (ConnectionFailed, BadPrefillReply) as error:
            raise prefill.lost(str(error)) from error
        body = encode(plan.prefill)
        if plan.order == "serial":
            self._exchange = await self._serial(adapter, prefill, body, plan.decode)
        else:
            self._exchange = await self._concurrent(prefill, body, plan.decode)
        return self._exchange

    def failure(self, error: ConnectionFailed) -> EmberlineError:
        """The error of a request whose reply was cut off; it names the server at fault."""
        return self._prefill_error or self.decode.lost(str(error))

    async def cached(self) -> int | None:
        """Prompt tokens that the prefill server found in its cache; None: the decode server reports them."""
        if self._prefilling is not None and self._cached is None and self._cached_from_prefill:
            self._cached = 0
            with contextlib.suppress(TimeoutError, EmberlineError):
                async with asyncio.timeout(CACHED_WAIT_S):
                    self._cached = cached_of(await asyncio.shield(self._prefilling))
        return self._cached

    def close(self) -> None:
        if self._exchange is not None:
            self._exchange.close()
        if self._prefilling is not None and not self._prefilling.done():
            self._prefilling.cancel()

    @property
    def _cached_from_prefill(self) -> bool:
        return self.decode.adapter is not None and self.decode.adapter.cached_from_prefill

    # --- the two exchanges -------------------------------------------------------------------------------------------

    async def _decode(self, body: bytes) -> Exchange:
        return await _checked(self.decode, self._path, body, self._ids, self._mark_sent, once=True)

    def _mark_sent(self) -> None:
        self._sent = True

    async def _serial(self, adapter: Adapter, prefill: UpstreamClient, body: bytes, decode: Fields) -> Exchange:
        exchange = await _checked(prefill, self._path, body, self._ids, once=True)
        answer: bytes | None = None
        try:
            answer = await exchange.read(MAX_REPLY_BYTES)
            patched = {**decode, **_patch(adapter, prefill, answer)}
            self._cached = cached_of(answer) if self._cached_from_prefill else None
            return await self._decode(encode(patched))
        except ConnectionFailed as error:
            raise prefill.lost(str(error)) from error
        except asyncio.CancelledError:
            answer = exchange.buffered() if answer is None else answer
            if answer and not self._sent:
                self._release(adapter, prefill, answer, decode)
            raise
        finally:
            exchange.close()

    def _release(self, adapter: Adapter, prefill: UpstreamClient, answer: bytes, decode: Fields) -> None:
        """Cancelled before the decode server had the request: only a fetch by it frees the prefill server's blocks."""
        with contextlib.suppress(EmberlineError):
            patch = _patch(adapter, prefill, answer)
            if patch:
                fields = {**decode, **patch, "stream": True, "max_tokens": 1}
                if "max_completion_tokens" in fields:
                    fields["max_completion_tokens"] = 1
                fields.pop("min_tokens", None)
                task = asyncio.create_task(self._fetch_blocks(encode(fields)))
                _releases.add(task)
                task.add_done_callback(_releases.discard)

    async def _fetch_blocks(self, body: bytes) -> None:
        try:
            async with asyncio.timeout(RELEASE_S):
                exchange = await self._decode(body)
                try:
                    await exchange.piece()  # by its first byte the blocks are fetched
                finally:
                    exchange.close()
        except (TimeoutError, ConnectionFailed, EmberlineError) as error:
            log.warning("endpoint %s: the blocks of a cancelled request stay leased: %s", self.decode.name, error)

    async def _concurrent(self, prefill: UpstreamClient, body: bytes, decode: Fields) -> Exchange:
        self._prefilling = asyncio.create_task(self._run_prefill(prefill, body))
        self._prefilling.add_done_callback(self._prefill_ended)
        answering = asyncio.create_task(self._decode(encode(decode)))
        try:
            await asyncio.wait((self._prefilling, answering), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done() and self._prefilling.done():
                self._prefilling.result()  # raises where prefill has failed
            return await answering
        except BaseException as error:
            await _abandon(answering)
            self._prefilling.cancel()
            if isinstance(error, EmberlineError) and self._prefill_error is not None:
                raise self._prefill_error from error  # the cause: without its KV, decode fails too
            raise

    async def _run_prefill(self, prefill: UpstreamClient, body: bytes) -> bytes:
        exchange = await _checked(prefill, self._path, body, self._ids, once=True)
        try:
            return await exchange.read(MAX_REPLY_BYTES)
        except ConnectionFailed as error:
            raise prefill.lost(str(error)) from error
        finally:
            exchange.close()

    def _prefill_ended(self, half: "asyncio.Task[bytes]") -> None:
        error = None if half.cancelled() else half.exception()
        if isinstance(error, EmberlineError) and not (self._exchange is not None and self._exchange.was_read):
            self._prefill_error = error
            if self._exchange is not None:
                self._exchange.fail("prefill failed")


async def _checked(
    server: UpstreamClient,
    path: str,
    body: bytes,
    ids: str,
    on_sent: Callable[[], None] | None = None,
    *,
    once: bool = False,
) -> Exchange:
    """An exchange whose status is 200. `once`: a request that names a KV transfer must not be sent twice."""
    try:
        exchange = await server.pool.post(path, body, ids, on_sent=on_sent, once=once)
    except ConnectionFailed as error:
        raise server.lost(str(error)) from error
    if exchange.status != 200:
        await _raise_status(server, exchange)
    return exchange


def _patch(adapter: Adapter, prefill: UpstreamClient, answer: bytes) -> Fields:
    try:
        return adapter.after_prefill(msgspec.json.decode(answer))
    except (msgspec.DecodeError, RecursionError) as error:
        raise prefill.lost(f"answered no JSON: {error}") from None
    except BadPrefillReply as error:
        raise prefill.lost(f"cannot be used for prefill: {error}") from None


async def _abandon(answering: "asyncio.Task[Exchange]") -> None:
    """Cancel the decode server's exchange, whatever state it is in."""
    answering.cancel()
    with contextlib.suppress(asyncio.CancelledError, EmberlineError):
        (await answering).close()


async def _raise_status(server: UpstreamClient, exchange: Exchange) -> NoReturn:
    """The error that a status other than 200 stands for."""
    try:
        body = await exchange.read(MAX_ERROR_BYTES)
    except ConnectionFailed as error:
        raise server.lost(str(error)) from error
    finally:
        exchange.close()
    status = exchange.status
    message, param = _error_of(body)
    if status == 429:
        raise UpstreamBusy(message or f"{server.name} has no room", retry_after_s=_retry_after_s(exchange.headers))
    if status == 413:
        raise TooLarge(message or "the request is too large for the server")
    if status in (400, 422):
        kind = ContextExceeded if CONTEXT_EXCEEDED.search(message) else BadInput
        raise kind(message or f"the server answered {status}", param=param)
    if status in (401, 403):
        raise server.lost("does not accept the key that is configured for it")
    raise server.lost(f"answered {status}{f': {message[:200]}' if message else ''}")


def _error_of(body: bytes) -> tuple[str, str | None]:
    """Message and `param` of an OpenAI error object, shortened."""
    try:
        answer: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return "", None
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    if not isinstance(error, dict):
        return str(error)[:_MAX_MESSAGE_CHARS], None
    message = error.get("message") or error.get("detail") or ""
    param = error.get("param")
    return str(message)[:_MAX_MESSAGE_CHARS], param[:64] if isinstance(param, str) else None


def _retry_after_s(headers: Mapping[str, str]) -> float:
    return min(600.0, max(1.0, retry_after_s(headers) or 1.0))
