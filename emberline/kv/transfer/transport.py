"""Transports: how the bytes of a block get into the memory of another engine. Here TCP and shared memory."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from emberline.kv.host_memory import HostMemory
from emberline.kv.slices import ByteRun
from emberline.kv.transfer.connection import PeerConnection
from emberline.kv.transfer.messages import BlockData, Item, TransportOpened

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


class Target(NamedTuple):
    """A rank of the receiver that has other slices of each block than we have."""

    runs: Sequence[Sequence[ByteRun]]  # per group: what we have of its blocks
    block_bytes: Sequence[int]  # of its blocks


class TransportUnavailable(Exception):
    """A transport does not reach the other engine; the text says why. Another one may."""


class BlockSource(Protocol):
    """Blocks that are sent over a connection."""

    def block(self, group: int, block: int) -> memoryview: ...


class BlockSink(Protocol):
    """Blocks that are received over a connection."""

    @property
    def block_bytes(self) -> Sequence[int]: ...  # of each group

    def fill(
        self, group: int, block: int, runs: Sequence[ByteRun] | None, read_into: Callable[[memoryview], None]
    ) -> None:
        """Write what `read_into` reads, in this order, to these parts of a block (None: all of it). Returns when it is
        there."""


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

    def opened(self) -> tuple[TransportOpened, list[int]]:
        """The message that a sender needs, and the file descriptors that go along."""


def host_id() -> str:
    """Identifies this machine and its boot: equal on both sides, memory can be shared."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class TcpReceiveTransport:
    name = TCP
    linger_s = 0.0

    def opened(self) -> tuple[TransportOpened, list[int]]:
        return TransportOpened(), []


class TcpSendTransport:
    """Bytes on the connection itself, after a `BlockData` message."""

    batch_bytes = 4 << 20

    def __init__(self, memory: BlockSource, connection: PeerConnection, target: Target | None = None) -> None:
        self._memory = memory
        self._connection = connection
        self._runs = None if target is None else target.runs

    def write(self, epoch: int, copies: Sequence[BlockCopy]) -> None:
        self._connection.send(BlockData(epoch, [copy.item for copy in copies]))
        self._connection.send_bytes([part for copy in copies for part in self._parts(copy)])

    def _parts(self, copy: BlockCopy) -> list[memoryview]:
        block = self._memory.block(copy.group, copy.source)
        if self._runs is None:
            return [block]
        return [block[run.source : run.source + run.n_bytes] for run in self._runs[copy.group]]

    def close(self) -> None:
        pass


class SharedMemoryReceiveTransport:
    name = SHARED_MEMORY
    linger_s = 0.0  # the kernel closes a dead process's sockets after its last thread has stopped

    def __init__(self, memory: HostMemory) -> None:
        assert memory.descriptors
        self._memory = memory

    def opened(self) -> tuple[TransportOpened, list[int]]:
        descriptors = list(self._memory.descriptors)
        return TransportOpened([host_id().encode()], len(descriptors)), descriptors


class SharedMemorySendTransport:
    """Writes into the receiver's pool through its file descriptor.

    Written, not mapped: the kernel allocates missing pages without a fault for each, and nothing of the other process
    is in our address space.
    """

    batch_bytes = 16 << 20

    def __init__(self, memory: HostMemory, descriptors: Sequence[int], target: Target | None = None) -> None:
        if len(descriptors) != len(memory.block_bytes):
            for descriptor in descriptors:
                os.close(descriptor)
            raise TransportUnavailable(f"{len(descriptors)} pools are shared, {len(memory.block_bytes)} are needed")
        self._memory = memory
        self._descriptors = list(descriptors)
        whole = Target([[ByteRun(0, 0, n)] for n in memory.block_bytes], memory.block_bytes)
        self._runs, self._target_bytes = whole if target is None else target

    def write(self, epoch: int, copies: Sequence[BlockCopy]) -> None:
        for copy in copies:
            block = self._memory.block(copy.group, copy.source)
            first = copy.target * self._target_bytes[copy.group]
            for source, target, n_bytes in self._runs[copy.group]:
                view, offset = block[source : source + n_bytes], first + target
                while view:
                    n = os.pwrite(self._descriptors[copy.group], view, offset)
                    view, offset = view[n:], offset + n

    def close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()
