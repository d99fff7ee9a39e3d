"""Calls of the package `any-llm-sdk`, in the place of connections to a server.

A connection takes a request and gives back a status and a stream, as HTTP would: so timeouts, cancellation,
backpressure and errors are those of every provider.

Some of the package's providers block while they read a stream (Bedrock's does, between events), and all of them load
files when a client is made. So each request runs in a thread of its own, with an event loop of that thread's; a thread
keeps its clients, and their connections, for the next request.
"""

import asyncio
import contextlib
import importlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from emberline.net.http_client import Address, Connection, ConnectionFailed, ConnectionPool, Exchange
from emberline.upstream.providers.any_llm_sdk import failure
from emberline.upstream.providers.registry import Provider

MAX_CLIENTS = 8  # of different keys, in one thread
MAX_ABANDONED = 3  # times `max_running`: threads whose calls were cancelled and hang in the package


class AnyLLMPool(ConnectionPool):
    """Requests to one provider of the package, each a connection of its own."""

    def __init__(self, provider: Provider) -> None:
        super().__init__(Address(provider.any_llm, 0, False, ""), read_timeout_s=provider.timeout_s)
        self._provider = provider
        self._waiting: queue.SimpleQueue[_PoolCall | None] = queue.SimpleQueue()
        self._n_threads = 0
        self._n_abandoned = 0
        self._counting = threading.Lock()  # of abandoned calls
        self._idle_threads = threading.Semaphore(0)

    def close(self) -> None:
        super().close()
        for _ in range(self._n_threads):
            self._waiting.put(None)

    async def _dial(self) -> Connection:
        if self._closed:
            raise ConnectionFailed("we closed the connection")
        connection = _PoolCall(self._enqueue, self._lost, self._abandoned)
        self._all.add(connection)
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().call_later(self._sweep_interval_s, self._sweep)
        return connection

    def _enqueue(self, call: "_PoolCall") -> None:
        n_most = self._provider.max_running + min(self._n_abandoned, MAX_ABANDONED * self._provider.max_running)
        if not self._idle_threads.acquire(blocking=False) and self._n_threads < n_most:
            self._n_threads += 1
            # A daemon: a call that hangs in the package must not keep the process from ending.
            threading.Thread(target=self._work, name=f"provider {self._provider.name}", daemon=True).start()
        self._waiting.put(call)

    def _abandoned(self, n: int) -> None:
        """Count calls that were cancelled while a thread ran them, or fewer if negative. They may hang for long, and
        their slots belong to other requests, which need other threads."""
        with self._counting:
            self._n_abandoned += n

    def _work(self) -> None:
        clients: dict[str, Any] = {}  # by key
        with asyncio.Runner() as runner:
            while (call := self._waiting.get()) is not None:
                with contextlib.suppress(asyncio.CancelledError):
                    runner.run(call.run(lambda key: self._client(clients, key)))
                self._idle_threads.release()

    def _client(self, clients: dict[str, Any], key: str) -> Any:
        if key not in clients:
            if len(clients) >= MAX_CLIENTS:
                clients.clear()
            package: Any = importlib.import_module("any_llm")
            provider, url = self._provider.any_llm, self._provider.any_llm_url
            options = {"api_key": key or None, "api_base": url or None, "unified_exceptions": True}
            try:  # a request is sent once: only a client, or a rule of its gateway, asks again
                clients[key] = package.AnyLLM.create(provider, max_retries=0, **options)
            except package.exceptions.UnsupportedParameterError:
                clients[key] = package.AnyLLM.create(provider, **options)
        return clients[key]


class _PoolCall(Connection):
    """One request. `begin`, `pause` and `end` are called on the event loop of the pool, `run` in a thread."""

    def __init__(
        self,
        enqueue: "Callable[[_PoolCall], None]",
        on_lost: Callable[[Connection], None],
        abandoned: Callable[[int], None],
    ) -> None:
        super().__init__(on_lost, on_lost)
        self._enqueue = enqueue
        self._abandoned = abandoned
        self._is_abandoned = False
        self._state = threading.Lock()  # of `_task` and `_is_abandoned`
        self._owner = asyncio.get_running_loop()
        self._may_send = threading.Event()
        self._may_send.set()
        self._ended = False
        self._task: asyncio.Task[None] | None = None  # in the thread's event loop
        self._path, self._key, self._body = "", "", b""

    def begin(self, head: bytes, body: bytes) -> Exchange:
        request, *headers = head.decode("ascii").split("\r\n")
        self._path, self._body = request.split(" ")[1], body
        bearer = "authorization: Bearer "
        self._key = next((line.removeprefix(bearer) for line in headers if line.startswith(bearer)), "")
        self.active_s = time.monotonic()
        self._exchange = Exchange(self)
        self._enqueue(self)
        return self._exchange

    def pause(self, paused: bool) -> None:
        self._may_send.clear() if paused else self._may_send.set()

    def end(self, reusable: bool) -> None:
        self._exchange, self._ended = None, True
        self._may_send.set()
        self._on_lost(self)
        with self._state:
            task = self._task
            if task is not None and not self._is_abandoned:
                self._is_abandoned = True
                self._abandoned(1)
        if task is not None:
            with contextlib.suppress(RuntimeError):  # its loop is closed
                task.get_loop().call_soon_threadsafe(task.cancel)

    # --- in the thread -----------------------------------------------------------------------------------------------

    async def run(self, client_of: Callable[[str], Any]) -> None:
        self._task = asyncio.current_task()
        head: dict[str, str] | None = {"content-type": "text/event-stream"}  # None once it is sent
        try:
            if self._ended:
                return
            client = client_of(self._key)
            if self._path == "/models":
                rows = [{"id": model.id} for model in await client.alist_models()]
                return self._tell(msgspec.json.encode({"data": rows}), {}, last=True)
            stream = await client.acompletion(**{**msgspec.json.decode(self._body), "stream": True})
            try:
                async for chunk in stream:
                    if self._ended:  # where nothing is awaited in between, no cancellation arrives
                        return
                    self._tell(_line(chunk.model_dump(mode="json", exclude_none=True)), head)
                    head = None
                    self._may_send.wait()
            finally:
                if (close := getattr(stream, "aclose", None)) is not None:
                    await close()
            self._tell(b"data: [DONE]\n\n", head, last=True)
        except Exception as error:  # of any SDK
            status, headers, message, param = failure(error)
            if head is None:
                event = msgspec.json.encode({"error": {"message": message, "code": status}})
                self._tell(b"data: " + event + b"\n\n", last=True)
            else:
                body = msgspec.json.encode({"error": {"message": message, "param": param}})
                self._tell(body, headers, status, last=True)
        finally:
            with self._state:
                self._task = None
                if self._is_abandoned:
                    self._abandoned(-1)

    def _tell(self, body: bytes, head: dict[str, str] | None = None, status: int = 200, last: bool = False) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self._owner.call_soon_threadsafe(self._deliver, body, head, status, last)

    def _deliver(self, body: bytes, head: dict[str, str] | None, status: int, last: bool) -> None:
        exchange = self._exchange
        if exchange is None:
            return
        self.active_s = self.received_s = time.monotonic()
        if head is not None:
            exchange.headers.update(head)
            exchange.on_head(status)
        exchange.on_body(body)
        if last:
            self._exchange, self._ended = None, True
            self._on_lost(self)
            exchange.on_complete()
        exchange.wake()


def _line(chunk: dict[str, Any]) -> bytes:
    for choice in chunk["choices"]:
        choice["finish_reason"] = choice.pop("finish_reason", None)  # a part of every choice, and last as usual
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"
