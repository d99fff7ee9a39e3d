"""The process that holds a worker's client of Mooncake Store; run by `pool_client.py`, one at a time for each worker.

The client library keeps a call for up to a minute when its master or a peer does not answer, writes into the caller's
memory until then, and is native code. In a process of its own it can be killed at any moment: no call outlives it, and
nothing is written after it is gone. It lends no memory to the pool, so nothing is lost with it.

Blocks lie in memory that both processes have mapped; the library reads and writes it directly.
"""

import argparse
import contextlib
import ctypes
import importlib
import mmap
import os
import signal
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import msgspec

from emberline.protocol.frames import FrameBuffer, decode, encode
from emberline.protocol.kv_store import StoreSettings

N_THREADS = 4  # calls at once: reads, writes, lookups, all else
LOCAL_BUFFER_BYTES = 16 << 20  # of the library's own; blocks do not pass through it
FAILED = -1  # the library raised an exception
_PR_SET_PDEATHSIG = 1

Operation = Literal["exist", "get", "get_head", "put", "remove"]


class PoolCall(msgspec.Struct, array_like=True):
    """`starts` and `sizes`: where in the shared memory each object lies, for `get` and `put`, or its first bytes, for
    `get_head`."""

    number: int
    operation: Operation
    names: list[str]
    starts: list[int] = []
    sizes: list[int] = []


class Reply(msgspec.Struct, array_like=True):
    """Mooncake's code for each name: negative for an error; of `exist` 1 or 0, of a `get` the number of bytes.

    The first reply of a process, number 0, says that it is connected, or why it is not.
    """

    number: int
    codes: list[int] = []
    error: str = ""


def connect(settings: StoreSettings, lend_bytes: int = 0) -> Any:
    """A client of the pool that lends it so much memory. OSError says why there is none."""
    try:
        library = importlib.import_module("mooncake.store")
    except ImportError as error:
        raise OSError(f"Mooncake Store cannot be loaded: {error}") from None
    store = library.MooncakeDistributedStore()
    local = f"{settings.host}:{_free_port(settings.host)}"
    options = (settings.protocol, settings.device, settings.master)
    code = store.setup(local, "P2PHANDSHAKE", lend_bytes, LOCAL_BUFFER_BYTES, *options)
    if code:
        raise OSError(f"the pool at {settings.master} cannot be joined: Mooncake's error {code}")
    return store


def end_with_parent() -> None:
    """SIGKILL when the process that started this one is gone; on Linux only."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host.strip("[]"), 0))
        port: int = probe.getsockname()[1]
        return port


class _Calls:
    """Executes calls on the store, with addresses in the shared memory."""

    def __init__(self, store: Any, memory: mmap.mmap) -> None:
        self._store = store
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._operations: dict[str, Callable[[PoolCall], list[int]]] = {
            "exist": lambda call: store.batch_is_exist(call.names),
            "get": lambda call: store.batch_get_into(call.names, self._addresses(call), call.sizes),
            "put": lambda call: store.batch_put_from(call.names, self._addresses(call), call.sizes),
            "remove": lambda call: store.batch_remove(call.names, True),
            "get_head": self._get_heads,
        }
        if store.register_buffer(self._base, len(memory)):
            raise OSError("Mooncake cannot register the shared memory")

    def execute(self, call: PoolCall) -> list[int]:
        try:
            return list(self._operations[call.operation](call))
        except Exception:  # of the library: an error of these names
            return [FAILED] * len(call.names)

    def _addresses(self, call: PoolCall) -> list[int]:
        return [self._base + start for start in call.starts]

    def _get_heads(self, call: PoolCall) -> list[int]:
        """In the library's terms: of one buffer, for each name, one range."""
        targets, sources, sizes = ([[[n] for n in each]] for each in (call.starts, [0] * len(call.names), call.sizes))
        codes = self._store.get_into_ranges([self._base], [call.names], targets, sources, sizes)
        return [code for (code,) in codes[0]]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m emberline.kv.tiers.pool.pool_process", description=__doc__)
    parser.add_argument("--socket", type=int, required=True, help="descriptor of the connection to the worker")
    parser.add_argument("--memory", type=int, required=True, help="descriptor of the shared memory")
    parser.add_argument("--store", required=True, help="StoreSettings as JSON")
    args = parser.parse_args(argv)
    end_with_parent()
    connection = socket.socket(fileno=args.socket)
    memory = mmap.mmap(args.memory, os.fstat(args.memory).st_size)
    try:
        calls = _Calls(connect(msgspec.json.decode(args.store, type=StoreSettings)), memory)
    except OSError as error:
        connection.sendall(encode(Reply(0, error=str(error))))
        return 1
    connection.sendall(encode(Reply(0)))
    _serve(connection, calls)
    return 0


def _serve(connection: socket.socket, calls: _Calls) -> None:
    """Answer calls until the worker closes its end."""
    lock = threading.Lock()

    def answer(call: PoolCall) -> None:
        reply = encode(Reply(call.number, calls.execute(call)))
        with lock, contextlib.suppress(OSError):  # the worker is gone, and with it this process
            connection.sendall(reply)

    decoder, frames = msgspec.msgpack.Decoder(PoolCall), FrameBuffer()
    threads = ThreadPoolExecutor(N_THREADS)
    while data := connection.recv(1 << 16):
        for payload in frames.feed(data):
            threads.submit(answer, decode(decoder, payload))
    os._exit(0)  # a call may hang: nobody waits for it


if __name__ == "__main__":
    raise SystemExit(main())
