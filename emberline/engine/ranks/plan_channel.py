"""Transport of each step's plan to the followers: shared memory on one machine, their connections on others."""

import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Protocol

import msgspec

from emberline.engine.ranks.messages import End, StepMessage, encoder, step_messages
from emberline.engine.ranks.plan_ring import RingReader, RingWriter
from emberline.kv.transfer.connection import PeerConnection, PeerConnectionLost
from emberline.protocol.frames import LENGTH, MAX_FRAME_BYTES


class PlanWriter:
    """Rank 0's side."""

    def __init__(self, ring: RingWriter | None, remote: Sequence[PeerConnection] = ()) -> None:
        self._ring, self._remote = ring, remote

    def write(self, message: StepMessage) -> None:
        encoded = encoder.encode(message)
        if self._ring is not None:
            self._ring.write(encoded)
        for connection in self._remote:
            connection.send_bytes([memoryview(LENGTH.pack(len(encoded)) + encoded)])

    def n_unread(self) -> list[int]:
        """Messages that each follower on this machine has not done yet."""
        return [] if self._ring is None else self._ring.n_unread()


class PlanReader(Protocol):
    def read(self, timeout_s: float) -> StepMessage | None:
        """The next message; None: none has come in this time."""


class SharedMemoryReader:
    def __init__(self, ring: RingReader) -> None:
        self._ring = ring

    def read(self, timeout_s: float) -> StepMessage | None:
        message = self._ring.read(timeout_s)
        return None if message is None else step_messages.decode(message)


class ConnectionReader:
    """A thread reads the connection, and calls `lost` if it ends before the group does, whatever the others do."""

    def __init__(self, connection: PeerConnection, lost: Callable[[PeerConnectionLost], None] | None = None) -> None:
        self._messages: SimpleQueue[StepMessage | PeerConnectionLost] = SimpleQueue()
        self._connection = connection
        self._lost = self._messages.put if lost is None else lost
        self._thread = threading.Thread(target=self._run, name="plans", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until the group or the connection has ended."""
        self._thread.join()

    def _run(self) -> None:
        decoder: msgspec.msgpack.Decoder[StepMessage] = step_messages
        try:
            while True:
                message = self._connection.receive(decoder, MAX_FRAME_BYTES)
                self._messages.put(message)
                if isinstance(message, End):
                    return
        except PeerConnectionLost as error:
            self._lost(error)

    def read(self, timeout_s: float) -> StepMessage | None:
        try:
            message = self._messages.get(timeout=timeout_s)
        except Empty:
            return None
        if isinstance(message, PeerConnectionLost):
            raise message
        return message
