"""Transports: how the bytes of a block get into the memory of another engine. Here TCP and shared memory."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from emberline.kv.host_memory import HostMemory
from emberline.kv.transfer.connection import PeerConnection
from emberline.kv.transfer.messages import BlockData, Item

TCP = "tcp"
SHARED_MEMORY = "shm"


class BlockCopy(NamedTuple):
    """One of our blocks, and the receiver's block that it is written to."""

    item: Item
    source: int
    target: int

    @property
    def group(self) -> int:
        return self.item[0]


class TransportUnavailable(Exception):
    """This transport does not reach the other engine; the text says why. Another one may."""


class SendTransport(Protocol):
    """Used only by the thread that owns the connection."""

    batch_bytes: int  # written at once, before the next look at what the receiver says

    def write(self, epoch: int, copies: Sequence[BlockCopy]) -> None:
        """Returns when the bytes are in the receiver's blocks, or will be before any later message is read."""

    def close(self) -> None:
        """Nothing is written after it."""


class ReceiveTransport(Protocol):
    """Tells a sender how to reach our blocks."""

    name: str
    linger_s: float  # how long a sender may still write after its connection is lost

    def handles(self) -> tuple[list[bytes], list[int]]:
        """What a sender needs, per group, and the file descriptors that go along."""


def host_id() -> str:
    """Identifies this machine and its boot: equal on both sides, memory can be shared."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class TcpReceiveTransport:
    name = TCP
    linger_s = 0.0

    def handles(self) -> tuple[list[bytes], list[int]]:
        return [], []


class TcpSendTransport:
    """Bytes on the connection itself, after a `BlockData` message."""

    batch_bytes = 4 << 20

    def __init__(self, memory: HostMemory, connection: PeerConnection) -> None:
        self._memory = memory
        self._connection = connection

    def write(self, epoch: int, copies: Sequence[BlockCopy]) -> None:
        self._connection.send(BlockData(epoch, [copy.item for copy in copies]))
        self._connection.send_bytes([self._memory.block(copy.group, copy.source) for copy in copies])

    def close(self) -> None:
        pass


class SharedMemoryReceiveTransport:
    name = SHARED_MEMORY
    linger_s = 0.0  # the kernel closes a dead process's sockets after its last thread has stopped

    def __init__(self, memory: HostMemory) -> None:
        assert memory.descriptors
        self._memory = memory

    def handles(self) -> tuple[list[bytes], list[int]]:
        return [host_id().encode()], list(self._memory.descriptors)


class SharedMemorySendTransport:
    """Writes into the receiver's pool through its file descriptor.

    Written, not mapped: the kernel allocates missing pages without a fault for each, and nothing of the other process
    is in our address space.
    """

    batch_bytes = 16 << 20

    def __init__(self, memory: HostMemory, descriptors: Sequence[int]) -> None:
        if len(descriptors) != len(memory.block_bytes):
            for descriptor in descriptors:
                os.close(descriptor)
            raise TransportUnavailable(f"{len(descriptors)} pools are shared, {len(memory.block_bytes)} are needed")
        self._memory = memory
        self._descriptors = list(descriptors)

    def write(self, epoch: int, copies: Sequence[BlockCopy]) -> None:
        for copy in copies:
            view = self._memory.block(copy.group, copy.source)
            offset = copy.target * len(view)
            while view:
                n = os.pwrite(self._descriptors[copy.group], view, offset)
                view, offset = view[n:], offset + n

    def close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()
