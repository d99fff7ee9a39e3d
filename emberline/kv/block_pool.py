"""The block pool of one KV group: reference counts and eviction order."""

from array import array
from collections.abc import Set as AbstractSet

import numpy as np
from numpy.typing import NDArray

from emberline.kv.eviction_order import EvictionOrder
from emberline.kv.prefix_index import Blocks
from emberline.kv.retention import Conversation, Retention
from emberline.protocol.block_hash import BLOCK_TOKENS

NULL_BLOCK = 0  # never allocated: padding, and table entries whose block left the window, refer to it


class StepFence:
    """The reuse fence: a freed block may still be written by steps in flight, which know its number.

    Steps run in order, so the next step may take it at once. A writer outside the compute stream, such as the sender of
    a KV transfer, may take it only when the last step that was planned before it was freed has completed.
    """

    def __init__(self) -> None:
        self.planned = 0  # number of the last step that was planned, or is being planned
        self.completed = 0  # this step and all before it are done

    @property
    def in_flight(self) -> bool:
        """True if some planned step is not done."""
        return self.completed < self.planned

    def next_step(self) -> int:
        """Count one more planned step and return its number."""
        self.planned += 1
        return self.planned

    def set_oldest_in_flight(self, step: int | None) -> None:
        """Set what has completed: all before `step`, or everything if no step is in flight (None)."""
        self.completed = self.planned if step is None else step - 1


class BlockPool:
    """Blocks 1 .. n_blocks - 1. Free ones are in an `EvictionOrder`: those without content first.

    A free block keeps its content until it is allocated, so cached content is evicted only when room is needed.
    """

    def __init__(self, n_blocks: int, fence: StepFence | None = None, retention: Retention | None = None) -> None:
        assert n_blocks >= 2, "a pool needs a block besides the null block"
        self._fence = StepFence() if fence is None else fence
        self._free = EvictionOrder(n_blocks, Retention() if retention is None else retention)
        self._free.add_empty(range(n_blocks - 1, 0, -1))
        self.n_total = n_blocks - 1
        self.n_free = self.n_total
        self.n_releases = 0  # how often a block became free; unchanged: no new room
        self.refs = array("i", [0]) * n_blocks
        self._counts = np.frombuffer(self.refs, np.intc)  # the same memory

    def n_unheld(self, blocks: Blocks) -> int:
        """Return how many of the blocks are free."""
        return len(blocks) - int(np.count_nonzero(self._counts[blocks]))

    def take_all(self, n: int) -> list[int]:
        """Take the first n free blocks, a reference to each. The caller removes their old content from the index."""
        assert 0 <= n <= self.n_free, f"{n} of {self.n_free} free blocks: check n_free first"
        blocks = self._free.take(n)
        refs = self.refs
        for block in blocks:
            refs[block] = 1
        self.n_free -= n
        return blocks

    def settled(self, n: int, but: AbstractSet[int]) -> list[int]:
        """Return the first n free blocks that no step in flight may write, without those of `but`, or all there are."""
        return self._free.first(n, self._fence.completed, but) if n else []

    def hold(self, block: int) -> None:
        """Add a reference; a free block is revived with its content."""
        assert block != NULL_BLOCK
        if not self.refs[block]:
            self._free.remove((block,))
            self.n_free -= 1
        self.refs[block] += 1

    def hold_all(self, blocks: Blocks) -> None:
        """Add a reference to each of many different blocks, fastest in the order of their chains."""
        assert blocks.all(), "nobody holds the null block"
        counts = self._counts[blocks]
        self._counts[blocks] = counts + 1
        revived = blocks[counts == 0]
        self._free.remove(revived)
        self.n_free -= len(revived)

    def drop(self, block: int, keep: bool) -> None:
        """Drop a reference. At zero the block is free: reused last if `keep`, for its content is cached."""
        left = self.refs[block] = self.refs[block] - 1
        assert left >= 0, f"block {block} dropped more often than held"
        if not left:
            (self._free.add_plain if keep else self._free.add_empty)((block,), self._fence.planned)
            self.n_free += 1
            self.n_releases += 1

    def drop_all(
        self,
        blocks: Blocks,
        keep: NDArray[np.bool_],
        conversation: Conversation | None = None,
        shared: bool = False,
    ) -> None:
        """Drop a reference to each of many different blocks, in the order of eviction: a chain's last block first.

        `shared` is True if they belong to a prefix of several sessions.
        """
        free, step = self._free, self._fence.planned
        left = self._counts[blocks] - 1
        assert (left >= 0).all(), "blocks dropped more often than held"
        self._counts[blocks] = left
        freed = left == 0
        kept, empty = blocks[freed & keep][::-1], blocks[freed & ~keep]
        if len(empty):
            free.add_empty(empty, step)
        if len(kept):
            if shared:
                free.add_shared(kept, step)
            elif conversation is None:
                free.add_plain(kept, step)
            else:
                free.add(kept, conversation, step)
        n_freed = len(kept) + len(empty)
        self.n_free += n_freed
        self.n_releases += n_freed


def blocks_of(n_tokens: int) -> int:
    """Return the number of blocks that n_tokens fill, the last one in part."""
    return -(-n_tokens // BLOCK_TOKENS)
