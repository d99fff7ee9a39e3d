"""The KV cache of one model: all its KV groups, block tables of sequences, and the prefix cache."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Protocol

import numpy as np

from emberline.kv.block_pool import NULL_BLOCK, BlockPool, StepFence, blocks_of
from emberline.kv.groups import GroupKind, all_sequences, kind_of, one_sequence
from emberline.kv.prefix_index import NO_OWNER, Blocks, LeadingBlocks, Owner, PrefixIndex
from emberline.kv.retention import Conversation, Retention
from emberline.protocol.block_hash import BLOCK_TOKENS, KVGroup


class KVListener(Protocol):
    """An observer of the content that the device pool gains and loses: the seam for KV events and for tiers."""

    def stored(self, group: KVGroup, keys: Sequence[bytes], blocks: Sequence[int]) -> None: ...

    def evicted(self, group: KVGroup, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Handle an eviction. The blocks are not yet written again: their bytes can still be saved."""


@dataclass(slots=True)
class GroupTable:
    """One sequence's blocks in one group. Entry j holds tokens 16j .. 16j + 15.

    blocks[:n_passed] are NULL_BLOCK (no later token can see them); each later entry holds one reference.
    """

    blocks: list[int] = field(default_factory=list)
    n_passed: int = 0


@dataclass(slots=True)
class BlockTable:
    """The blocks of one sequence in every group."""

    groups: list[GroupTable]
    n_published: int = 0  # leading blocks that are in the prefix index
    conversation: Conversation | None = None  # that the sequence is a turn of, once it was admitted
    owner: Owner = NO_OWNER  # of what is published from it


@dataclass(slots=True)
class PrefixHit:
    """The cached prefix of a sequence, looked up once however often it is asked for."""

    n_blocks: int = 0
    leading: list[LeadingBlocks] = field(default_factory=list)  # per group; empty if it does not keep all blocks
    asked: tuple[int, int] = (-1, 0)  # the cache's version and the limit; unchanged: so is n_blocks


@dataclass(slots=True, frozen=True)
class _Group:
    layout: KVGroup
    kind: GroupKind
    pool: BlockPool
    index: PrefixIndex


