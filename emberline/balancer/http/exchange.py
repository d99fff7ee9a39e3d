"""One request and its answer on a connection."""

import asyncio
from collections.abc import Callable

MAX_HEADERS = 128
MAX_HEAD_BYTES = 64 << 10
PAUSE_BYTES = 512 << 10  # of an answer that nobody has taken yet; then the server has to wait


class Broken(Exception):
    """The exchange ended before its answer did; the message says how."""

    def __init__(self, reason: str, *, untouched: bool = False) -> None:
        super().__init__(reason)
        self.untouched = untouched  # not a byte came back: another connection may have better luck


class Exchange:
    """What came back so far. Its owner takes pieces until b"", or closes it before."""

    def __init__(self, on_end: Callable[[bool], None], throttle: Callable[[bool], None]) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self._head: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_end = on_end  # told once: whether the connection can carry another exchange
        self._throttle = throttle
        self._pieces: list[bytes] = []
        self._n_bytes = 0
        self._paused = False
        self._waiter: asyncio.Future[None] | None = None
        self._complete = False
        self._error: Broken | None = None
        self._over = False
        self._head_bytes = 0

    async def head(self) -> None:
        """Return once status and headers are there."""
        await self._head

    async def piece(self) -> bytes:
        """All that has come since the last piece; b"" at the end. Broken where the answer was cut off."""
        while not self._pieces:
            if self._error is not None:
                raise self._error
            if self._complete:
                return b""
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        taken = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._n_bytes = 0
        if self._paused:
            self._paused = False
            self._throttle(False)
        return taken

    async def read(self, max_bytes: int) -> bytes:
        """The whole body."""
        pieces: list[bytes] = []
        n_bytes = 0
        while piece := await self.piece():
            pieces.append(piece)
            n_bytes += len(piece)
            if n_bytes > max_bytes:
                self.close()
                raise Broken(f"its answer is larger than {max_bytes >> 20} MiB")
        return b"".join(pieces)

    def taken(self) -> bytes | None:
        """The whole body where it is already here; None where it is not."""
        return b"".join(self._pieces) if self._complete else None

    def fail(self, reason: str) -> None:
        """End it for a reason that lies elsewhere: whoever reads it is told."""
        if not self._over:
            self.on_broken(Broken(reason))
            self._on_end(False)

    def close(self) -> None:
        """Let go; an answer that is not whole takes its connection with it, which is how a server learns of it."""
        if not self._over:
            self._over = True
            self._on_end(False)

    # --- called by the connection ------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if len(self.headers) >= MAX_HEADERS or self._head_bytes > MAX_HEAD_BYTES:
            raise Broken("its headers are too large")
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_head(self, status: int) -> None:
        self.status = status
        if not self._head.done():
            self._head.set_result(None)

    def on_body(self, data: bytes) -> None:
        self._pieces.append(data)
        self._n_bytes += len(data)
        if self._n_bytes > PAUSE_BYTES and not self._paused:
            self._paused = True
            self._throttle(True)

    def wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def on_complete(self, reusable: bool) -> None:
        self._complete = True
        if not self._over:
            self._over = True
            self._on_end(reusable)

    def on_broken(self, error: Broken) -> None:
        if self._complete or self._error is not None:
            return
        self._error = error
        self._over = True
        if not self._head.done():
            self._head.set_exception(error)
            self._head.exception()  # retrieved: whoever asked may be gone
        self.wake()
