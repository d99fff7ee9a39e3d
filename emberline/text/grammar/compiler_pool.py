"""Grammars for the service: from the cache, or from a child process that is killed when one takes too long."""

import asyncio
import hashlib
import sys
import time
from bisect import insort
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Final, Generic, NamedTuple, TypeVar

import msgspec

from emberline.protocol.errors import BadInput, Overloaded, from_info
from emberline.text.grammar.compiler_process import Process
from emberline.text.grammar.reply_grammar import GrammarSpec

MAX_WAITING: Final = 64
SMALL_BYTES: Final = 8 << 10
S_PER_BYTE: Final = 1e-3  # what a byte costs, in seconds of waiting
MAX_COST_S: Final = 30.0  # nobody lets those pass who come later than this
RETRY_AFTER_S: Final = 5.0

T = TypeVar("T")


class _Waiting(NamedTuple, Generic[T]):
    rank: float
    number: int  # of equals, who came first
    large: bool
    turn: asyncio.Future[T]


class Turns(Generic[T]):
    def __init__(self, things: Iterable[T]) -> None:
        self._free = list(things)  # the last is taken first: the same one, mostly
        self._most_large = max(1, len(self._free) - 1)
        self._n_large = 0
        self._n_came = 0
        self._waiting: list[_Waiting[T]] = []  # sorted

    @asynccontextmanager
    async def take(self, n_bytes: int) -> AsyncIterator[T]:
        """One of the things, for something of that size. Overloaded: too many others wait who go before."""
        large = n_bytes > SMALL_BYTES
        thing = await self._wait(n_bytes, large)
        try:
            yield thing
        finally:
            self._give_back(thing, large)

    async def _wait(self, n_bytes: int, large: bool) -> T:
        turn: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._n_came += 1
        rank = time.monotonic() + min(n_bytes * S_PER_BYTE, MAX_COST_S)
        insort(self._waiting, _Waiting(rank, self._n_came, large, turn))
        self._pass_on()
        if len(self._waiting) > MAX_WAITING:
            message = "too many new formats are being compiled: try again in a moment, or use one that was used before"
            self._waiting.pop().turn.set_exception(Overloaded(message, retry_after_s=RETRY_AFTER_S))
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._give_back(turn.result(), large)
            raise

    def _give_back(self, thing: T, large: bool) -> None:
        self._free.append(thing)
        self._n_large -= large
        self._pass_on()

    def _pass_on(self) -> None:
        """What is free, to the first who may have it. Who was cancelled no longer waits."""
        self._waiting = [each for each in self._waiting if not each.turn.done()]
        while self._free:
            full = self._n_large >= self._most_large
            first = next((each for each in self._waiting if not (each.large and full)), None)
            if first is None:
                return
            self._waiting.remove(first)
            self._n_large += first.large
            first.turn.set_result(self._free.pop())


CACHE_BYTES: Final = 64 << 20
MEMORY_BYTES: Final = 1 << 30
CPU_S: Final = 600  # of one child's whole life; then it is replaced
TRIES: Final = 2
PROCESSES: Final = 2
CHILD: Final = [sys.executable, "-m", "emberline.text.grammar.compiler_process"]

_encode = msgspec.msgpack.Encoder().encode  # in the order of the caller's keys: a grammar keeps it


class GrammarCompiler:
    """Two child processes, the small formats first. Requests for the same grammar wait for one compilation."""

    def __init__(
        self,
        *,
        limit_s: float = 2.0,
        cache_bytes: int = CACHE_BYTES,
        memory_bytes: int = MEMORY_BYTES,
        command: list[str] | None = None,
    ) -> None:
        self.limit_s, self._cache_bytes = limit_s, cache_bytes
        command = command or [*CHILD, str(memory_bytes), str(CPU_S)]
        self._processes = [Process(command) for _ in range(PROCESSES)]
        self._turns = Turns(self._processes)
        self._cache: OrderedDict[bytes, bytes] = OrderedDict()
        self.held_bytes = 0
        self._running: dict[bytes, asyncio.Task[bytes]] = {}

    async def compile(self, spec: GrammarSpec) -> bytes:
        """An encoded `protocol.grammar.Grammar`. Raises BadInput where the spec is at fault, Overloaded."""
        try:
            data = _encode(spec)
        except (TypeError, ValueError, RecursionError, OverflowError):
            message = "the demanded format is not plain JSON, nested too deep, or has whole numbers beyond 64 bits"
            raise BadInput(message, param=_field(spec)) from None
        key = hashlib.blake2b(data, digest_size=16).digest()
        found = self._cache.get(key)
        if found is not None:
            self._cache.move_to_end(key)
            return found
        task = self._running.get(key)
        if task is None:
            task = asyncio.create_task(self._compile(key, data))
            self._running[key] = task
            task.add_done_callback(lambda _: self._running.pop(key, None))
        try:
            return await asyncio.shield(task)
        except BadInput as error:  # one for each who waits: doors tell it in their own words
            raise BadInput(error.message, param=error.param or _field(spec)) from None
        except Overloaded as error:
            raise Overloaded(error.message, retry_after_s=error.retry_after_s) from None

    async def start(self) -> None:
        """Starts the children now, so that the first requests need not wait for them."""
        await asyncio.gather(*(process.start() for process in self._processes))

    @property
    def child_pid(self) -> int | None:
        """Of one that lives."""
        return next((process.pid for process in self._processes if process.pid is not None), None)

    async def close(self) -> None:
        for process in self._processes:
            process.closed = True
        for task in list(self._running.values()):
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        for process in self._processes:
            await process.kill()

    async def _compile(self, key: bytes, data: bytes) -> bytes:
        async with self._turns.take(len(data)) as process:
            for _ in range(TRIES):
                reply = await process.ask(data, self.limit_s)
                if reply is None:
                    continue
                if reply.error is not None:
                    raise from_info(reply.error)
                self._keep(key, reply.grammar)
                return reply.grammar
        raise BadInput("the demanded format could not be compiled: simplify it")

    def _keep(self, key: bytes, grammar: bytes) -> None:
        if len(grammar) > self._cache_bytes:
            return
        self._cache[key] = grammar
        self.held_bytes += len(grammar)
        while self.held_bytes > self._cache_bytes:
            _, oldest = self._cache.popitem(last=False)
            self.held_bytes -= len(oldest)


def _field(spec: GrammarSpec) -> str:
    """What of a request demands the grammar."""
    return "tools" if spec.output is None else "output"