class KVCache:
    """Block bookkeeping of all groups together: a token has KV in each of them or in none.

    `chunk` is the maximum number of tokens that a sequence gains at once; it bounds the blocks of a group that does not
    keep all of them.
    """

    def __init__(
        self, layouts: Sequence[KVGroup], n_blocks: Sequence[int], chunk: int, listener: KVListener | None = None
    ) -> None:
        assert len(layouts) == len(n_blocks) >= 1
        self.fence = StepFence()
        self.retention = Retention()
        self.groups = [
            _Group(layout, kind_of(layout), BlockPool(n, self.fence, self.retention), PrefixIndex(n))
            for layout, n in zip(layouts, n_blocks)
        ]
        self.n_total = sum(group.pool.n_total for group in self.groups)
        self.capacity = one_sequence(layouts, n_blocks, chunk)  # in tokens
        self.n_tokens = all_sequences(n_blocks)
        self.windowed = not all(layout.keeps_all for layout in layouts)
        self.version = 0  # of what the prefix index holds; unchanged: so is what `match` finds
        self._chunk = chunk
        self._listeners: tuple[KVListener, ...] = () if listener is None else (listener,)

    @property
    def n_listeners(self) -> int:
        """Number of subscribers of KV events."""
        return len(self._listeners)

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

    def table(self, owner: Owner = NO_OWNER) -> BlockTable:
        """Return an empty table."""
        return BlockTable([GroupTable() for _ in self.groups], owner=owner)

    def match(self, keys: Sequence[bytes], limit: int, known: PrefixHit | None = None) -> PrefixHit:
        """Find how many of the first `limit` blocks need not be computed.

        Every group must have the blocks that the next token can see. `known` is an earlier hit of the same sequence,
        which is continued.
        """
        hit = PrefixHit() if known is None else known
        if hit.asked == (self.version, limit):
            return hit
        hit.leading = hit.leading or [LeadingBlocks() for _ in self.groups]
        n = min(limit, len(keys))
        for group, leading in zip(self.groups, hit.leading):
            if group.kind.keeps_all:
                n = group.kind.n_usable(group.index, keys, n, leading)
        agreed = -1 if self.windowed else n
        while agreed != n:
            agreed = n
            for group, leading in zip(self.groups, hit.leading):
                if not group.kind.keeps_all:
                    n = group.kind.n_usable(group.index, keys, n, leading)
        hit.n_blocks, hit.asked = n, (self.version, limit)
        return hit

    def _visible(self, group_number: int, keys: Sequence[bytes], hit: PrefixHit) -> Blocks:
        """Return the blocks of a hit that the token after it can see."""
        assert hit.asked[0] == self.version, "the cache has changed since it was asked"
        group = self.groups[group_number]
        return group.kind.visible(group.index, keys, hit.n_blocks, hit.leading[group_number])

    def may_go_on(self, key: bytes) -> bool:
        """True if a prefix hit can extend beyond the block with this key."""
        return all(key in group.index for group in self.groups if group.kind.keeps_all)

    def fits(self, keys: Sequence[bytes], hit: PrefixHit, n_tokens: int, reserved: Sequence[int]) -> bool:
        """True if n_tokens, the first of them cached, fit and leave `reserved` blocks of each group."""
        n_new = blocks_of(n_tokens) - hit.n_blocks
        for g, (group, n_reserved) in enumerate(zip(self.groups, reserved)):
            n_revived = group.pool.n_unheld(self._visible(g, keys, hit))
            # Never more than the peak; but a shared block that is passed frees nothing for a new one.
            n_taken = min(group.kind.peak_blocks(n_tokens, self._chunk), n_revived + n_new)
            if n_taken + n_reserved > group.pool.n_free:
                return False
        return True

    def owed(self, table: BlockTable, n_tokens: int) -> list[int]:
        """Return the blocks of each group that the sequence may still take until it has n_tokens."""
        return [
            min(group.kind.peak_blocks(n_tokens, self._chunk), blocks_of(n_tokens) - len(held.blocks))
            for group, held in zip(self.groups, table.groups)
        ]

    def take_hit(
        self, table: BlockTable, keys: Sequence[bytes], hit: PrefixHit, fetched: BlockTable | None = None
    ) -> None:
        """Give an empty table the blocks that `match` has found.

        `fetched`: a table of reserved blocks, whose references are taken over where they are to the same blocks; it is
        released otherwise.
        """
        for g, (group, held) in enumerate(zip(self.groups, table.groups)):
            assert not held.blocks, "a prefix hit fills an empty table"
            visible = self._visible(g, keys, hit)
            held.n_passed = hit.n_blocks - len(visible)
            held.blocks = [NULL_BLOCK] * held.n_passed + visible.tolist()
            if fetched is not None and fetched.groups[g].blocks == held.blocks:
                fetched.groups[g] = GroupTable()
            else:
                group.pool.hold_all(visible)
        table.n_published = hit.n_blocks
        if fetched is not None:
            self.release(fetched)

    def grow(self, table: BlockTable, start: int, end: int) -> list[list[int]] | None:
        """Take blocks for the KV of tokens start .. end - 1, all or nothing; free those that no token sees any more.

        Returns the blocks that each group's table gained, empty if none, or None if there is no room.
        """
        assert 0 <= end - start <= self._chunk
        if end <= BLOCK_TOKENS * len(table.groups[0].blocks) and not self.windowed:
            return []  # the common case
        n_new = blocks_of(end) - len(table.groups[0].blocks)
        for group, held in zip(self.groups, table.groups):
            if not group.kind.keeps_all:
                self._pass(group, held, group.kind.first_visible(start))
            if n_new > group.pool.n_free:
                return None
        gained = []
        if n_new > 0:
            for group, held in zip(self.groups, table.groups):
                gained.append(self._take(group, n_new))
                held.blocks += gained[-1]
        return gained

    def grow_all(self, tables: Sequence[BlockTable]) -> list[list[int]]:
        """Take one block more for each of the tables, for which there is room and whose windows do not move.

        Returns for each group the new blocks, in the order of the tables.
        """
        gained = [self._take(group, len(tables)) for group in self.groups]
        for g, blocks in enumerate(gained):
            for table, block in zip(tables, blocks):
                table.groups[g].blocks.append(block)
        return gained

    def room(self, table: BlockTable) -> int:
        """Return the first position whose token needs a new block, or has passed one."""
        room = BLOCK_TOKENS * len(table.groups[0].blocks)
        if not self.windowed:
            return room
        return min(room, *(group.kind.next_passing(held.n_passed) for group, held in zip(self.groups, table.groups)))

    def publish(self, parts: Sequence[tuple[BlockTable, Sequence[bytes], int]]) -> None:
        """Add blocks to the prefix index: of each table, with the keys of its blocks, so many leading ones, which are
        computed and full."""
        for g, group in enumerate(self.groups):
            keys, blocks, owners = list[bytes](), list[int](), list[Owner]()
            for table, chain, n_blocks in parts:
                held = table.groups[g]
                first = max(table.n_published, held.n_passed)
                keys += chain[first:n_blocks]
                blocks += held.blocks[first:n_blocks]
                owners += [table.owner] * (n_blocks - first)
            self._index(group, keys, blocks, owners)
        for table, _, n_blocks in parts:
            table.n_published = n_blocks

    def reserve(
        self, keys: Sequence[bytes], n_blocks: int, reserved: Sequence[int], owner: Owner = NO_OWNER
    ) -> BlockTable | None:
        """Return a table of the blocks that a token after n_blocks attends to. Cached ones are referenced, others taken
        empty, for writers other than steps.

        Returns None if they do not fit, leaving `reserved` blocks of each group, or while steps in flight may write the
        blocks that would be taken.
        """
        table = self.reservation(n_blocks, owner)
        return None if self.reserve_more(table, keys, n_blocks, reserved) is None else table

    def reservation(self, n_blocks: int, owner: Owner = NO_OWNER) -> BlockTable:
        """Return a table for the blocks that a token after n_blocks attends to, which `reserve_more` adds."""
        table = self.table(owner)
        for group, held in zip(self.groups, table.groups):
            held.n_passed = group.kind.first_visible(n_blocks * BLOCK_TOKENS)
            held.blocks = [NULL_BLOCK] * held.n_passed
        return table

    def reserve_more(
        self, table: BlockTable, keys: Sequence[bytes], end: int, reserved: Sequence[int]
    ) -> list[dict[int, int]] | None:
        """Reserve the blocks below `end` that the table lacks; see `reserve`.

        Returns for each group those that were taken empty, by their index in the table.
        """
        found = []
        for group, held, n_reserved in zip(self.groups, table.groups, reserved):
            known = group.index.find(keys[len(held.blocks) : end])
            cached = [block for block in known if block is not None]
            n_lacking = len(known) - len(cached)
            if n_lacking + group.pool.n_unheld(_many(cached)) + n_reserved > group.pool.n_free:
                return None
            taken = group.pool.settled(n_lacking, but=set(cached))
            if len(taken) < n_lacking:
                return None
            found.append((known, cached, taken))
        gained = []
        for group, held, (known, cached, taken) in zip(self.groups, table.groups, found):
            if cached:
                group.pool.hold_all(_many(cached))
            group.pool.hold_all(_many(taken[::-1]))  # in the order of their chains
            self._evict(group, taken)
            first = len(held.blocks)
            if not cached:  # the common case, and long
                gained.append(dict(zip(range(first, first + len(taken)), taken)))
                held.blocks += taken
                continue
            lacking = [j for j, block in enumerate(known, first) if block is None]
            gained.append(dict(zip(lacking, taken)))
            fresh = iter(taken)
            held.blocks += [next(fresh) if block is None else block for block in known]
        return gained

    def lacking(self, table: BlockTable) -> list[dict[int, int]]:
        """Return for each group the blocks of a reserved table without content, by their index in it."""
        return [
            {j: block for j, block in enumerate(held.blocks) if block != NULL_BLOCK and group.index.key(block) is None}
            for group, held in zip(self.groups, table.groups)
        ]

    def publish_received(
        self, table: BlockTable, keys: Sequence[bytes], group_number: int, indices: Sequence[int]
    ) -> None:
        """Add the content of reserved blocks, which was received, to the prefix index."""
        group, held = self.groups[group_number], table.groups[group_number]
        received = [held.blocks[j] for j in indices]
        new = self._index(group, [keys[j] for j in indices], received, repeat(table.owner))
        if len(new) == len(indices):
            return
        for j in set(indices).difference(indices[place] for place in new):
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
        """Add a reference to a block that some table holds."""
        self.groups[group_number].pool.hold(block)

    def pin_all(self, group_number: int, blocks: Sequence[int]) -> None:
        """Add a reference to each of many different blocks."""
        if blocks:
            self.groups[group_number].pool.hold_all(_many(blocks))

    def unpin(self, group_number: int, block: int) -> None:
        group = self.groups[group_number]
        group.pool.drop(block, keep=group.index.key(block) is not None)

    def unpin_all(self, group_number: int, blocks: Sequence[int]) -> None:
        if len(blocks) == 1:  # of a sequence that decodes: common, and much sooner done
            self.unpin(group_number, blocks[0])
        elif blocks:
            self._drop_all(self.groups[group_number], blocks)

    def _drop_all(
        self,
        group: _Group,
        blocks: Sequence[int],
        conversation: Conversation | None = None,
        shared: bool = False,
    ) -> None:
        """Drop references, in the order of eviction. NULL_BLOCK takes the place of one that was withdrawn."""
        dropped = _many(blocks)
        dropped = dropped[dropped != NULL_BLOCK]
        group.pool.drop_all(dropped, group.index.indexed(dropped), conversation, shared)

    def release(self, table: BlockTable) -> None:
        """Drop all references, last blocks first, so that the ends of prefixes are evicted before their beginnings."""
        conversation = table.conversation
        n_shared = 0 if conversation is None else conversation.n_shared
        for group, held in zip(self.groups, table.groups):
            for start, end in ((max(n_shared, held.n_passed), None), (held.n_passed, max(n_shared, held.n_passed))):
                if blocks := held.blocks[start:end]:
                    self._drop_all(group, blocks[::-1], conversation, shared=end is not None)
            held.blocks, held.n_passed = [], 0
        table.n_published = 0

    def release_last(self, table: BlockTable, n: int) -> bool:
        """Drop the references to the last n blocks of each group. Returns True if there are none left."""
        for group, held in zip(self.groups, table.groups):
            first = max(held.n_passed, len(held.blocks) - n)
            self._drop_all(group, held.blocks[first:][::-1], table.conversation)
            del held.blocks[first:]
        return all(len(held.blocks) == held.n_passed for held in table.groups)

    def discard(self, table: BlockTable) -> None:
        """Drop all references and remove the content from the prefix index: its numbers are invalid."""
        for group, held in zip(self.groups, table.groups):
            self._evict(group, held.blocks[held.n_passed :])
        self.release(table)

    def purge(self, root_key: bytes | None, session: bytes = b"") -> int:
        """Remove from the prefix index what was computed or fetched for an account or for one of its sessions, or
        everything if `root_key` is None. Returns the number of blocks. Sequences that reference them keep them."""
        n = 0
        for group in self.groups:
            purged = group.index.belonging(root_key, session)
            self._evict(group, purged)
            n += len(purged)
        return n

    def _pass(self, group: _Group, held: GroupTable, first: int) -> None:
        """Free the table's blocks before `first`."""
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
        keys, evicted = group.index.remove(blocks)
        if keys:
            self.version += 1
            for listener in self._listeners:
                listener.evicted(group.layout, keys, evicted)

    def _index(
        self, group: _Group, keys: Sequence[bytes], blocks: Sequence[int], owners: Iterable[Owner]
    ) -> Sequence[int]:
        """Index blocks and tell listeners. Returns the places of those whose content was not indexed before."""
        new = group.index.put(keys, blocks, owners)
        self.version += bool(new)
        if new and self._listeners:
            new_keys, new_blocks = [keys[place] for place in new], [blocks[place] for place in new]
            for listener in self._listeners:
                listener.stored(group.layout, new_keys, new_blocks)
        return new


def _many(blocks: Sequence[int]) -> Blocks:
    return np.array(blocks, np.intp)
