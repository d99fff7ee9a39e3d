"""Compiles grammars for the service: from the cache, or in one of two processes that are killed at a time limit.

The limit is one of CPU time: what a busy machine takes from a process does not make its grammar a bad one.

How long a compilation takes is not known in advance; its size is a fair estimate. Small specs are compiled first, and
waiting time makes up for size. Large ones never occupy the last process, so small ones wait for small ones only.
"""

import asyncio
import hashlib
import sys
import time
from bisect import insort
from collections import OrderedDict
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, NamedTuple

import msgspec

from emberline.protocol.errors import BadInput, Internal, Overloaded, from_info
from emberline.text.grammar.compiler_process import LENGTH, READY, CompileReply
from emberline.text.grammar.reply_grammar import GrammarSpec

CACHE_BYTES: Final = 64 << 20
MEMORY_BYTES: Final = 1 << 30  # address space of a process
MAX_WALL: Final = 10  # times the limit of CPU time: the process is stuck, or gets next to no CPU
CLOCK_S: Final = 1e-3  # less is not worth another look at a process's clock
CPU_S: Final = 600  # over the whole life of a process; then it is replaced
START_S: Final = 30.0  # for a process to start
ATTEMPTS: Final = 2
N_PROCESSES: Final = 2
COMMAND: Final = [sys.executable, "-m", "emberline.text.grammar.compiler_process"]

MAX_WAITING: Final = 64
SMALL_BYTES: Final = 8 << 10
S_PER_BYTE: Final = 1e-3  # of waiting time that one byte of size costs
MAX_SIZE_COST_S: Final = 30.0  # bounds how long later, smaller specs can overtake
RETRY_AFTER_S: Final = 5.0

_encode = msgspec.msgpack.Encoder().encode  # keeps the order of keys, which is the order of properties in the grammar


class GrammarCompiler:
    """Compiles each grammar once: concurrent requests for the same grammar share one compilation."""

    def __init__(
        self,
        *,
        limit_s: float = 2.0,
        cache_bytes: int = CACHE_BYTES,
        memory_bytes: int = MEMORY_BYTES,
        command: list[str] | None = None,
    ) -> None:
        self.limit_s, self._cache_bytes = limit_s, cache_bytes
        command = command or [*COMMAND, str(memory_bytes), str(CPU_S)]
        self._processes = [CompilerProcess(command) for _ in range(N_PROCESSES)]
        self._pool = ProcessPool(self._processes)
        self._cache: OrderedDict[bytes, bytes] = OrderedDict()  # LRU by bytes
        self.held_bytes = 0
        self._running: dict[bytes, asyncio.Task[bytes]] = {}

    async def compile(self, spec: GrammarSpec) -> bytes:
        """Return an encoded `protocol.grammar.Grammar`. Raises BadInput if the spec is at fault, and Overloaded."""
        try:
            data = _encode(spec)
        except (TypeError, ValueError, RecursionError, OverflowError):
            message = "the requested format is not plain JSON, nested too deep, or has integers beyond 64 bits"
            raise BadInput(message, param=_request_field(spec)) from None
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
        except BadInput as error:  # a copy for each waiter: APIs add their own context to it
            raise BadInput(error.message, param=error.param or _request_field(spec)) from None
        except Overloaded as error:
            raise Overloaded(error.message, retry_after_s=error.retry_after_s) from None

    async def start(self) -> None:
        """Start the process that the pool grants first. The others start when more than one compilation runs."""
        await self._processes[-1].start()

    @property
    def child_pid(self) -> int | None:
        """Process id of a live compiler process. Returns None if none has been started."""
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
        async with self._pool.acquire(len(data)) as process:
            for _ in range(ATTEMPTS):
                reply = await process.compile(data, self.limit_s)
                if reply is None:
                    continue
                if reply.error is not None:
                    raise from_info(reply.error)
                self._cache_grammar(key, reply.grammar)
                return reply.grammar
        raise BadInput("the requested format could not be compiled: simplify it")

    def _cache_grammar(self, key: bytes, grammar: bytes) -> None:
        if len(grammar) > self._cache_bytes:
            return
        self._cache[key] = grammar
        self.held_bytes += len(grammar)
        while self.held_bytes > self._cache_bytes:
            _, oldest = self._cache.popitem(last=False)
            self.held_bytes -= len(oldest)


def _request_field(spec: GrammarSpec) -> str:
    """Return the request field that asks for the grammar."""
    return "tools" if spec.output is None else "output"


