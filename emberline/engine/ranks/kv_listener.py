"""Where a follower receives KV: other engines send it the slices that this rank has of each block."""

import hmac
import logging
import socket
import threading
import time
from contextlib import ExitStack

from emberline.engine.addresses import listening
from emberline.kv.transfer.connection import PeerConnection, PeerConnectionLost
from emberline.kv.transfer.manager import TransferManager
from emberline.protocol import frames
from emberline.protocol.errors import BadInput, EmberlineError, Unauthorized
from emberline.protocol.frames import EngineInfo, EngineLoad

MAX_GREETINGS = 64
GREETING_S = 10.0
_ACCEPT_PAUSE_S = 0.1  # after an error: out of file descriptors, say

_log = logging.getLogger(__name__)


class KVListener:
    """Accepts engines that present the ticket which rank 0 would accept."""

    def __init__(
        self, address: str, closing: ExitStack, max_greetings: int = MAX_GREETINGS, greeting_s: float = GREETING_S
    ) -> None:
        """Listen at an address until `closing` ends it. Raises BadInput if that is not possible.

        max_greetings: concurrent connections of senders that are not authenticated yet.
        greeting_s: time for a sender to authenticate itself.
        """
        self._greetings, self._greeting_s = threading.BoundedSemaphore(max_greetings), greeting_s
        try:
            self._listener, self.address = closing.enter_context(listening(address))
        except OSError as error:
            raise BadInput(f"this rank cannot receive KV at {address}: {error}") from None

    def serve(self, transfers: TransferManager, info: EngineInfo, token: str) -> None:
        """Accept senders. Without a token none is served over a network: a worker that joins a cluster has no token for
        its ranks. A Unix socket is protected by its file mode."""
        if not token and self.address.startswith("tcp:"):
            self._listener.close()
            return
        self._transfers, self._info, self._token = transfers, info, token
        threading.Thread(target=self._accept_all, name="kv-listener", daemon=True).start()

    def _accept_all(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return  # closed
                time.sleep(_ACCEPT_PAUSE_S)
                continue
            if self._greetings.acquire(blocking=False):
                threading.Thread(target=self._greet, args=(sock,), name="kv-greeting", daemon=True).start()
            else:
                sock.close()

    def _greet(self, sock: socket.socket) -> None:
        try:
            self._take_over(sock)
        finally:
            self._greetings.release()

    def _take_over(self, sock: socket.socket) -> None:
        connection = PeerConnection(sock)
        limit = threading.Timer(self._greeting_s, connection.shutdown)
        limit.daemon = True
        limit.start()
        try:
            hello = connection.receive(frames.hello_decoder, frames.MAX_HELLO_BYTES)
            refusal = self._refusal(hello)
            if refusal is not None:
                _log.warning("refused a sender of KV: %s", refusal.message)
                connection.send(frames.Refused(refusal.info()))
                connection.close()
                return
            connection.send(frames.Welcome(self._info, EngineLoad()))
        except PeerConnectionLost:
            connection.close()
            return
        finally:
            limit.cancel()
        self._transfers.accept(connection, hello.peer)

    def _refusal(self, hello: frames.Hello) -> EmberlineError | None:
        expected = frames.transfer_ticket(self._token, hello.peer)
        if not hello.peer or not hmac.compare_digest(hello.token.encode(), expected.encode()):
            return Unauthorized("wrong ticket for this rank")
        if not frames.OLDEST_VERSION <= hello.version <= frames.VERSION:
            spoken = f"{frames.OLDEST_VERSION} to {frames.VERSION}"
            return BadInput(f"this engine speaks versions {spoken} of the protocol, not {hello.version}")
        return None


def rank_address(address: str, rank: int, *, by_rank_0: bool) -> str:
    """Return where a follower listens: beside rank 0's socket, on another port of its host, or as it was told."""
    if not address.startswith("tcp:"):
        return f"{address}.rank{rank}"
    host = address.removeprefix("tcp:").rpartition(":")[0]
    return f"tcp:{host}:0" if by_rank_0 else address
