"""One child process that makes grammars, seen from the service: started when first needed, killed when it is late."""

import asyncio
import contextlib
import resource
import signal
import struct
import sys
from collections.abc import Sequence
from typing import BinaryIO, Final

import msgspec

from emberline.protocol.errors import BadInput, EmberlineError, ErrorInfo, Internal
from emberline.protocol.grammar import encode
from emberline.text.grammar.reply_grammar import GrammarSpec, build

LENGTH = struct.Struct("<I")
READY = LENGTH.pack(0)  # an empty frame, before the first request


class Reply(msgspec.Struct, frozen=True, array_like=True):
    grammar: bytes = b""
    error: ErrorInfo | None = None


def answer(spec: bytes) -> Reply:
    try:
        return Reply(grammar=encode(build(msgspec.msgpack.decode(spec, type=GrammarSpec))))
    except EmberlineError as error:
        return Reply(error=error.info())
    except (MemoryError, RecursionError):
        return Reply(error=ErrorInfo("bad_input", "the demanded format is too complex: simplify it"))


def _read(stream: BinaryIO, size: int) -> bytes | None:
    data = stream.read(size)
    return data if len(data) == size else None


def main() -> None:
    memory_bytes, cpu_s = int(sys.argv[1]), int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the service decides when this ends
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    sink.write(READY)
    sink.flush()
    while (head := _read(source, LENGTH.size)) is not None:
        spec = _read(source, LENGTH.unpack(head)[0])
        if spec is None:
            return
        try:
            reply = answer(spec)
        except Exception as error:  # our bug: the request is told, the log too, and the next one is served
            print(f"building a grammar failed: {error!r}", file=sys.stderr, flush=True)
            reply = Reply(error=Internal("building the grammar failed").info())
        data = msgspec.msgpack.encode(reply)
        sink.write(LENGTH.pack(len(data)) + data)
        sink.flush()


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


if __name__ == "__main__":
    main()
