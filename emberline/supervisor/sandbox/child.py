"""A confined process: `python -m emberline.supervisor.sandbox.child MODULE DESCRIPTOR CONFINEMENT`.

It imports MODULE, which is ours, confines itself, and then answers frames on the socket DESCRIPTOR by the module's
`handle(data) -> bytes`. A frame to it: the CPU seconds it may use (f64) and the data's length (u32), little-endian, and
the data. A frame from it: the length (u32) and the data; the first has the protections that the kernel lacks, as JSON.
"""

import gc
import importlib
import signal
import socket
import struct
import sys

import msgspec

from emberline.supervisor.sandbox.confinement import Confinement, bound_cpu_time, confine

REQUEST = struct.Struct("<dI")
REPLY = struct.Struct("<I")


def main() -> None:
    module, descriptor, encoded = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher ends this process
    handle = importlib.import_module(module).handle
    with socket.socket(fileno=int(descriptor)) as link:
        gc.freeze()
        missing = confine(msgspec.json.decode(encoded, type=Confinement))
        _send(link, msgspec.json.encode(missing))
        while (head := _receive(link, REQUEST.size)) is not None:
            cpu_s, length = REQUEST.unpack(head)
            if (data := _receive(link, length)) is None:
                return
            bound_cpu_time(cpu_s)
            _send(link, handle(bytes(data)))


def _receive(link: socket.socket, length: int) -> bytearray | None:
    """Read `length` bytes. Returns None if the launcher is gone."""
    data = bytearray(length)
    view, n = memoryview(data), 0
    while n < length:
        if not (got := link.recv_into(view[n:])):
            return None
        n += got
    return data


def _send(link: socket.socket, data: bytes) -> None:
    link.sendall(REPLY.pack(len(data)) + data)


if __name__ == "__main__":
    main()
