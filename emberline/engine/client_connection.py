"""One client of an engine: bytes in and out of a non-blocking socket, never more of them held than is fair."""

import socket

from emberline.protocol.events import TokenDelta
from emberline.protocol.frames import EngineLoad, FrameBuffer

MAX_BACKLOG_BYTES = 64 << 20
MAX_STRANGER_BYTES = 64 << 10  # before Hello was accepted
_RECV_BYTES = 256 << 10


class ConnectionLost(Exception):
    """The peer is gone, or not to be kept; the text says why."""


class Connection:
    """Plain state and two verbs. The server decides what frames mean."""

    def __init__(self, sock: socket.socket, opened_s: float) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.opened_s = opened_s
        self.greeted = False
        self.closing = False  # once the backlog is sent
        self.watches = False  # the cache
        self.request_ids: set[str] = set()
        self.deltas: list[TokenDelta] = []  # for the next Step frame
        self.told_s = opened_s  # when the last Step frame went out, and the engine's count of steps in it
        self.told_steps = 0
        self.told_load: EngineLoad | None = None
        self._frames = FrameBuffer()
        self._n_received = 0
        self._backlog = bytearray()

    @property
    def has_backlog(self) -> bool:
        return bool(self._backlog)

    @property
    def has_unread(self) -> bool:
        return self._frames.has_rest

    def waits(self, now_s: float, longer_than_s: float) -> bool:
        """Whether it has requests open and has heard nothing for so long."""
        return bool(self.request_ids) and now_s - self.told_s > longer_than_s

    def receive(self) -> list[bytes]:
        """Payloads that are whole now. One read a call, so that a flood cannot hold up the steps."""
        try:
            data = self.sock.recv(_RECV_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise ConnectionLost(str(error)) from None
        if not data:
            raise ConnectionLost("closed by the peer")
        self._n_received += len(data)
        if not self.greeted and self._n_received > MAX_STRANGER_BYTES:
            raise ConnectionLost("too much sent before Hello")
        try:
            return self._frames.feed(data)
        except ValueError as error:
            raise ConnectionLost(str(error)) from None

    def send(self, frame: bytes = b"") -> None:
        """Send what the socket takes and keep the rest; without a frame, go on with what was kept."""
        self._backlog += frame
        try:
            del self._backlog[: self.sock.send(self._backlog)]
        except BlockingIOError:
            pass
        except OSError as error:
            raise ConnectionLost(str(error)) from None
        if len(self._backlog) > MAX_BACKLOG_BYTES:
            raise ConnectionLost("it reads too slowly")
