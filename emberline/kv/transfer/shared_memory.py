"""Shared memory: the sender writes straight into the receiver's pool, through its descriptor.

Written, not mapped: a page that the pool does not have yet is made by the kernel without a fault for each, and nothing
of the other process is in our address space.
"""

import os
from collections.abc import Sequence

from emberline.kv.host_memory import HostMemory
from emberline.kv.transfer.transport import Move, TransportClosed, host_name

NAME = "shm"


class SharedInlet:
    name = NAME
    linger_s = 0.0  # the kernel closes a dead process's sockets when its last thread has stopped

    def __init__(self, memory: HostMemory) -> None:
        assert memory.descriptors
        self._memory = memory

    def handles(self) -> tuple[list[bytes], list[int]]:
        return [host_name().encode()], list(self._memory.descriptors)


class SharedOutlet:
    batch_bytes = 16 << 20

    def __init__(self, memory: HostMemory, descriptors: Sequence[int]) -> None:
        if len(descriptors) != len(memory.block_bytes):
            for descriptor in descriptors:
                os.close(descriptor)
            raise TransportClosed(f"{len(descriptors)} pools are shared, {len(memory.block_bytes)} are needed")
        self._memory = memory
        self._descriptors = list(descriptors)

    def put(self, epoch: int, moves: Sequence[Move]) -> None:
        for move in moves:
            self._write(move)

    def _write(self, move: Move) -> None:
        view = self._memory.block(move.group, move.source)
        at = move.target * len(view)
        while view:
            n = os.pwrite(self._descriptors[move.group], view, at)
            view, at = view[n:], at + n

    def close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()
