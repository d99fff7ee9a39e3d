"""A process that compiles grammars, and its handle: started on first use, killed when a compilation takes too long.

Frames on its stdin and stdout: length (u32, little-endian), then msgpack. In: a `GrammarSpec`; out: a `CompileReply`.
"""

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
READY = LENGTH.pack(0)  # an empty frame, written once the process accepts requests


class CompileReply(msgspec.Struct, frozen=True, array_like=True):
    grammar: bytes = b""
    error: ErrorInfo | None = None


def compile_spec(spec: bytes) -> CompileReply:
    try:
        return CompileReply(grammar=encode(build(msgspec.msgpack.decode(spec, type=GrammarSpec))))
    except EmberlineError as error:
        return CompileReply(error=error.info())
    except (MemoryError, RecursionError):
        return CompileReply(error=ErrorInfo("bad_input", "the requested format is too complex: simplify it"))


def _read(stream: BinaryIO, size: int) -> bytes | None:
    data = stream.read(size)
    return data if len(data) == size else None


def main() -> None:
    memory_bytes, cpu_s = int(sys.argv[1]), int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the service ends this process
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    sink.write(READY)
    sink.flush()
    while (head := _read(source, LENGTH.size)) is not None:
        spec = _read(source, LENGTH.unpack(head)[0])
        if spec is None:
            return
        try:
            reply = compile_spec(spec)
        except Exception as error:  # our bug: reported and logged, and the process goes on
            print(f"building a grammar failed: {error!r}", file=sys.stderr, flush=True)
            reply = CompileReply(error=Internal("building the grammar failed").info())
        data = msgspec.msgpack.encode(reply)
        sink.write(LENGTH.pack(len(data)) + data)
        sink.flush()


START_S: Final = 30.0


class CompilerProcess:
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
        """The reply; None if the process died. Whatever interrupts the exchange kills the process."""
        async with self._lock:
            try:
                child = await self._started()
                async with asyncio.timeout(limit_s):
                    return await _exchange(child, data)
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
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()


async def _exchange(child: asyncio.subprocess.Process, data: bytes) -> CompileReply:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(LENGTH.pack(len(data)) + data)
    await child.stdin.drain()
    size = LENGTH.unpack(await child.stdout.readexactly(LENGTH.size))[0]
    return msgspec.msgpack.decode(await child.stdout.readexactly(size), type=CompileReply)


if __name__ == "__main__":
    main()
