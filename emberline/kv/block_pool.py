"""The block pool of one KV group: reference counts, eviction order, and how many blocks memory allows."""

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

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
    """Blocks 1 .. n_blocks - 1. Free ones form a doubly-linked list in order of reuse.

        head ⇄ without content ⇄ oldest cached ⇄ ... ⇄ newest cached ⇄ head

    A free block keeps its content until it is allocated, so cached content is evicted only when room is needed.
    The links are two flat lists; index NULL_BLOCK is the head.
    """

    def __init__(self, n_blocks: int, fence: StepFence | None = None) -> None:
        assert n_blocks >= 2, "a pool needs a block besides the null block"
        self._fence = StepFence() if fence is None else fence
        self._freed_step = [0] * n_blocks  # the last step that may write a free block
        self.n_total = n_blocks - 1
        self.n_free = self.n_total
        self.n_releases = 0  # how often a block became free; unchanged: no new room
        self.refs = [0] * n_blocks
        self._next: list[int] = [*range(1, n_blocks), 0]
        self._prev: list[int] = [n_blocks - 1, *range(n_blocks - 1)]

    def n_unheld(self, blocks: Iterable[int]) -> int:
        """How many of the blocks are free."""
        return list(map(self.refs.__getitem__, blocks)).count(0)

    def take_all(self, n: int) -> list[int]:
        """The first n free blocks, with one reference each. The caller removes their old content from the index."""
        assert 0 <= n <= self.n_free, f"{n} of {self.n_free} free blocks: check n_free first"
        refs, following = self.refs, self._next
        blocks, block = [], following[NULL_BLOCK]
        for _ in range(n):
            blocks.append(block)
            refs[block] = 1
            block = following[block]
        following[NULL_BLOCK], self._prev[block] = block, NULL_BLOCK
        self.n_free -= n
        return blocks

    def settled(self, n: int, but: AbstractSet[int]) -> list[int]:
        """The first n free blocks that no step in flight may write, without those of `but`; fewer if there are not."""
        freed_step, completed, following = self._freed_step, self._fence.completed, self._next
        found: list[int] = []
        block = following[NULL_BLOCK]
        while len(found) < n and block != NULL_BLOCK:
            if freed_step[block] <= completed and block not in but:
                found.append(block)
            block = following[block]
        return found

    def hold(self, block: int) -> None:
        """One more reference; a free block is revived with its content."""
        self.hold_all((block,))

    def hold_all(self, blocks: Iterable[int]) -> None:
        """Hold many blocks at once: a long prompt has thousands, and the step loop waits for it."""
        refs, following, preceding = self.refs, self._next, self._prev
        n_revived = 0
        for block in blocks:
            assert block != NULL_BLOCK
            if refs[block] == 0:
                before, after = preceding[block], following[block]
                following[before], preceding[after] = after, before
                n_revived += 1
            refs[block] += 1
        self.n_free -= n_revived

    def drop(self, block: int, keep: bool) -> None:
        """One reference less. At zero the block is free: reused last if `keep`, for its content is cached."""
        self.drop_all((block,), (keep,))

    def drop_all(self, blocks: Iterable[int], keep: Iterable[bool]) -> None:
        refs, following, preceding = self.refs, self._next, self._prev
        freed_step, step = self._freed_step, self._fence.planned
        n_freed = 0
        for block, cached in zip(blocks, keep):
            assert refs[block] > 0, f"block {block} dropped more often than held"
            refs[block] -= 1
            if refs[block]:
                continue
            before = preceding[NULL_BLOCK] if cached else NULL_BLOCK
            after = following[before]
            following[before] = preceding[after] = block
            preceding[block], following[block] = before, after
            freed_step[block] = step
            n_freed += 1
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


def split_bytes(layouts: Sequence[KVGroup], kv_bytes: int, chunk: int, max_running: int) -> list[int]:
    """Blocks for each group, the null block included.

    Groups without a window get as many blocks each as possible. A window group gets a quarter of that, enough to
    find sessions again by their last window, or what all running sequences can need if that is more; never more than
    the others.
    """

    def blocks(n_full: int) -> list[int]:
        windows = [max(n_full // 4, max_running * peak_blocks(layout, UNBOUNDED, chunk)) for layout in layouts]
        return [n_full if layout.window is None else min(n_full, n) for layout, n in zip(layouts, windows)]

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
