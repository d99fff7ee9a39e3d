"""Over the connection itself: bytes are received straight into the pool. The receiver alone writes its blocks."""

from collections.abc import Sequence

from emberline.kv.transfer.link import Link
from emberline.kv.transfer.messages import Data
from emberline.kv.transfer.ways import Memory, Move

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
