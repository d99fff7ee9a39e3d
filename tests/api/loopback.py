"""Serves the app on a real port or a Unix socket, in its own thread."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvloop

from emberline.net.http_server import ASGIApp, ServerLimits, serve


class Loopback:
    def __init__(self, app: ASGIApp, drain_s: float, path: Path | None, limits: ServerLimits | None) -> None:
        if path is None:
            self.sock = socket.create_server(("127.0.0.1", 0))
            self.port: int = self.sock.getsockname()[1]
            self.url = f"http://127.0.0.1:{self.port}"
        else:
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.bind(str(path))
            self.sock.listen()
        self._limits = limits
        self._started = threading.Event()
        self._thread = threading.Thread(target=uvloop.run, args=(self._serve(app, drain_s),), daemon=True)
        self._thread.start()
        assert self._started.wait(60)

    async def _serve(self, app: ASGIApp, drain_s: float) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._started.set()
        await serve(app, self.sock, drain_s=drain_s, stop=self._stop, limits=self._limits)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()


@contextmanager
def on_loopback(
    app: ASGIApp, drain_s: float = 0.2, path: Path | None = None, limits: ServerLimits | None = None
) -> Iterator[Loopback]:
    server = Loopback(app, drain_s, path, limits)
    try:
        yield server
    finally:
        if server._thread.is_alive():
            server.stop()
        server.join()
