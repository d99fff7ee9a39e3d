"""A process that checks grammars and translates them for llguidance, and its handle, which kills it at a time limit.

Both are pure Python and take up to seconds for a large grammar. In a thread of the engine they would take the
interpreter's lock from the step loop at every call of a kernel.
"""

import contextlib
import math
import os
import resource
import socket
import subprocess
import sys
import time

import msgspec

from emberline.engine.grammar import validation
from emberline.engine.grammar.lark import to_lark
from emberline.protocol import frames
from emberline.protocol.errors import BadInput, EmberlineError, ErrorInfo, Internal, from_info
from emberline.protocol.grammar import Token, walk

LIMIT_S = 5.0  # processor time of one grammar; the front end's compiler, which has seen it before, is allowed less
WALL_S = 20.0  # the longest time by the clock: on busy cores the process gets a share of one only
_CLOCK_S = 1e-3  # less is not worth another look at the process's clock
START_S = 30.0
ATTEMPTS = 2  # with a new process, should it die
MEMORY_BYTES = 1 << 30
NICE = 5
_RECV_BYTES = 1 << 20


class Translation(msgspec.Struct, array_like=True):
    source: str = ""  # in llguidance's Lark dialect
    token_ids: tuple[int, ...] = ()  # of special tokens that the grammar names
    error: ErrorInfo | None = None


_decoder = msgspec.msgpack.Decoder(Translation)


def translate(encoded: bytes) -> Translation:
    try:
        grammar = validation.read(encoded)
        token_ids = {part.token_id for part in walk(*grammar.rules) if isinstance(part, Token)}
        return Translation(to_lark(grammar), tuple(token_ids))
    except EmberlineError as error:
        return Translation(error=error.info())
    except (MemoryError, RecursionError):
        message = "the grammar is nested too deeply or too large; use a simpler schema"
        return Translation(error=BadInput(message, param="grammar").info())


def main() -> None:
    os.nice(NICE)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with socket.socket(fileno=sys.stdin.fileno()) as sock:
        sock.sendall(frames.encode(Translation()))  # ready
        received = frames.FrameBuffer()
        while data := sock.recv(_RECV_BYTES):
            for encoded in received.feed(data):
                sock.sendall(frames.encode(translate(encoded)))


class TranslatorProcess:
    """Started on first use, and again after it died. One thread uses it, except for `close`. It ends with this process
    at the latest."""

    def __init__(self, limit_s: float = LIMIT_S, wall_s: float = WALL_S) -> None:
        self._limit_s, self._wall_s = limit_s, wall_s
        self._closed = False
        self._child: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._received = frames.FrameBuffer()

    @property
    def pid(self) -> int | None:
        """Id of the process. Returns None if none runs."""
        return None if self._child is None else self._child.pid

    def start(self) -> None:
        """Start the process, unless it runs. Raises OSError if it does not start, or is closed."""
        if self._closed:
            raise ConnectionAbortedError("the translator is closed")
        if self._child is None:
            here, there = socket.socketpair()
            # No join token, no keys: it gets nothing of ours but the way to the package.
            env = {name: value for name, value in os.environ.items() if not name.startswith("EMBERLINE_")}
            with there:
                command = [sys.executable, "-m", "emberline.engine.grammar.translator_process"]
                self._child = subprocess.Popen(command, stdin=there.fileno(), stdout=subprocess.DEVNULL, env=env)
            self._sock, self._received = here, frames.FrameBuffer()
            try:
                self._receive(time.monotonic() + START_S)
            except OSError:  # what it says later would be taken for an answer
                self.kill()
                raise

    def translate(self, encoded: bytes) -> Translation:
        """Translate a grammar. Raises BadInput if the grammar is at fault."""
        for _ in range(ATTEMPTS):
            try:
                self.start()
            except OSError:
                continue
            try:
                assert self._sock is not None
                until_s, cpu_until_s = time.monotonic() + self._wall_s, self._cpu_s() + self._limit_s
                self._sock.settimeout(self._wall_s)
                self._sock.sendall(frames.LENGTH.pack(len(encoded)) + encoded)
                found = self._receive(until_s, cpu_until_s)
            except TimeoutError:
                self.kill()
                message = f"the grammar takes longer than {self._limit_s:g} s to compile; use a simpler schema"
                raise BadInput(message, param="grammar") from None
            except OSError:
                self.kill()
                continue
            if found.error is not None:
                raise from_info(found.error)
            return found
        raise Internal("the engine could not compile this request's grammar")

    def close(self) -> None:
        """End what is being translated, and let the process not start again. Any thread may call this."""
        self._closed = True
        if (child := self._child) is not None:
            child.kill()  # the thread that uses it reads the end of the connection

    def kill(self) -> None:
        """End the process, if it runs."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.wait()
        if self._sock is not None:
            self._sock.close()

    def _cpu_s(self) -> float:
        """Processor time that the process has used. Raises OSError if it has ended."""
        assert self._child is not None
        return time.clock_gettime(~self._child.pid << 3 | 2)  # Linux's number of the clock of a process

    def _receive(self, until_s: float, cpu_until_s: float = math.inf) -> Translation:
        """The process's next answer. Raises TimeoutError when the time by the clock or its processor time is over."""
        assert self._sock is not None
        while True:
            left_s = min(until_s - time.monotonic(), cpu_until_s - self._cpu_s())
            if left_s <= _CLOCK_S:
                raise TimeoutError
            self._sock.settimeout(left_s)
            try:
                data = self._sock.recv(_RECV_BYTES)
            except TimeoutError:  # of the shorter limit, if it had the processor all the while
                continue
            if not data:
                raise ConnectionError("the process has ended")
            for payload in self._received.feed(data):
                return frames.decode(_decoder, payload)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt, ConnectionError):
        main()