class CompilerProcess:
    """Handle of a compiler process: started on first use, killed when a compilation takes too long."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._child: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()  # one request at a time
        self.closed = False  # never started again

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    async def start(self) -> None:
        async with self._lock:
            await self._started()

    async def compile(self, data: bytes, limit_s: float) -> CompileReply | None:
        """Return the reply, or None if the process died. Whatever interrupts the exchange kills the process."""
        async with self._lock:
            try:
                child = await self._started()
                return await _within_cpu_time(limit_s, child.pid, _exchange(child, data))
            except TimeoutError:
                await self.kill()
                message = f"the requested format takes longer than {limit_s:g} s to compile: simplify it"
                raise BadInput(message) from None
            except (asyncio.IncompleteReadError, ConnectionError):
                await self.kill()
                return None
            except BaseException:
                await self.kill()
                raise

    async def _started(self) -> asyncio.subprocess.Process:
        if self.closed:
            raise Internal("the grammar compiler is closed")
        if self._child is None or self._child.returncode is not None:
            self._child = await asyncio.create_subprocess_exec(
                *self._command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
            )
            assert self._child.stdout is not None
            try:
                async with asyncio.timeout(START_S):  # not part of the request's time limit
                    await self._child.stdout.readexactly(len(READY))
            except TimeoutError:
                await self.kill()
                raise Internal("the grammar compiler process does not start") from None
            except BaseException:  # a half-started process is of no use
                await self.kill()
                raise
        return self._child

    async def kill(self) -> None:
        child, self._child = self._child, None
        if child is not None and child.returncode is None:
            with suppress(ProcessLookupError):
                child.kill()
            await child.wait()


async def _within_cpu_time(limit_s: float, pid: int, work: Coroutine[Any, Any, CompileReply]) -> CompileReply:
    """Wait for what the process does. Raises TimeoutError when it has used limit_s of CPU time, or MAX_WALL times that
    of wall time, and ConnectionError if it has ended already."""
    clock = ~pid << 3 | 2  # Linux's number of the clock that counts the CPU time of a process
    try:
        end_cpu_s = time.clock_gettime(clock) + limit_s
    except OSError:
        work.close()
        raise ConnectionError("the process has ended") from None
    end_s, left_s = time.monotonic() + MAX_WALL * limit_s, limit_s
    task = asyncio.create_task(work)
    try:
        while not task.done() and left_s > CLOCK_S and time.monotonic() < end_s:
            await asyncio.wait([task], timeout=left_s)
            with suppress(OSError):  # the process has ended, which the task is about to notice
                left_s = end_cpu_s - time.clock_gettime(clock)
        if not task.done():
            raise TimeoutError
        return task.result()
    finally:
        task.cancel()


async def _exchange(child: asyncio.subprocess.Process, data: bytes) -> CompileReply:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(LENGTH.pack(len(data)) + data)
    await child.stdin.drain()
    size = LENGTH.unpack(await child.stdout.readexactly(LENGTH.size))[0]
    return msgspec.msgpack.decode(await child.stdout.readexactly(size), type=CompileReply)


class _Waiter(NamedTuple):
    rank: float
    arrival: int  # breaks ties
    large: bool
    granted: asyncio.Future[CompilerProcess]


class ProcessPool:
    """Grants free processes to waiters by rank: arrival time plus a cost for size. The last process comes first."""

    def __init__(self, processes: Iterable[CompilerProcess]) -> None:
        self._free = list(processes)  # a stack: one process serves most of the load
        self._max_large = max(1, len(self._free) - 1)
        self._n_large = 0
        self._n_arrivals = 0
        self._waiting: list[_Waiter] = []  # sorted

    @asynccontextmanager
    async def acquire(self, n_bytes: int) -> AsyncIterator[CompilerProcess]:
        """Yield a process for a spec of this size. Raises Overloaded if too many better-ranked ones wait."""
        large = n_bytes > SMALL_BYTES
        process = await self._wait(n_bytes, large)
        try:
            yield process
        finally:
            self._release(process, large)

    async def _wait(self, n_bytes: int, large: bool) -> CompilerProcess:
        granted: asyncio.Future[CompilerProcess] = asyncio.get_running_loop().create_future()
        self._n_arrivals += 1
        rank = time.monotonic() + min(n_bytes * S_PER_BYTE, MAX_SIZE_COST_S)
        insort(self._waiting, _Waiter(rank, self._n_arrivals, large, granted))
        self._grant()
        if len(self._waiting) > MAX_WAITING:
            message = "too many new formats are being compiled: try again in a moment, or use one that was used before"
            self._waiting.pop().granted.set_exception(Overloaded(message, retry_after_s=RETRY_AFTER_S))
        try:
            return await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                self._release(granted.result(), large)
            raise

    def _release(self, process: CompilerProcess, large: bool) -> None:
        self._free.append(process)
        self._n_large -= large
        self._grant()

    def _grant(self) -> None:
        """Give free processes to the first waiters that may have them, and forget cancelled waiters."""
        self._waiting = [waiter for waiter in self._waiting if not waiter.granted.done()]
        while self._free:
            full = self._n_large >= self._max_large
            first = next((waiter for waiter in self._waiting if not (waiter.large and full)), None)
            if first is None:
                return
            self._waiting.remove(first)
            self._n_large += first.large
            first.granted.set_result(self._free.pop())
