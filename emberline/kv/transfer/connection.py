"""One end of a connection between two engines: messages and bytes in and out of a blocking socket, one thread."""

import array
import contextlib
import os
import selectors
import socket
from collections.abc import Sequence

import msgspec

from emberline.kv.transfer.messages import LENGTH, MAX_MESSAGE_BYTES

MAX_DESCRIPTORS = 16
_encoder = msgspec.msgpack.Encoder()


class LinkLost(Exception):
    """The other engine is gone, or says what cannot be; the text says why."""


class Link:
    """Reads exactly what it is asked for, so that bytes behind a message go straight to where they belong."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        if sock.family != socket.AF_UNIX:
            _notice_silence(sock)
        self._sock = sock
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ)
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._descriptors: list[int] = []

    @property
    def local(self) -> bool:
        """Descriptors can be sent along."""
        return self._sock.family == socket.AF_UNIX

    def wake(self) -> None:
        """From any thread: `wait` returns."""
        with contextlib.suppress(BlockingIOError, OSError):  # full: it is awake already; closed: nobody waits
            self._wake_writer.send(b"\0")

    def wait(self, block: bool = True, at_most_s: float | None = None) -> bool:
        """Until a message is there (True), somebody wakes us, or time is up."""
        ready = {key.fileobj for key, _ in self._selector.select(at_most_s if block else 0)}
        if self._wake_reader in ready:
            with contextlib.suppress(BlockingIOError):
                while self._wake_reader.recv(4096):
                    pass
        return self._sock in ready

    def send(self, message: msgspec.Struct, descriptors: Sequence[int] = ()) -> None:
        payload = _encoder.encode(message)
        frame = LENGTH.pack(len(payload)) + payload
        try:
            if descriptors:
                n_sent = socket.send_fds(self._sock, [frame], list(descriptors))
                frame = frame[n_sent:]
            if frame:
                self._sock.sendall(frame)
        except OSError as error:
            raise LinkLost(str(error)) from None

    def send_bytes(self, parts: Sequence[memoryview]) -> None:
        try:
            for part in parts:
                self._sock.sendall(part)
        except OSError as error:
            raise LinkLost(str(error)) from None

    def receive(self) -> bytes:
        """The next message's payload."""
        (length,) = LENGTH.unpack(self._exactly(LENGTH.size))
        if length > MAX_MESSAGE_BYTES:
            raise LinkLost(f"a message of {length} bytes, at most {MAX_MESSAGE_BYTES} allowed")
        return self._exactly(length)

    def read_into(self, view: memoryview) -> None:
        """Bytes straight to where they belong."""
        while view:
            try:
                n = self._sock.recv_into(view)
            except OSError as error:
                raise LinkLost(str(error)) from None
            if not n:
                raise LinkLost("closed by the other engine")
            view = view[n:]

    def take_descriptors(self, n: int) -> list[int]:
        """Those that came with the last messages. The caller closes them."""
        if len(self._descriptors) != n:
            raise LinkLost(f"{len(self._descriptors)} descriptors came, {n} were announced")
        taken, self._descriptors = self._descriptors, []
        return taken

    def shut(self) -> None:
        """From any thread: whoever reads or writes here is told that the connection is lost."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self.wake()

    def close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()
        self._selector.close()
        for sock in (self._sock, self._wake_reader, self._wake_writer):
            sock.close()

    def _exactly(self, n_bytes: int) -> bytes:
        data = bytearray(n_bytes)
        view = memoryview(data)
        while view:
            n = self._receive_some(view)
            if not n:
                raise LinkLost("closed by the other engine")
            view = view[n:]
        return bytes(data)

    def _receive_some(self, view: memoryview) -> int:
        try:
            if self._sock.family != socket.AF_UNIX:
                return self._sock.recv_into(view)
            room = socket.CMSG_LEN(MAX_DESCRIPTORS * array.array("i").itemsize)
            n, ancillary, _, _ = self._sock.recvmsg_into([view], room)
        except OSError as error:
            raise LinkLost(str(error)) from None
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                found = array.array("i")
                found.frombytes(data[: len(data) - len(data) % found.itemsize])
                self._descriptors += found.tolist()
        if len(self._descriptors) > MAX_DESCRIPTORS:
            raise LinkLost("too many descriptors")
        return n


def _notice_silence(sock: socket.socket) -> None:
    """A machine that vanished says nothing: ask after five seconds, believe it after fifteen."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 5), ("TCP_USER_TIMEOUT", 15_000)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
