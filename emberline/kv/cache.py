"""The KV cache of one model: all its KV groups, block tables of sequences, the prefix cache, and its KV events."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from emberline.kv.block_pool import NULL_BLOCK, BlockPool, StepFence, blocks_of, capacity, peak_blocks
from emberline.kv.prefix_index import PrefixIndex, first_visible
from emberline.protocol.block_hash import BLOCK_TOKENS, KVGroup
from emberline.protocol.frames import KVEvents

KEYS_PER_FRAME = 60_000  # frames stay below 1 MB


class KVListener(Protocol):
    """Learns what content the device pool gains and loses: the seam for KV events and for tiers."""

    def stored(self, group: KVGroup, key: bytes, block: int) -> None: ...

    def evicted(self, group: KVGroup, key: bytes, block: int) -> None:
        """Called before the block is written again: its bytes can still be saved."""


@dataclass(slots=True)
class GroupTable:
    """One sequence's blocks in one group. Entry j holds tokens 16j .. 16j + 15.

    blocks[:n_passed] are NULL_BLOCK (they left the window and were freed); each later entry holds one reference.
    """

    blocks: list[int] = field(default_factory=list)
    n_passed: int = 0


@dataclass(slots=True)
class BlockTable:
    """The blocks of one sequence in every group."""

    groups: list[GroupTable]
    n_published: int = 0  # leading blocks that are in the prefix index


@dataclass(slots=True, frozen=True)
class _Group:
    layout: KVGroup
    pool: BlockPool
    index: PrefixIndex

    def first_visible(self, position: int) -> int:
        """The first block of the group that the token at `position` can see."""
        return first_visible(position, self.layout.window, self.layout.chunked)


class KVCache:
    """Block bookkeeping of all groups together: a token has KV in each of them or in none.

    `chunk` is the maximum number of tokens that a sequence gains at once; it bounds the blocks of a window group.
    """

    def __init__(
        self, layouts: Sequence[KVGroup], n_blocks: Sequence[int], chunk: int, listener: KVListener | None = None
    ) -> None:
        assert len(layouts) == len(n_blocks) >= 1
        self.fence = StepFence()
        self.groups = [_Group(layout, BlockPool(n, self.fence), PrefixIndex(n)) for layout, n in zip(layouts, n_blocks)]
        self.n_total = sum(group.pool.n_total for group in self.groups)
        self.capacity = min(capacity(g.layout, g.pool.n_total, chunk) for g in self.groups)  # tokens of one sequence
        self.n_tokens = max(group.pool.n_total for group in self.groups) * BLOCK_TOKENS  # of all sequences together
        self.windowed = any(layout.window is not None for layout in layouts)
        self._chunk = chunk
        self._listeners: tuple[KVListener, ...] = () if listener is None else (listener,)

    def add_listener(self, listener: KVListener) -> None:
        self._listeners += (listener,)

    def remove_listener(self, listener: KVListener) -> None:
        self._listeners = tuple(other for other in self._listeners if other is not listener)

    @property
    def n_used(self) -> int:
        """Blocks that sequences reference, shared ones once."""
        return self.n_total - sum(group.pool.n_free for group in self.groups)

    @property
    def n_releases(self) -> int:
        """Blocks freed so far. Unchanged since a sequence did not fit: it still does not."""
        return sum(group.pool.n_releases for group in self.groups)

    def table(self) -> BlockTable:
        return BlockTable([GroupTable() for _ in self.groups])

    def match(self, keys: Sequence[bytes], limit: int) -> int:
        """How many of the first `limit` blocks need not be computed.

        Groups without a window must have them all; a window group only those that the next token can see.
        """
        n = min(limit, len(keys))
        for group in self.groups:
            if group.layout.window is None:
                n = group.index.n_leading(keys, n)
        agreed = -1
        while agreed != n:
            agreed = n
            for group in self.groups:
                if group.layout.window is not None:
                    n = group.index.n_windowed(keys, n, group.layout.window, group.layout.chunked)
        return n

    def may_go_on(self, key: bytes) -> bool:
        """Whether a prefix hit can extend beyond the block with this key."""
        return all(key in group.index for group in self.groups if group.layout.window is None)

    def fits(self, keys: Sequence[bytes], n_hit: int, n_tokens: int, reserved: Sequence[int]) -> bool:
        """Whether n_tokens, the first n_hit blocks of them cached, fit and leave `reserved` blocks of each group."""
        for group, n_reserved in zip(self.groups, reserved):
            first = group.first_visible(n_hit * BLOCK_TOKENS)
            n_revived = group.pool.n_unheld(group.index.blocks(keys[first:n_hit]))
            # Never more than the peak; but a shared block that leaves the window frees nothing for a new one.
            n_taken = min(peak_blocks(group.layout, n_tokens, self._chunk), n_revived + blocks_of(n_tokens) - n_hit)
            if n_taken + n_reserved > group.pool.n_free:
                return False
        return True

    def owed(self, table: BlockTable, n_tokens: int) -> list[int]:
        """Blocks of each group that the sequence may still take until it has n_tokens."""
        return [
            min(peak_blocks(group.layout, n_tokens, self._chunk), blocks_of(n_tokens) - len(held.blocks))
            for group, held in zip(self.groups, table.groups)
        ]

    def take_hit(self, table: BlockTable, keys: Sequence[bytes], n_hit: int) -> None:
        """Give an empty table the first n_hit blocks, which `match` has found."""
        for group, held in zip(self.groups, table.groups):
            assert not held.blocks, "a prefix hit fills an empty table"
            held.n_passed = group.first_visible(n_hit * BLOCK_TOKENS)
            known = group.index.blocks(keys[held.n_passed : n_hit])
            group.pool.hold_all(known)
            held.blocks = [NULL_BLOCK] * held.n_passed + known
        table.n_published = n_hit

    def grow(self, table: BlockTable, start: int, end: int) -> list[list[int]] | None:
        """Take blocks for the KV of tokens start .. end - 1, all or nothing; free those that left a window.

        The blocks that each group's table gained, empty if none; None when there is no room.
        """
        assert 0 <= end - start <= self._chunk
        if end <= BLOCK_TOKENS * len(table.groups[0].blocks) and not self.windowed:
            return []  # the common case
        n_new = blocks_of(end) - len(table.groups[0].blocks)
        for group, held in zip(self.groups, table.groups):
            if group.layout.window is not None:
                self._leave_window(group, held, group.first_visible(start))
            if n_new > group.pool.n_free:
                return None
        gained = []
        if n_new > 0:
            for group, held in zip(self.groups, table.groups):
                gained.append(self._take(group, n_new))
                held.blocks += gained[-1]
        return gained

    def publish(self, table: BlockTable, keys: Sequence[bytes], n_blocks: int) -> None:
        """The first n_blocks of the table are computed and full: add them to the prefix index."""
        for group, held in zip(self.groups, table.groups):
            self._index(group, keys, held.blocks, range(max(table.n_published, held.n_passed), n_blocks))
        table.n_published = n_blocks

    def reserve(self, keys: Sequence[bytes], n_blocks: int, reserved: Sequence[int]) -> BlockTable | None:
        """A table of the blocks that a token after n_blocks attends to: cached ones are referenced, others taken empty.

        Others may write those: no step in flight does. None when they do not fit, leaving `reserved` blocks of each
        group, or while steps in flight may write the blocks that would be taken.
        """
        table = self.table()
        taken = []
        for group, held, n_reserved in zip(self.groups, table.groups, reserved):
            held.n_passed = group.first_visible(n_blocks * BLOCK_TOKENS)
            held.blocks = [NULL_BLOCK] * n_blocks
            for j in range(held.n_passed, n_blocks):
                if keys[j] in group.index:
                    held.blocks[j] = group.index.block(keys[j])
            known = set(held.blocks) - {NULL_BLOCK}
            n_lacking = n_blocks - held.n_passed - len(known)
            if n_lacking + group.pool.n_unheld(known) + n_reserved > group.pool.n_free:
                return None
            taken.append(group.pool.settled(n_lacking, but=known))
            if len(taken[-1]) < n_lacking:
                return None
        for group, held, blocks in zip(self.groups, table.groups, taken):
            group.pool.hold_all(block for block in held.blocks if block != NULL_BLOCK)
            group.pool.hold_all(blocks)
            self._evict(group, blocks)
            lacking = (j for j in range(held.n_passed, n_blocks) if held.blocks[j] == NULL_BLOCK)
            for j, block in zip(lacking, blocks):
                held.blocks[j] = block
        return table

    def lacking(self, table: BlockTable) -> list[dict[int, int]]:
        """Per group: the blocks of a reserved table without content, by their index in it."""
        return [
            {j: block for j, block in enumerate(held.blocks) if block != NULL_BLOCK and group.index.key(block) is None}
            for group, held in zip(self.groups, table.groups)
        ]

    def publish_received(self, table: BlockTable, keys: Sequence[bytes], group_number: int, j: int) -> None:
        """The content of one reserved block was received: add it to the prefix index."""
        group, held = self.groups[group_number], table.groups[group_number]
        if self._index(group, keys, held.blocks, range(j, j + 1)):
            return
        known = group.index.block(keys[j])  # computed here meanwhile: keep that one
        group.pool.hold(known)
        group.pool.drop(held.blocks[j], keep=False)
        held.blocks[j] = known

    def withdraw(self, table: BlockTable, group_number: int, j: int) -> int:
        """Take a block out of a table but keep its reference; `unpin` drops it."""
        held = table.groups[group_number]
        block, held.blocks[j] = held.blocks[j], NULL_BLOCK
        return block

    def pin(self, group_number: int, block: int) -> None:
        """One more reference to a block that some table holds."""
        self.groups[group_number].pool.hold(block)

    def unpin(self, group_number: int, block: int) -> None:
        group = self.groups[group_number]
        group.pool.drop(block, keep=group.index.key(block) is not None)

    def release(self, table: BlockTable) -> None:
        """Drop all references, last blocks first, so that the ends of prefixes are evicted before their beginnings."""
        for group, held in zip(self.groups, table.groups):
            blocks = [
                block for block in reversed(held.blocks[held.n_passed :]) if block != NULL_BLOCK
            ]  # NULL_BLOCK: withdrawn
            group.pool.drop_all(blocks, group.index.indexed(blocks))
            held.blocks, held.n_passed = [], 0
        table.n_published = 0

    def discard(self, table: BlockTable) -> None:
        """Drop all references and remove the content from the prefix index: its numbers are invalid."""
        for group, held in zip(self.groups, table.groups):
            self._evict(group, held.blocks[held.n_passed :])
        self.release(table)

    def _leave_window(self, group: _Group, held: GroupTable, first: int) -> None:
        for j in range(held.n_passed, min(first, len(held.blocks))):
            block = held.blocks[j]
            group.pool.drop(block, keep=group.index.key(block) is not None)
            held.blocks[j] = NULL_BLOCK
            held.n_passed = j + 1

    def _take(self, group: _Group, n: int) -> list[int]:
        blocks = group.pool.take_all(n)
        self._evict(group, blocks)
        return blocks

    def _evict(self, group: _Group, blocks: Sequence[int]) -> None:
        for key, block in group.index.remove(blocks):
            for listener in self._listeners:
                listener.evicted(group.layout, key, block)

    def _index(self, group: _Group, keys: Sequence[bytes], blocks: Sequence[int], indices: range) -> bool:
        """False when all of the content was indexed already."""
        new = group.index.put(keys, blocks, indices)
        for listener in self._listeners:
            for j in new:
                listener.stored(group.layout, keys[j], blocks[j])
        return bool(new)


class KVEventFeed:
    """The KV events of a cache, collected while there is a subscriber: the net change between two calls of `take`.

    Content is reported by the keys of one group, the one without a window: without it there is no prefix hit.
    """

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._group = unwindowed_group(group.layout for group in cache.groups)
        self._stored: dict[bytes, None] = {}  # in order
        self._removed: dict[bytes, None] = {}
        self._subscribed = False

    def subscribe(self) -> list[KVEvents]:
        """The content of the cache; from now on `take` returns the changes."""
        if not self._subscribed:
            self._subscribed = True
            self._cache.add_listener(self)
        return snapshot(next(group.index for group in self._cache.groups if group.layout is self._group))

    def unsubscribe(self) -> None:
        self._cache.remove_listener(self)
        self._subscribed = False
        self.take()

    def stored(self, group: KVGroup, key: bytes, block: int) -> None:
        if group is self._group:
            if key in self._removed:
                del self._removed[key]
            else:
                self._stored[key] = None

    def evicted(self, group: KVGroup, key: bytes, block: int) -> None:
        if group is self._group:
            if key in self._stored:
                del self._stored[key]
            else:
                self._removed[key] = None

    def take(self) -> list[KVEvents]:
        """The changes since the last call; mostly one frame, or none."""
        stored, self._stored = self._stored, {}
        removed, self._removed = self._removed, {}
        frames = [KVEvents(removed=part) for part in _frames_of(removed)]
        return frames + [KVEvents(stored=part) for part in _frames_of(stored)]


def snapshot(keys: Iterable[bytes]) -> list[KVEvents]:
    """All keys. The first frame replaces what was known, the others add to it."""
    first, *others = list(_frames_of(keys)) or [b""]
    return [KVEvents(stored=first, whole=True), *(KVEvents(stored=part) for part in others)]


def unwindowed_group(groups: Iterable[KVGroup]) -> KVGroup:
    """The KV group without an attention window, or the first where all have one."""
    known = list(groups)
    return next((group for group in known if group.window is None), known[0])


def _frames_of(keys: Iterable[bytes]) -> Iterator[bytes]:
    known = list(keys)
    for start in range(0, len(known), KEYS_PER_FRAME):
        yield b"".join(known[start : start + KEYS_PER_FRAME])
