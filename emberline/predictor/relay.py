"""Runs inside a sandbox, with the predictor's interpreter and the standard library alone, which is no code of ours.

`python -I -S relay.py LISTENER PORT PROXY_PORT PROXY COMMAND …` runs a server that can listen at a TCP port only, in
the sandbox's own network. A client of the Unix socket LISTENER outside gets a socket that is connected to that port: a
socket belongs to the network in which it was made, whoever has it. LISTENER is the descriptor of the listening socket,
or the path of a Unix socket from which that descriptor comes; the server is killed when the latter is closed. Programs
inside find an HTTP proxy at PROXY_PORT, which is the Unix socket PROXY outside, unless PROXY_PORT is 0.
"""

import asyncio
import contextlib
import glob
import os
import signal
import socket
import sys
import time

CHUNK_BYTES = 256 << 10
CONNECT_S = 5.0
SWEEP_S = 5.0  # between two looks for outputs that were sent
SENT_S = 10.0  # the age of such an output: Cog's server reads it as soon as it is written


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy bytes until the reader's end."""
    with contextlib.suppress(OSError):
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(OSError, RuntimeError):
        writer.write_eof()


def join(listener: socket.socket, port: int) -> None:
    """Give each client outside a connection to the server's port: the socket itself, so that no byte passes here.

    The client's connection is closed in any case. Without a descriptor in it, the server does not listen yet."""
    with contextlib.suppress(BlockingIOError):
        client, _ = listener.accept()
        with client, contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), CONNECT_S) as server:
            server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            socket.send_fds(client, [b"x"], [server.fileno()])


async def join_proxy(inner: asyncio.StreamReader, inner_writer: asyncio.StreamWriter, path: str) -> None:
    """Join one connection of a program inside to the proxy outside."""
    try:
        outer, outer_writer = await asyncio.open_unix_connection(path, limit=CHUNK_BYTES)
    except OSError:
        inner_writer.close()
        return
    await asyncio.gather(pump(inner, outer_writer), pump(outer, inner_writer), return_exceptions=True)
    inner_writer.close()
    outer_writer.close()


async def sweep() -> None:
    """Remove large outputs that Cog's server has sent: it writes them to files in the scratch space and leaves them."""
    scratch = os.environ.get("TMPDIR", "/tmp")
    while True:
        await asyncio.sleep(SWEEP_S)
        for path in glob.glob(f"{scratch}/coglet/predictions/*/outputs/spill_*"):
            with contextlib.suppress(OSError):
                if time.time() - os.stat(path).st_mtime > SENT_S:
                    os.unlink(path)


def open_listener(given: str) -> "tuple[socket.socket, socket.socket | None]":
    """The listening socket, and the connection that it came over. None if this process inherited it."""
    if given.isdigit():
        return socket.socket(fileno=int(given)), None
    control = socket.socket(socket.AF_UNIX)
    control.connect(given)
    _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
    return socket.socket(fileno=descriptors[0]), control


async def main() -> int:
    port, proxy_port = map(int, sys.argv[2:4])
    proxy, command = sys.argv[4], sys.argv[5:]
    listener, control = open_listener(sys.argv[1])
    listener.setblocking(False)
    if proxy_port:
        await asyncio.start_server(
            lambda reader, writer: join_proxy(reader, writer, proxy), "127.0.0.1", proxy_port, limit=CHUNK_BYTES
        )
    process = await asyncio.create_subprocess_exec(*command)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, process.terminate)
    if control is not None:

        def on_end() -> None:  # nothing else is ever sent
            loop.remove_reader(control)
            with contextlib.suppress(ProcessLookupError):
                process.kill()

        loop.add_reader(control, on_end)
    loop.add_reader(listener, join, listener, port)
    sweeping = asyncio.ensure_future(sweep())
    status = await process.wait()
    sweeping.cancel()
    loop.remove_reader(listener)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
