"""A request over two engines: one computes the prompt and pushes its KV, the other awaits it and answers."""

import asyncio
import secrets

import msgspec

from emberline.protocol.errors import EmberlineError, EngineLost, from_info
from emberline.protocol.events import TokenDelta
from emberline.protocol.request import EngineRequest, Push, SamplingParams
from emberline.service.engine_client import EngineClient, EngineStream

TELL_S = 1.0  # for the prefill engine to say what it had cached, once the first token is there


class Prefill:
    """The prefill engine's half. Its end is nobody's concern but ours; its failure ends the other half's stream.

    What it found in its cache is what the client is told: the decode engine cannot know what was computed elsewhere.
    """

    def __init__(self, engine: EngineClient, stream: EngineStream, request: EngineRequest) -> None:
        self._engine = engine
        self._stream = stream
        self._id = request.id
        self._open = True
        self.error: EmberlineError | None = None  # with which it ended the other half
        self._cached: asyncio.Future[dict[str, int]] = asyncio.get_running_loop().create_future()
        engine.submit(self, [request])

    async def cached_by_tier(self) -> dict[str, int]:
        """Known long before the first token in all but a rare race; nothing, if it is not told."""
        await asyncio.wait([self._cached], timeout=TELL_S)
        return self.told or {}

    @property
    def told(self) -> dict[str, int] | None:
        """The same, if it is known now."""
        known = self._cached.done() and not self._cached.cancelled()
        return self._cached.result() if known else None

    def close(self) -> None:
        if self._open:
            self._open = False
            self._engine.abort([self._id])
        self._cached.cancel()

    # --- called by the connection ------------------------------------------------------------------------------------

    def deliver(self, delta: TokenDelta) -> None:
        if delta.usage is not None and not self._cached.done():
            self._cached.set_result(delta.usage.cached_by_tier)
        if delta.finish is None:
            return
        self._open = False
        if delta.finish == "stop":
            return
        self._end(
            EngineLost(self._engine.name, "gave the prompt up") if delta.error is None else from_info(delta.error)
        )

    def fail(self, error: EmberlineError) -> None:
        """The connection is lost."""
        if self._open:
            self._open = False
            self._end(error)

    def _end(self, error: EmberlineError) -> None:
        if not self._stream.begun:
            self._cached.cancel()  # nobody waits for it
            self.error = error
            self._stream.fail(error)
        elif not self._cached.done():  # the KV was there before; what it was made of is not known
            self._cached.set_result({})


def hand_over(prefill: EngineClient, decode: EngineClient, request: EngineRequest) -> tuple[EngineStream, Prefill]:
    """Begin on both at once, under a transfer's name that nobody has used before."""
    transfer = secrets.token_hex(16)
    stream = decode.stream([msgspec.structs.replace(request, awaits=transfer)])
    half = EngineRequest(
        id=f"{request.id}-prefill",
        prompt_ids=request.prompt_ids,
        sampling=SamplingParams(max_tokens=1),
        salt=request.salt,
        session=request.session,
        priority=request.priority,
        deadline_s=request.deadline_s,
        keys=request.keys,
        push=Push(transfer=transfer, address=decode.endpoint.address, token=decode.endpoint.token),
    )
    try:
        return stream, Prefill(prefill, stream, half)
    except EmberlineError:
        stream.close()
        raise
