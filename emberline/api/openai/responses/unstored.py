"""The last response of a WebSocket that was not stored: the next message on the connection may continue it."""

from emberline.api.http.body import LARGE_BYTES
from emberline.api.http.exchange import HttpExchange
from emberline.net.held_bodies import held_bodies
from emberline.protocol.complete_response import StoredResponse
from emberline.protocol.errors import Unavailable

CONNECTION = "emberline.unstored_response"  # the key in the scope of requests that come over a WebSocket


class UnstoredResponse:
    """One response and its whole conversation, in memory. A longer one is not kept: its client sends it again, and it
    is then computed where large requests are."""

    def __init__(self, max_bytes: int = LARGE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._record: StoredResponse | None = None
        self.held_bytes = 0

    def find(self, account: str, response_id: str) -> StoredResponse | None:
        """Returns None if the account's last unstored response has another id."""
        record = self._record
        return record if record is not None and (record.account, record.id) == (account, response_id) else None

    def keep(self, record: StoredResponse) -> None:
        """Keep a response in place of the last one, while this process has memory for requests."""
        self.forget()
        if record.n_bytes <= self._max_bytes:
            try:
                held_bodies.add(self, record.n_bytes)
            except Unavailable:
                return
            self._record = record

    def forget(self) -> None:
        """Forget the response."""
        held_bodies.release(self)
        self._record = None


def of_connection(call: HttpExchange) -> UnstoredResponse | None:
    """The unstored response of the request's WebSocket. Returns None if the request came by itself."""
    found: UnstoredResponse | None = call.scope.get(CONNECTION)
    return found
