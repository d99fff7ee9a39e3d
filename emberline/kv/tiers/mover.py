"""Copies of whole blocks between the device pool and host memory."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from emberline.kv.host_memory import HostMemory
from emberline.kv.tiers.host import Slot, copy


class BlockCopy(NamedTuple):
    group: int
    block: int  # of the device pool
    slot: Slot


class Ticket(Protocol):
    def wait(self) -> None:
        """Return when the copies are done."""


class BlockMover(Protocol):
    """Two threads use it, one for each direction. Copies of a direction are done in order."""

    def load(self, copies: Sequence[BlockCopy]) -> Ticket:
        """From host memory to the device."""

    def save(self, copies: Sequence[BlockCopy]) -> Ticket:
        """From the device to host memory. The steps that wrote the blocks have completed."""


class _Done:
    def wait(self) -> None:
        """Return at once: the copy is done."""


class HostMover:
    """For a device pool in host memory."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory

    def load(self, copies: Sequence[BlockCopy]) -> Ticket:
        for group, block, slot in copies:
            copy(self._memory.block(group, block), slot.buffer)
        return _Done()

    def save(self, copies: Sequence[BlockCopy]) -> Ticket:
        for group, block, slot in copies:
            copy(slot.buffer, self._memory.block(group, block))
        return _Done()
