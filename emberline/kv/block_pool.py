"""The block pool of one KV group: reference counts, eviction order, and how many blocks memory allows."""

from array import array
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import numpy as np
from numpy.typing import NDArray

from emberline.kv.eviction_order import EvictionOrder
from emberline.kv.prefix_index import Blocks
from emberline.kv.retention import Conversation, Retention
from emberline.protocol.block_hash import BLOCK_TOKENS, KVGroup
from emberline.protocol.errors import BadInput

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
        """Whether some planned step is not done."""
        return self.completed < self.planned

    def next_step(self) -> int:
        self.planned += 1
        return self.planned

    def set_oldest_in_flight(self, step: int | None) -> None:
        """None: no step is in flight."""
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
        """How many of the blocks are free."""
        return len(blocks) - int(np.count_nonzero(self._counts[blocks]))

    def take_all(self, n: int) -> list[int]:
        """The first n free blocks, with one reference each. The caller removes their old content from the index."""
        assert 0 <= n <= self.n_free, f"{n} of {self.n_free} free blocks: check n_free first"
        blocks = self._free.take(n)
        refs = self.refs
        for block in blocks:
            refs[block] = 1
        self.n_free -= n
        return blocks

    def settled(self, n: int, but: AbstractSet[int]) -> list[int]:
        """The first n free blocks that no step in flight may write, without those of `but`; fewer if there are not."""
        return self._free.first(n, self._fence.completed, but) if n else []

    def hold(self, block: int) -> None:
        """One more reference; a free block is revived with its content."""
        assert block != NULL_BLOCK
        if not self.refs[block]:
            self._free.remove((block,))
            self.n_free -= 1
        self.refs[block] += 1

    def hold_all(self, blocks: Blocks) -> None:
        """The same for many different blocks, soonest in the order of their chains."""
        assert blocks.all(), "nobody holds the null block"
        counts = self._counts[blocks]
        self._counts[blocks] = counts + 1
        revived = blocks[counts == 0]
        self._free.remove(revived)
        self.n_free -= len(revived)

    def drop(self, block: int, keep: bool) -> None:
        """One reference less. At zero the block is free: reused last if `keep`, for its content is cached."""
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
        """The same for many different blocks, in the order of eviction: a chain's last block first. `shared`: they are
        of a prefix of several sessions."""
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


UNBOUNDED = 1 << 40  # tokens: a pool that holds a whole window holds sequences of any length


def blocks_of(n_tokens: int) -> int:
    return -(-n_tokens // BLOCK_TOKENS)


def peak_blocks(layout: KVGroup, n_tokens: int, chunk: int) -> int:
    """Maximum blocks that a sequence of n_tokens holds at once when it gains up to `chunk` tokens per step."""
    if layout.window is None:
        return blocks_of(n_tokens)
    return min(blocks_of(n_tokens), blocks_of(layout.window - 1 + chunk) + 1)


def capacity(layout: KVGroup, n_usable: int, chunk: int) -> int:
    """Tokens of the longest sequence that n_usable blocks of this group can hold."""
    bounded = layout.window is None or n_usable < peak_blocks(layout, UNBOUNDED, chunk)
    return n_usable * BLOCK_TOKENS if bounded else UNBOUNDED


def all_sequences(n_blocks: Sequence[int]) -> int:
    """Tokens that sequences have together in pools of so many blocks, the null block included."""
    return (max(n_blocks) - 1) * BLOCK_TOKENS


def one_sequence(layouts: Sequence[KVGroup], n_blocks: Sequence[int], chunk: int) -> int:
    """Tokens of the longest sequence that pools of so many blocks hold."""
    return min(capacity(layout, n - 1, chunk) for layout, n in zip(layouts, n_blocks, strict=True))


SESSION_TOKENS = 2048  # a session is assumed to be at least so long on average
SESSION_CHUNKS = 16  # and of a model with chunked attention so many chunks: it is made for long ones


def running_blocks(layout: KVGroup, chunk: int, max_running: int) -> int:
    """Blocks of a window group that all running sequences need: a window each, and what two steps add to them all."""
    assert layout.window is not None
    return max_running * (blocks_of(layout.window) + 2) + 2 * blocks_of(chunk)


def split_bytes(layouts: Sequence[KVGroup], kv_bytes: int, chunk: int, max_running: int) -> list[int]:
    """Blocks for each group, the null block included. `chunk`: tokens of a step, of all sequences together.

    Groups without a window get as many blocks each as possible. A window group gets as many as it takes to find the
    sessions in them again by their last window, at most a quarter, or what all running sequences can need if that is
    more; never more than the others.
    """

    def windowed(layout: KVGroup, n_full: int) -> int:
        assert layout.window is not None
        session = max(SESSION_TOKENS, SESSION_CHUNKS * layout.window if layout.chunked else 0)
        kept = n_full * (blocks_of(layout.window) + 1) // blocks_of(session)
        return min(n_full, max(min(kept, n_full // 4), running_blocks(layout, chunk, max_running)))

    def blocks(n_full: int) -> list[int]:
        return [n_full if layout.window is None else windowed(layout, n_full) for layout in layouts]

    def cost(n_full: int) -> int:
        return sum((n + 1) * layout.block_bytes for n, layout in zip(blocks(n_full), layouts))

    min_bytes = cost(2)
    if kv_bytes < min_bytes:
        raise BadInput(
            f"{kv_bytes} bytes of KV cache hold no sequence of this model; give at least {min_bytes}", param="kv_bytes"
        )
    low, high = 2, kv_bytes  # cost(low) fits, cost(high) does not: a block has more than one byte
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost(middle) <= kv_bytes else (low, middle)
    return [n + 1 for n in blocks(low)]
