"""An HTTP proxy on a Unix socket, by which a predictor fetches its weights while it is pushed: granted hosts alone.

The operator grants hosts by name. Their addresses still have to pass the egress policy, so that a name that leads into
the operator's network is refused. A tunnel (CONNECT) leads to port 443; plain HTTP works where the policy allows it.
"""

import asyncio
import contextlib
import fnmatch
import os
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from emberline.net.egress_policy import EgressPolicy, Target, parse_target
from emberline.protocol.errors import BadInput, EmberlineError

MAX_HEAD_BYTES = 64 << 10
HEAD_S, CONNECT_S = 30.0, 15.0
CHUNK_BYTES = 256 << 10


class EgressProxy:
    """A proxy in a thread of its own. Close it."""

    def __init__(
        self, path: Path, hosts: Sequence[str], egress: EgressPolicy, on_refusal: Callable[[str], None]
    ) -> None:
        """Listen on the Unix socket `path`. `hosts` are names or patterns such as `*.example.org`; `on_refusal` gets
        what was refused, in words, in the proxy's thread."""
        self._hosts = [host.lower() for host in hosts]
        self._egress = egress
        self._on_refusal = on_refusal
        self._loop = asyncio.new_event_loop()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        os.chmod(path, 0o666)
        self._listener.listen(64)
        self._listener.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="egress proxy", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all connections."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(asyncio.start_unix_server(self._serve, sock=self._listener, limit=MAX_HEAD_BYTES))
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(HEAD_S):
                head = await reader.readuntil(b"\r\n\r\n")
            method, address, rest = _request(head)
            target = _tunnel(address) if method == "CONNECT" else parse_target(address)
            theirs, their_writer = await self._connect(target)
        except EmberlineError as error:
            self._on_refusal(error.message)
            await _answer(writer, 403, error.message)
            return
        except (OSError, ValueError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            await _answer(writer, 502, f"the proxy cannot fetch this: {error or type(error).__name__}")
            return
        if method == "CONNECT":
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        else:
            their_writer.write(f"{method} {target.path} HTTP/1.1\r\n".encode("ascii") + rest)
        sending = asyncio.ensure_future(_pump(reader, their_writer))
        with contextlib.suppress(OSError, asyncio.CancelledError):  # cancelled: the proxy closes
            await _pump(theirs, writer)
        sending.cancel()
        for each in (writer, their_writer):
            each.close()

    async def _connect(self, target: Target) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to an address that was checked. Raises BadInput if the host is not granted."""
        names = (target.host.lower(), f"{target.host.lower()}:{target.port}")
        if not any(fnmatch.fnmatchcase(name, host) for name in names for host in self._hosts):
            raise BadInput(f"{target.host} is not a granted host: push with --fetch-from {target.host}")
        for address in await self._egress.addresses(target):
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(CONNECT_S):
                    return await asyncio.open_connection(address, target.port, limit=CHUNK_BYTES)
        raise OSError(f"{target.host} cannot be reached")


def _request(head: bytes) -> tuple[str, str, bytes]:
    """Method, address and the rest of the head, without the fields that are for the proxy. One request a connection."""
    line, _, fields = head.partition(b"\r\n")
    method, address, _ = line.decode("ascii").split(" ")
    kept = [
        field
        for field in fields.rstrip(b"\r\n").split(b"\r\n")
        if field and not field.lower().startswith((b"proxy-", b"connection:"))
    ]
    return method, address, b"\r\n".join([*kept, b"connection: close", b"", b""])


def _tunnel(address: str) -> Target:
    host, _, port = address.rpartition(":")
    if port != "443":
        raise BadInput(f"a tunnel leads to port 443, not to {address[:200]}")
    return parse_target(f"https://{host}/")


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
        writer.write_eof()


async def _answer(writer: asyncio.StreamWriter, status: int, message: str) -> None:
    body = f"{message}\n".encode("utf-8", "replace")
    head = f"HTTP/1.1 {status} Refused\r\ncontent-type: text/plain\r\ncontent-length: {len(body)}\r\n"
    with contextlib.suppress(OSError):
        writer.write(f"{head}connection: close\r\n\r\n".encode() + body)
        await writer.drain()
    writer.close()
