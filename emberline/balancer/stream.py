"""What one request receives from one engine."""

import asyncio
from typing import Protocol

from emberline.protocol.errors import EmberlineError
from emberline.protocol.events import TokenDelta
from emberline.protocol.request import EngineRequest


class Sender(Protocol):
    """The engine's end of a stream, as the stream needs it."""

    def submit(self, stream: "Stream", requests: list[EngineRequest]) -> None: ...

    def abort(self, ids: list[str]) -> None: ...


class Stream:
    """The deltas of a request's sequences, in order. The engine's connection fills it, one consumer drains it.

    A list and a future, not a queue: at most one waiter exists, and deltas that arrive before it runs go over together.
    """

    __slots__ = ("_deltas", "_error", "_loop", "_open_ids", "_sender", "_waiter", "begun")

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._loop = asyncio.get_running_loop()
        self._deltas: list[TokenDelta] = []
        self._waiter: asyncio.Future[None] | None = None
        self._error: EmberlineError | None = None
        self._open_ids: set[str] = set()
        self.begun = False  # a delta has come

    def submit(self, requests: list[EngineRequest]) -> None:
        """Add sequences; their deltas come out of this stream too. Unavailable when the engine is gone."""
        self._sender.submit(self, requests)
        self._open_ids.update(request.id for request in requests)

    async def next(self) -> list[TokenDelta]:
        """Everything that has arrived, at least one delta; raises once the stream has failed and is empty."""
        while not self._deltas:
            if self._error is not None:
                raise self._error
            assert self._open_ids, "every sequence of the stream has ended"
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        deltas = self._deltas
        self._deltas = []
        return deltas

    def abort(self, sequence_id: str) -> None:
        """Stop one sequence; nothing more of it is delivered."""
        if sequence_id in self._open_ids:
            self._open_ids.discard(sequence_id)
            self._sender.abort([sequence_id])

    def close(self) -> None:
        """Stop what still runs. The consumer has left."""
        if self._open_ids:
            self._sender.abort(list(self._open_ids))
            self._open_ids.clear()

    # --- called by the connection ------------------------------------------------------------------------------------

    def deliver(self, delta: TokenDelta) -> None:
        self.begun = True
        if delta.finish is not None:
            self._open_ids.discard(delta.id)
        self._deltas.append(delta)
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def fail(self, error: EmberlineError) -> None:
        """End the stream with an error; what has been delivered is still handed out first."""
        if self._error is None:
            self._error = error
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
