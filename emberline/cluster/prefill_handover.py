"""A request on two workers: the prefill worker computes the prompt and sends its KV, the decode worker generates."""

import asyncio
import secrets
import time

import msgspec

from emberline.cluster.engine_client import EngineClient, EngineStream
from emberline.protocol.errors import EmberlineError, EngineLost, Unavailable, from_info
from emberline.protocol.events import TokenDelta
from emberline.protocol.frames import transfer_mismatch, transfer_ranks, transfer_ticket
from emberline.protocol.request import EngineRequest, Push, SamplingParams


class Prefill:
    """The prefill worker's side. Its failure before the first token fails the decode worker's stream.

    Its cached tokens are those reported to the client: the decode worker cannot know what was computed elsewhere.
    """

    def __init__(self, engine: EngineClient, stream: EngineStream, request: EngineRequest) -> None:
        self._engine = engine
        self._stream = stream
        self._id = request.id
        self._open = True
        self.first_block_s: float | None = None  # when the worker reported that the first KV is sent; monotonic
        self.ended_s: float | None = None  # and when all of it was received
        self.waited_s = 0.0  # in the worker's queue
        self.error: EmberlineError | None = None  # with which it failed the decode stream
        self.n_prefilled = 0  # prompt tokens that the worker had computed, or had cached, when its sequence ended
        self._ended = asyncio.Event()
        self._cached: asyncio.Future[dict[str, int]] = asyncio.get_running_loop().create_future()
        engine.submit(self, [request])

    async def cached_by_tier(self) -> dict[str, int]:
        """Mostly known long before the first token; empty if the worker does not report it in time."""
        await asyncio.wait([self._cached], timeout=self._engine.timings.cached_wait_s)
        return self.known_cached or {}

    @property
    def known_cached(self) -> dict[str, int] | None:
        """The cached tokens by tier, if they are known now."""
        known = self._cached.done() and not self._cached.cancelled()
        return self._cached.result() if known else None

    def close(self) -> None:
        """Abort the prefill if it still runs, and wait for nothing."""
        if self._runs:
            self._open = False
            self._engine.abort([self._id])
        self._cached.cancel()

    async def end(self) -> None:
        """Abort the prefill if it still runs, and wait for the terminal delta, or until the connection is lost."""
        if self._runs:
            self._engine.request_abort([self._id])
        if self._open:
            await self._ended.wait()

    @property
    def _runs(self) -> bool:
        """False once the decode worker generates: it has all KV then, and what the prefill worker still waits for is
        the acknowledgement of the last blocks. An abort that overtakes it would make the worker count them as lost."""
        return self._open and not self._stream.begun

    # --- called by the connection ------------------------------------------------------------------------------------

    def deliver(self, delta: TokenDelta) -> None:
        if delta.usage is not None and not self._cached.done():
            self._cached.set_result(delta.usage.cached_by_tier)
            self.first_block_s, self.waited_s = time.monotonic(), delta.waited_s
        if delta.finish is None:
            return
        self._open = False
        self._ended.set()
        self.ended_s = time.monotonic()
        if delta.usage is not None and (delta.usage.partial or delta.finish == "stop"):
            self.n_prefilled = delta.usage.prompt_tokens
        if delta.finish == "stop":
            return
        self._end(
            EngineLost(self._engine.name, "gave the prompt up") if delta.error is None else from_info(delta.error)
        )

    def fail(self, error: EmberlineError) -> None:
        """The connection is lost."""
        if self._open:
            self._open = False
            self._ended.set()
            self._end(error)

    def _end(self, error: EmberlineError) -> None:
        if not self._stream.begun:
            self._cached.cancel()  # no one waits for it now
            self.error = error
            self._stream.fail(error)
        elif not self._cached.done():  # the KV had arrived; what of it was cached is not known
            self._cached.set_result({})


def prefill_id(sequence_id: str) -> str:
    """Id of the same sequence on the prefill worker."""
    return f"{sequence_id}-prefill"


def why_not_handed_over(prefill: EngineClient, decode: EngineClient) -> str:
    """Say why one worker cannot compute prompts for the other. Empty if it can."""
    mismatch = transfer_mismatch(prefill.info, decode.info)
    if not mismatch:
        return ""
    return (
        f"{prefill.name} cannot compute prompts for {decode.name}: {mismatch}; give both the same drafts "
        "(--speculation, --draft-head, --draft-model) and device"
    )


def hand_over(prefill: EngineClient, decode: EngineClient, request: EngineRequest) -> tuple[EngineStream, Prefill]:
    """Submit to both workers at once, under a new transfer id. Raises Unavailable if their KV is not of one kind."""
    if mismatch := why_not_handed_over(prefill, decode):
        raise Unavailable(mismatch)
    transfer = secrets.token_hex(16)
    stream = decode.stream([msgspec.structs.replace(request, awaits=transfer)])
    half = EngineRequest(
        id=prefill_id(request.id),
        prompt_ids=request.prompt_ids,
        sampling=SamplingParams(max_tokens=1),
        salt=request.salt,
        session=request.session,
        cache_ttl_s=request.cache_ttl_s,
        session_final=request.session_final,
        priority=request.priority,
        deadline_s=request.deadline_s,
        keys=request.keys,
        push=Push(
            transfer=transfer,
            address=decode.endpoint.address,
            sender=prefill.name,
            ticket=transfer_ticket(decode.endpoint.token, prefill.name),
            tls_host=decode.endpoint.tls_host,
            version=decode.version,
            ranks=transfer_ranks(prefill.info, decode.info),
        ),
    )
    try:
        return stream, Prefill(prefill, stream, half)
    except EmberlineError:
        stream.close()
        raise
