"""The KV of one model: all its groups, the sequences' block tables, and the prefix cache over them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from emberline.kv.block_pool import NULL_BLOCK, BlockPool, blocks_of, capacity, peak_blocks
from emberline.kv.prefix_index import PrefixIndex, first_visible
from emberline.protocol.block_hash import BLOCK_TOKENS, KVGroup


class KVListener(Protocol):
    """Told what content the device pool gains and loses: the seam for KV events and for tiers."""

    def stored(self, group: KVGroup, key: bytes, block: int) -> None: ...

    def evicted(self, group: KVGroup, key: bytes, block: int) -> None:
        """Comes before the block is written again: its bytes are still there to be saved."""


@dataclass(slots=True)
class GroupTable:
    """One sequence's blocks in one group. Entry j holds tokens 16j .. 16j + 15.

    blocks[:n_passed] are NULL_BLOCK (out of the window, given back); each later entry is one reference of ours.
    """

    blocks: list[int] = field(default_factory=list)
    n_passed: int = 0


@dataclass(slots=True)
class BlockTable:
    """What a sequence holds in every group."""

    groups: list[GroupTable]
    n_published: int = 0  # leading blocks whose content the index has been offered


@dataclass(slots=True, frozen=True)
class _Group:
    layout: KVGroup
    pool: BlockPool
    index: PrefixIndex


class KVCache:
    """Block bookkeeping of all groups together: a token has KV in each of them or in none.

    `chunk` is the most tokens a sequence gains at once; it bounds what a window group holds of one sequence.
    """

    def __init__(
        self, layouts: Sequence[KVGroup], n_blocks: Sequence[int], chunk: int, listener: KVListener | None = None
    ) -> None:
        assert len(layouts) == len(n_blocks) >= 1
        self.groups = [_Group(layout, BlockPool(n), PrefixIndex(n)) for layout, n in zip(layouts, n_blocks)]
        self.n_total = sum(group.pool.n_total for group in self.groups)
        self.capacity = min(capacity(g.layout, g.pool.n_total, chunk) for g in self.groups)  # tokens of one sequence
        self.n_tokens = max(group.pool.n_total for group in self.groups) * BLOCK_TOKENS  # of all sequences together
        self.windowed = any(layout.window is not None for layout in layouts)
        self._chunk = chunk
        self._listeners: tuple[KVListener, ...] = () if listener is None else (listener,)

    def listen(self, listener: KVListener) -> None:
        self._listeners += (listener,)

    def unlisten(self, listener: KVListener) -> None:
        self._listeners = tuple(other for other in self._listeners if other is not listener)

    @property
    def n_used(self) -> int:
        """Blocks that sequences reference, shared ones once."""
        return self.n_total - sum(group.pool.n_free for group in self.groups)

    @property
    def n_releases(self) -> int:
        """Unchanged since a sequence did not fit: it does not fit now."""
        return sum(group.pool.n_releases for group in self.groups)

    def table(self) -> BlockTable:
        return BlockTable([GroupTable() for _ in self.groups])

    def match(self, keys: Sequence[bytes], limit: int) -> int:
        """How many of the first `limit` blocks need not be computed.

        Groups that see everything must have them all; a window group only those that the next token can see.
        """
        n = min(limit, len(keys))
        for group in self.groups:
            if group.layout.window is None:
                n = group.index.leading(keys, n)
        agreed = -1
        while agreed != n:
            agreed = n
            for group in self.groups:
                if group.layout.window is not None:
                    n = group.index.last_run(keys, n, group.layout.window)
        return n

    def may_go_on(self, key: bytes) -> bool:
        """Whether a hit can reach beyond the block with this key."""
        return all(key in group.index for group in self.groups if group.layout.window is None)

    def fits(self, keys: Sequence[bytes], n_hit: int, n_tokens: int, spare: Sequence[int]) -> bool:
        """Whether n_tokens, the first n_hit blocks taken from the cache, fit and leave `spare` blocks of each group."""
        for group, n_spare in zip(self.groups, spare):
            first = first_visible(n_hit * BLOCK_TOKENS, group.layout.window)
            n_revived = group.pool.n_unheld(group.index.blocks(keys[first:n_hit]))
            # Never more than the peak, but a shared block that leaves the window makes no room for a new one.
            n_taken = min(peak_blocks(group.layout, n_tokens, self._chunk), n_revived + blocks_of(n_tokens) - n_hit)
            if n_taken + n_spare > group.pool.n_free:
                return False
        return True

    def owed(self, table: BlockTable, n_tokens: int) -> list[int]:
        """Blocks of each group that the sequence may still take on its way to n_tokens."""
        return [
            min(peak_blocks(group.layout, n_tokens, self._chunk), blocks_of(n_tokens) - len(held.blocks))
            for group, held in zip(self.groups, table.groups)
        ]

    def take_hit(self, table: BlockTable, keys: Sequence[bytes], n_hit: int) -> None:
        """Give an empty table the first n_hit blocks, all of which `match` has found."""
        for group, held in zip(self.groups, table.groups):
            assert not held.blocks, "a hit comes before anything else"
            held.n_passed = first_visible(n_hit * BLOCK_TOKENS, group.layout.window)
            known = group.index.blocks(keys[held.n_passed : n_hit])
            group.pool.hold_all(known)
            held.blocks = [NULL_BLOCK] * held.n_passed + known
        table.n_published = n_hit

    def grow(self, table: BlockTable, start: int, end: int) -> list[list[int]] | None:
        """Make room for the KV of tokens start .. end - 1, all or nothing; what fell out of a window is given back.

        The blocks that each group's table has gained, if any has; None when there is no room.
        """
        assert 0 <= end - start <= self._chunk
        if end <= BLOCK_TOKENS * len(table.groups[0].blocks) and not self.windowed:
            return []  # mostly
        n_new = blocks_of(end) - len(table.groups[0].blocks)
        for group, held in zip(self.groups, table.groups):
            if group.layout.window is not None:
                self._pass(group, held, first_visible(start, group.layout.window))
            if n_new > group.pool.n_free:
                return None
        gained = []
        if n_new > 0:
            for group, held in zip(self.groups, table.groups):
                gained.append(self._take(group, n_new))
                held.blocks += gained[-1]
        return gained

    def publish(self, table: BlockTable, keys: Sequence[bytes], n_blocks: int) -> None:
        """The first n_blocks of the table are computed and full: let others find them."""
        for group, held in zip(self.groups, table.groups):
            self._index(group, keys, held.blocks, range(max(table.n_published, held.n_passed), n_blocks))
        table.n_published = n_blocks

    def reserve(self, keys: Sequence[bytes], n_blocks: int, spare: Sequence[int]) -> BlockTable | None:
        """A table of what a token behind n_blocks can see: what is here is held, room is taken for the rest.

        None when that does not fit beside `spare` blocks of each group.
        """
        for group, n_spare in zip(self.groups, spare):
            first = first_visible(n_blocks * BLOCK_TOKENS, group.layout.window)
            known = group.index.blocks(key for key in keys[first:n_blocks] if key in group.index)
            n_taken = n_blocks - first - len(known) + group.pool.n_unheld(known)
            if n_taken + n_spare > group.pool.n_free:
                return None
        table = self.table()
        for group, held in zip(self.groups, table.groups):
            held.n_passed = first_visible(n_blocks * BLOCK_TOKENS, group.layout.window)
            held.blocks = [NULL_BLOCK] * n_blocks
            wanted = range(held.n_passed, n_blocks)
            for j in wanted:  # hold first: what is taken may be what is known
                if keys[j] in group.index:
                    held.blocks[j] = group.index.block(keys[j])
                    group.pool.hold(held.blocks[j])
            lacking = [j for j in wanted if held.blocks[j] == NULL_BLOCK]
            for j, block in zip(lacking, self._take(group, len(lacking))):
                held.blocks[j] = block
        return table

    def lacking(self, table: BlockTable) -> list[dict[int, int]]:
        """Per group: the blocks of a reserved table whose content is still to come, by their place in it."""
        return [
            {j: block for j, block in enumerate(held.blocks) if block != NULL_BLOCK and group.index.key(block) is None}
            for group, held in zip(self.groups, table.groups)
        ]

    def land(self, table: BlockTable, keys: Sequence[bytes], group_number: int, j: int) -> None:
        """The content of one reserved block has come: let others find it."""
        group, held = self.groups[group_number], table.groups[group_number]
        if self._index(group, keys, held.blocks, range(j, j + 1)):
            return
        known = group.index.block(keys[j])  # somebody computed it meanwhile: one of the two is enough
        group.pool.hold(known)
        group.pool.drop(held.blocks[j], worth_keeping=False)
        held.blocks[j] = known

    def withdraw(self, table: BlockTable, group_number: int, j: int) -> int:
        """Take a block out of a table without giving it back; `unpin` will."""
        held = table.groups[group_number]
        block, held.blocks[j] = held.blocks[j], NULL_BLOCK
        return block

    def pin(self, group_number: int, block: int) -> None:
        """One more reference to a block that some table holds."""
        self.groups[group_number].pool.hold(block)

    def unpin(self, group_number: int, block: int) -> None:
        group = self.groups[group_number]
        group.pool.drop(block, worth_keeping=group.index.key(block) is not None)

    def release(self, table: BlockTable) -> None:
        """Give everything back, last blocks first, so that the ends of prefixes are evicted before their beginnings."""
        for group, held in zip(self.groups, table.groups):
            blocks = [block for block in reversed(held.blocks[held.n_passed :]) if block != NULL_BLOCK]  # withdrawn
            group.pool.drop_all(blocks, group.index.known(blocks))
            held.blocks, held.n_passed = [], 0
        table.n_published = 0

    def discard(self, table: BlockTable) -> None:
        """Give everything back and let nobody find its content: the numbers in it are not to be trusted."""
        for group, held in zip(self.groups, table.groups):
            self._forget(group, held.blocks[held.n_passed :])
        self.release(table)

    def _pass(self, group: _Group, held: GroupTable, first: int) -> None:
        for j in range(held.n_passed, min(first, len(held.blocks))):
            block = held.blocks[j]
            group.pool.drop(block, worth_keeping=group.index.key(block) is not None)
            held.blocks[j] = NULL_BLOCK
            held.n_passed = j + 1

    def _take(self, group: _Group, n: int) -> list[int]:
        blocks = group.pool.take_all(n)
        self._forget(group, blocks)
        return blocks

    def _forget(self, group: _Group, blocks: Sequence[int]) -> None:
        for key, block in group.index.forget(blocks):
            for listener in self._listeners:
                listener.evicted(group.layout, key, block)

    def _index(self, group: _Group, keys: Sequence[bytes], blocks: Sequence[int], places: range) -> bool:
        """False when all of the content was known already."""
        new = group.index.put(keys, blocks, places)
        for listener in self._listeners:
            for j in new:
                listener.stored(group.layout, keys[j], blocks[j])
        return bool(new)
