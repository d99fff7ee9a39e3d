"""A connection between two engines: messages, bytes and file descriptors over a blocking socket, for one thread."""

import array
import contextlib
import os
import selectors
import socket
import ssl
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from emberline.protocol import frames

MAX_DESCRIPTORS = 16
MAX_MESSAGE_BYTES = 16 << 20
T = TypeVar("T")


class PeerConnectionLost(Exception):
    """The other engine is gone or violated the protocol; the text says why."""


class PeerConnection:
    """Reads exactly what it is asked for, so that bytes after a message go directly into their block."""

    def __init__(self, sock: socket.socket, hosts: tuple[str, str] | None = None) -> None:
        """hosts: this machine and the other one, if `sock` is the near end of a tunnel between them."""
        sock.setblocking(True)
        frames.detect_dead_peer(sock)
        self._sock, self._tunneled = sock, hosts
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ)
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._descriptors: list[int] = []

    @property
    def local(self) -> bool:
        """File descriptors can be sent."""
        return self._sock.family == socket.AF_UNIX and self._tunneled is None

    @property
    def local_host(self) -> str:
        """The address by which this machine reaches the other side."""
        if self._tunneled is not None:
            return self._tunneled[0]
        return "127.0.0.1" if self.local else str(self._sock.getsockname()[0])

    @property
    def peer_host(self) -> str:
        """The address of the other machine; empty: it is this one."""
        if self._tunneled is not None:
            host = self._tunneled[1]
        else:
            host = "" if self.local else str(self._sock.getpeername()[0])
        return "" if host == "::1" or host.startswith("127.") else host

    def fileno(self) -> int:
        return self._sock.fileno()

    def set_timeout(self, seconds: float | None) -> None:
        """Limit each read and write; a connection that exceeds the limit is lost. None, as at first, sets no limit."""
        self._sock.settimeout(seconds)

    def wake(self) -> None:
        """From any thread: `wait` returns."""
        with contextlib.suppress(BlockingIOError, OSError):  # full: it is awake already; closed: no thread waits
            self._wake_writer.send(b"\0")

    def wait(self, block: bool = True, timeout_s: float | None = None) -> bool:
        """Wait until a message can be read (returns True), `wake` is called, or the timeout expires."""
        unread = isinstance(self._sock, ssl.SSLSocket) and self._sock.pending() > 0  # of a record that was begun
        ready = {key.fileobj for key, _ in self._selector.select(timeout_s if block and not unread else 0)}
        if self._wake_reader in ready:
            with contextlib.suppress(BlockingIOError):
                while self._wake_reader.recv(4096):
                    pass
        return unread or self._sock in ready

    def send(self, message: msgspec.Struct, descriptors: Sequence[int] = ()) -> None:
        frame = frames.encode(message)
        try:
            if descriptors:
                n_sent = socket.send_fds(self._sock, [frame], list(descriptors))
                frame = frame[n_sent:]
            if frame:
                self._sock.sendall(frame)
        except OSError as error:
            raise PeerConnectionLost(str(error)) from None

    def send_bytes(self, parts: Sequence[memoryview]) -> None:
        try:
            for part in parts:
                self._sock.sendall(part)
        except OSError as error:
            raise PeerConnectionLost(str(error)) from None

    def receive(self, decoder: msgspec.msgpack.Decoder[T], max_bytes: int = MAX_MESSAGE_BYTES) -> T:
        """The next message."""
        header = bytearray(frames.LENGTH.size)
        self.read_into(memoryview(header))
        (length,) = frames.LENGTH.unpack(header)
        if length > max_bytes:
            raise PeerConnectionLost(f"a message of {length} bytes, the maximum is {max_bytes}")
        payload = bytearray(length)
        self.read_into(memoryview(payload))
        try:
            return frames.decode(decoder, payload)
        except frames.FrameError as error:
            raise PeerConnectionLost(str(error)) from None

    def read_into(self, view: memoryview) -> None:
        while view:
            n = self._receive_some(view)
            if not n:
                raise PeerConnectionLost("closed by the other engine")
            view = view[n:]

    def take_descriptors(self, n: int) -> list[int]:
        """File descriptors that came with the last messages. The caller closes them."""
        if len(self._descriptors) != n:
            raise PeerConnectionLost(f"{len(self._descriptors)} file descriptors were received, {n} were announced")
        taken, self._descriptors = self._descriptors, []
        return taken

    def shutdown(self) -> None:
        """From any thread: a pending read or write raises PeerConnectionLost."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)  # an SSL socket's own would forget the encryption
        self.wake()

    def close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()
        self._selector.close()
        for sock in (self._sock, self._wake_reader, self._wake_writer):
            sock.close()

    def _receive_some(self, view: memoryview) -> int:
        try:
            if self._sock.family != socket.AF_UNIX:
                return self._sock.recv_into(view)
            room = socket.CMSG_LEN(MAX_DESCRIPTORS * array.array("i").itemsize)
            n, ancillary, _, _ = self._sock.recvmsg_into([view], room)
        except OSError as error:
            raise PeerConnectionLost(str(error)) from None
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                received = array.array("i")
                received.frombytes(data[: len(data) - len(data) % received.itemsize])
                self._descriptors += received.tolist()
        if len(self._descriptors) > MAX_DESCRIPTORS:
            raise PeerConnectionLost("too many file descriptors")
        return n
