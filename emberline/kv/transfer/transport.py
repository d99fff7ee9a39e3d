"""The small protocol behind which the ways lie that bytes can take: shared memory, TCP, CUDA IPC, Mooncake."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from emberline.kv.transfer.connection import Link
from emberline.kv.transfer.messages import Data, Item


class Move(NamedTuple):
    """A block of ours that goes into one of theirs."""

    item: Item
    source: int
    target: int

    @property
    def group(self) -> int:
        return self.item[0]


class TransportClosed(Exception):
    """This way does not lead there; the text says why. Another may."""


class SendTransport(Protocol):
    """The sender's end. One thread uses it, the one that owns the connection."""

    batch_bytes: int  # put at once, before the next look at what the other side says

    def put(self, epoch: int, moves: Sequence[Move]) -> None:
        """Returns when the bytes are in the other's blocks, or certain to be before anything that is said later."""

    def close(self) -> None:
        """Nothing is written after it."""


class ReceiveTransport(Protocol):
    """The receiver's end: it says how to reach our blocks, and how long a sender that is gone may still write."""

    name: str
    linger_s: float

    def handles(self) -> tuple[list[bytes], list[int]]:
        """What a sender needs, per group, and the descriptors that go along."""


class Memory(Protocol):
    """Blocks of this engine in the host's memory."""

    @property
    def n_groups(self) -> int: ...

    def block(self, group: int, block: int) -> memoryview: ...


def host_name() -> str:
    """Names this machine and its boot: equal on both sides, memory can be shared."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


NAME = "tcp"


class SocketInlet:
    name = NAME
    linger_s = 0.0

    def handles(self) -> tuple[list[bytes], list[int]]:
        return [], []


class SocketOutlet:
    batch_bytes = 4 << 20

    def __init__(self, memory: Memory, link: Link) -> None:
        self._memory = memory
        self._link = link

    def put(self, epoch: int, moves: Sequence[Move]) -> None:
        self._link.send(Data(epoch, [move.item for move in moves]))
        self._link.send_bytes([self._memory.block(move.group, move.source) for move in moves])

    def close(self) -> None:
        pass
