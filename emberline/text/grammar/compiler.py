"""Grammars for the service: from the cache, or from a child process that is killed when one takes too long."""

import asyncio
import contextlib
import hashlib
import sys
from collections import OrderedDict
from typing import Final

import msgspec

from emberline.protocol.errors import BadInput, Internal, from_info
from emberline.text.grammar.child import LENGTH, READY, Reply
from emberline.text.grammar.spec import GrammarSpec

CACHE_BYTES: Final = 64 << 20
MEMORY_BYTES: Final = 1 << 30
CPU_S: Final = 600  # of one child's whole life; then it is replaced
START_S: Final = 30.0
TRIES: Final = 2
CHILD: Final = [sys.executable, "-m", "emberline.text.grammar.child"]

_encode = msgspec.msgpack.Encoder().encode  # in the order of the caller's keys: a grammar keeps it


class GrammarCompiler:
    """One child at a time, started when first needed. Requests for the same grammar wait for one compilation."""

    def __init__(
        self,
        *,
        limit_s: float = 2.0,
        cache_bytes: int = CACHE_BYTES,
        memory_bytes: int = MEMORY_BYTES,
        command: list[str] | None = None,
    ) -> None:
        self.limit_s, self._cache_bytes = limit_s, cache_bytes
        self._command = command or [*CHILD, str(memory_bytes), str(CPU_S)]
        self._cache: OrderedDict[bytes, bytes] = OrderedDict()
        self.held_bytes = 0
        self._running: dict[bytes, asyncio.Task[bytes]] = {}
        self._turn = asyncio.Lock()  # the child answers one at a time
        self._child: asyncio.subprocess.Process | None = None
        self._closed = False

    async def compile(self, spec: GrammarSpec) -> bytes:
        """An encoded `protocol.grammar.Grammar`. Raises BadInput where the spec is at fault."""
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

    async def start(self) -> None:
        """Starts the child now, so that the first request need not wait for it."""
        async with self._turn:
            await self._started()

    @property
    def child_pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    async def close(self) -> None:
        self._closed = True
        for task in list(self._running.values()):
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        await self._kill()

    async def _compile(self, key: bytes, data: bytes) -> bytes:
        for _ in range(TRIES):
            async with self._turn:
                reply = await self._ask(data)
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

    async def _ask(self, data: bytes) -> Reply | None:
        """The child's answer; None when it died. Whatever interrupts the exchange ends the child."""
        try:
            child = await self._started()
            async with asyncio.timeout(self.limit_s):
                return await _exchange(child, data)
        except TimeoutError:
            await self._kill()
            message = f"the demanded format takes longer than {self.limit_s:g} s to compile: simplify it"
            raise BadInput(message) from None
        except (asyncio.IncompleteReadError, ConnectionError):
            await self._kill()
            return None
        except BaseException:
            await self._kill()
            raise

    async def _started(self) -> asyncio.subprocess.Process:
        if self._closed:
            raise Internal("the grammar compiler is closed")
        if self._child is None or self._child.returncode is not None:
            self._child = await asyncio.create_subprocess_exec(
                *self._command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
            )
            assert self._child.stdout is not None
            try:
                async with asyncio.timeout(START_S):  # starting is not the request's time
                    await self._child.stdout.readexactly(len(READY))
            except TimeoutError:
                raise Internal("the grammar compiler does not start") from None
        return self._child

    async def _kill(self) -> None:
        child, self._child = self._child, None
        if child is not None and child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()


def _field(spec: GrammarSpec) -> str:
    """What of a request demands the grammar."""
    return "tools" if spec.output is None else "output"


async def _exchange(child: asyncio.subprocess.Process, data: bytes) -> Reply:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(LENGTH.pack(len(data)) + data)
    await child.stdin.drain()
    size = LENGTH.unpack(await child.stdout.readexactly(LENGTH.size))[0]
    return msgspec.msgpack.decode(await child.stdout.readexactly(size), type=Reply)
