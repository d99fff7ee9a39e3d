"""One try of a request on other people's servers: decode's exchange and, where the work is split, prefill's half."""

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

import msgspec

from emberline.protocol.errors import BadInput, ContextExceeded, EmberlineError, Overloaded, TooLarge
from emberline.upstream.client import Upstream
from emberline.upstream.disaggregation import Adapter, BadAnswer, Fields, encode
from emberline.upstream.http_client import MAX_ANSWER_BYTES, Broken, Exchange
from emberline.upstream.sse import cached_of

MAX_ERROR_BYTES = 64 << 10
_MOST_CHARS = 1000
_CONTEXT = re.compile(r"maximum context length|context[ _]length|max_model_len|longer than the model", re.IGNORECASE)


class Busy(Overloaded):
    """The server has no room now: another may have; nobody is to blame."""


async def check_status(server: Upstream, exchange: Exchange) -> NoReturn:
    try:
        body = await exchange.read(MAX_ERROR_BYTES)
    except Broken as error:
        raise server.lost(str(error)) from error
    finally:
        exchange.close()
    status = exchange.status
    message, param = _said(body)
    if status == 429:
        raise Busy(message or f"{server.name} has no room", retry_after_s=_seconds(exchange.headers.get("retry-after")))
    if status == 413:
        raise TooLarge(message or "the request is too large for the server")
    if status in (400, 422):
        kind = ContextExceeded if _CONTEXT.search(message) else BadInput
        raise kind(message or f"the server answered {status}", param=param)
    if status in (401, 403):
        raise server.lost("does not accept the key that is configured for it")
    raise server.lost(f"answered {status}{f': {message[:200]}' if message else ''}")


def _said(body: bytes) -> tuple[str, str | None]:
    """The message of an error as OpenAI's kin write it, and the field at fault; neither is trusted to be short."""
    try:
        answer: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return "", None
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    if not isinstance(error, dict):
        return str(error)[:_MOST_CHARS], None
    message = error.get("message") or error.get("detail") or ""
    param = error.get("param")
    return str(message)[:_MOST_CHARS], param[:64] if isinstance(param, str) else None


def _seconds(retry_after: str | None) -> float:
    try:
        return min(600.0, max(1.0, float(retry_after or 1)))
    except ValueError:
        return 1.0


CACHED_S = 2.0  # to wait for prefill's answer once decode has ended
RELEASE_S = 10.0  # for decode to fetch blocks that nobody wants, so that prefill can free them

log = logging.getLogger("emberline.balancer")
_background: set[asyncio.Task[None]] = set()


