"""One child process that makes grammars, seen from the service: started when first needed, killed when it is late."""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Final

import msgspec

from emberline.protocol.errors import BadInput, Internal
from emberline.text.grammar.child import LENGTH, READY, Reply

START_S: Final = 30.0


class Process:
    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._child: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()  # it answers one at a time
        self.closed = False  # it is not started again

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    async def start(self) -> None:
        async with self._turn:
            await self._started()

    async def ask(self, data: bytes, limit_s: float) -> Reply | None:
        """The answer; None when the child died. Whatever interrupts the exchange ends the child."""
        async with self._turn:
            try:
                child = await self._started()
                async with asyncio.timeout(limit_s):
                    return await _exchange(child, data)
            except TimeoutError:
                await self.kill()
                message = f"the demanded format takes longer than {limit_s:g} s to compile: simplify it"
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
                async with asyncio.timeout(START_S):  # starting is not the request's time
                    await self._child.stdout.readexactly(len(READY))
            except TimeoutError:
                await self.kill()
                raise Internal("the grammar compiler does not start") from None
            except BaseException:  # half started is of no use to the next
                await self.kill()
                raise
        return self._child

    async def kill(self) -> None:
        child, self._child = self._child, None
        if child is not None and child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()


async def _exchange(child: asyncio.subprocess.Process, data: bytes) -> Reply:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(LENGTH.pack(len(data)) + data)
    await child.stdin.drain()
    size = LENGTH.unpack(await child.stdout.readexactly(LENGTH.size))[0]
    return msgspec.msgpack.decode(await child.stdout.readexactly(size), type=Reply)
