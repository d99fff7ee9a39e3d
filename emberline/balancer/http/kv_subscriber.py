"""KV events over ZMQ. The library is an extra (`pip install emberline[kv-events]`): most servers publish none."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any

from emberline.balancer.http.kv_feed import BadEvents, KVFeed
from emberline.protocol.frames import KVEvents

REPLAY_S = 5.0
END = (1 << 64) - 1  # -1 as 8 bytes: the replay is over
_QUEUE = 100_000  # messages kept for us while we are busy
_RETRY_S = 5.0

log = logging.getLogger("emberline.balancer")


class KVSubscriber:
    """Follows one server's events; a gap is replayed where the server can, else all that was known is forgotten."""

    def __init__(
        self, name: str, address: str, replay: str, chain_root: bytes, tell: Callable[[KVEvents], None]
    ) -> None:
        self._name = name
        self._address = address
        self._replay = replay
        self._tell = tell
        self.feed = KVFeed(chain_root)
        self.problem = ""
        self.n_gaps = 0
        self._next: int | None = None  # the number that the next message should have

    async def run(self) -> None:
        """Until cancelled. What the server does wrong is logged and forgotten; listening goes on."""
        try:
            import zmq
            import zmq.asyncio
        except ImportError:
            self.problem = "KV events need pyzmq: pip install 'emberline[kv-events]'"
            log.error("endpoint %s: %s", self._name, self.problem)
            return
        context = zmq.asyncio.Context.instance()
        while True:
            socket = context.socket(zmq.SUB)
            socket.set(zmq.RCVHWM, _QUEUE)
            socket.set(zmq.LINGER, 0)
            try:
                socket.connect(self._address)
                socket.subscribe(b"")
                while True:
                    await self._received(context, await socket.recv_multipart())
            except zmq.ZMQError as error:
                self._forget(f"KV events of {self._address}: {error}")
                await asyncio.sleep(_RETRY_S)
            finally:
                socket.close()

    async def _received(self, context: Any, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != 8:
            return self._forget("a KV event is not [topic, number, message]")
        number = int.from_bytes(frames[1], "big")
        expected = self._next
        if expected is not None and number != expected:
            self.n_gaps += 1
            if number < expected:
                self._forget(f"KV events began again at {number}: the server was restarted")
            elif not await self._replayed(context, expected, number):
                self._forget(f"KV events {expected} to {number - 1} are missing")
        self._next = number + 1
        self._absorb(frames[2])

    def _absorb(self, payload: bytes) -> None:
        try:
            events = self.feed.absorb(payload)
        except BadEvents as error:
            return self._forget(f"KV events: {error}")
        if events.stored:  # blocks can be placed again
            self.problem = ""
        if events.stored or events.removed or events.whole:
            self._tell(events)

    async def _replayed(self, context: Any, first: int, end: int) -> bool:
        """Whether all of first..end-1 came again."""
        if not self._replay:
            return False
        try:
            async with asyncio.timeout(REPLAY_S):
                async with contextlib.aclosing(_replay(context, self._replay, first)) as messages:
                    async for number, payload in messages:
                        if number != first or number >= end:
                            break
                        self._absorb(payload)
                        first += 1
        except TimeoutError:
            log.warning("endpoint %s: no replay of KV events within %g s", self._name, REPLAY_S)
        return first == end

    def _forget(self, why: str) -> None:
        if why != self.problem:
            log.warning("endpoint %s: %s; what its cache holds is forgotten", self._name, why)
        self.problem = why
        self.feed.reset()
        self._tell(KVEvents(whole=True))


async def _replay(context: Any, address: str, first: int) -> AsyncGenerator[tuple[int, bytes], None]:
    import zmq

    socket = context.socket(zmq.DEALER)
    socket.set(zmq.LINGER, 0)
    try:
        socket.connect(address)
        await socket.send_multipart([b"", first.to_bytes(8, "big")])
        while True:
            frames = await socket.recv_multipart()
            number = int.from_bytes(frames[-2], "big") if len(frames) >= 2 else END
            if number == END:
                return
            yield number, frames[-1]
    finally:
        socket.close()