class Attempt:
    """`open`, then read `exchange` to its end, then `close`, which both servers notice."""

    def __init__(self, path: str, request_id: str, decode: Upstream, prefill: Upstream | None = None) -> None:
        self.decode = decode
        self.prefill = prefill
        self._path = path
        self._id = request_id  # on both legs: the servers' logs can be read side by side
        self._exchange: Exchange | None = None
        self._half: asyncio.Task[bytes] | None = None  # prefill's, where both legs run at once
        self._half_error: EmberlineError | None = None
        self._cached: int | None = None
        self._begun = False
        self._sent = False

    async def open(self, fields: Fields) -> Exchange:
        """Decode's answer, its head there and good. EngineLost names the server at fault; other errors are nobody's."""
        prefill = self.prefill
        adapter = None if prefill is None else self.decode.adapter
        if prefill is None or adapter is None:
            self._exchange = await self._decode(encode(fields))
            return self._exchange
        try:
            await adapter.learn(prefill.peer, prefill.fetch)
            plan = adapter.prepare(fields, prefill.peer, self.decode.peer)
        except (Broken, BadAnswer) as error:
            raise prefill.lost(str(error)) from error
        body = encode(plan.prefill)
        if plan.order == "serial":
            self._exchange = await self._serial(adapter, prefill, body, plan.decode)
        else:
            self._exchange = await self._concurrent(prefill, body, plan.decode)
        return self._exchange

    async def piece(self) -> bytes:
        """More of decode's answer; b"" at its end."""
        assert self._exchange is not None
        try:
            piece = await self._exchange.piece()
        except Broken as error:
            raise self._half_error or self.decode.lost(str(error)) from error
        self._begun = True
        return piece

    async def cached(self) -> int | None:
        """Prompt tokens that prefill found in its cache; None: decode's own word counts."""
        if self._half is not None and self._cached is None and self._counts:
            self._cached = 0
            with contextlib.suppress(TimeoutError, EmberlineError):
                async with asyncio.timeout(CACHED_S):
                    self._cached = cached_of(await asyncio.shield(self._half))
        return self._cached

    def close(self) -> None:
        if self._exchange is not None:
            self._exchange.close()
        if self._half is not None and not self._half.done():
            self._half.cancel()

    @property
    def _counts(self) -> bool:
        return self.decode.adapter is not None and self.decode.adapter.cached_from_prefill

    # --- the legs ----------------------------------------------------------------------------------------------------

    async def _decode(self, body: bytes) -> Exchange:
        return await _checked(self.decode, self._path, body, self._id, self._mark_sent, once=self.prefill is not None)

    def _mark_sent(self) -> None:
        self._sent = True

    async def _serial(self, adapter: Adapter, prefill: Upstream, body: bytes, decode: Fields) -> Exchange:
        exchange = await _checked(prefill, self._path, body, self._id, once=True)
        answer: bytes | None = None
        try:
            answer = await exchange.read(MAX_ANSWER_BYTES)
            patched = {**decode, **_patch(adapter, prefill, answer)}
            self._cached = cached_of(answer) if self._counts else None
            return await self._decode(encode(patched))
        except Broken as error:
            raise prefill.lost(str(error)) from error
        except asyncio.CancelledError:
            answer = exchange.taken() if answer is None else answer
            if answer and not self._sent:
                self._release(adapter, prefill, answer, decode)
            raise
        finally:
            exchange.close()

    def _release(self, adapter: Adapter, prefill: Upstream, answer: bytes, decode: Fields) -> None:
        """The client left before decode was told: only decode can free what prefill holds for it."""
        with contextlib.suppress(EmberlineError):
            patch = _patch(adapter, prefill, answer)
            if patch:
                fields = {**decode, **patch, "stream": True, "max_tokens": 1}
                if "max_completion_tokens" in fields:
                    fields["max_completion_tokens"] = 1
                fields.pop("min_tokens", None)
                _spawn(self._fetch_and_forget(encode(fields)))

    async def _fetch_and_forget(self, body: bytes) -> None:
        try:
            async with asyncio.timeout(RELEASE_S):
                exchange = await self._decode(body)
                try:
                    await exchange.piece()  # its first byte: the blocks are fetched, or the request is in the engine
                finally:
                    exchange.close()
        except (TimeoutError, Broken, EmberlineError) as error:
            log.warning("endpoint %s: blocks stay leased: %s", self.decode.name, error)

    async def _concurrent(self, prefill: Upstream, body: bytes, decode: Fields) -> Exchange:
        self._half = asyncio.create_task(self._prefill_half(prefill, body))
        self._half.add_done_callback(self._half_ended)
        answering = asyncio.create_task(self._decode(encode(decode)))
        try:
            await asyncio.wait((self._half, answering), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done() and self._half.done():
                self._half.result()  # a prefill that failed ends both
            return await answering
        except BaseException as error:
            await _dropped(answering)
            self._half.cancel()
            if isinstance(error, EmberlineError) and self._half_error is not None:
                raise self._half_error from error  # decode starves when prefill fails: the cause is what counts
            raise

    async def _prefill_half(self, prefill: Upstream, body: bytes) -> bytes:
        exchange = await _checked(prefill, self._path, body, self._id, once=True)
        try:
            return await exchange.read(MAX_ANSWER_BYTES)
        except Broken as error:
            raise prefill.lost(str(error)) from error
        finally:
            exchange.close()

    def _half_ended(self, half: "asyncio.Task[bytes]") -> None:
        error = None if half.cancelled() else half.exception()
        if isinstance(error, EmberlineError) and not self._begun:
            self._half_error = error
            if self._exchange is not None:
                self._exchange.fail("prefill failed")


async def _checked(
    server: Upstream,
    path: str,
    body: bytes,
    request_id: str,
    on_sent: Callable[[], None] | None = None,
    *,
    once: bool = False,
) -> Exchange:
    """An exchange whose status is 200; any other is told as what it is. What names a transfer goes out once."""
    try:
        exchange = await server.pool.post(path, body, request_id, on_sent=on_sent, once=once)
    except Broken as error:
        raise server.lost(str(error)) from error
    if exchange.status != 200:
        await check_status(server, exchange)
    return exchange


def _patch(adapter: Adapter, prefill: Upstream, answer: bytes) -> Fields:
    try:
        return adapter.after_prefill(msgspec.json.decode(answer))
    except (msgspec.DecodeError, RecursionError) as error:
        raise prefill.lost(f"answered no JSON: {error}") from None
    except BadAnswer as error:
        raise prefill.lost(f"cannot be used for prefill: {error}") from None


async def _dropped(answering: "asyncio.Task[Exchange]") -> None:
    """End decode's half, whatever it has come to."""
    answering.cancel()
    with contextlib.suppress(asyncio.CancelledError, EmberlineError):
        (await answering).close()


def _spawn(work: Coroutine[Any, Any, None]) -> None:
    task = asyncio.create_task(work)
    _background.add(task)
    task.add_done_callback(_background.discard)
