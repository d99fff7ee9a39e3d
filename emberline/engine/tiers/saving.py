"""Blocks on their way from the device pool to the tiers: saved when they are published, not when they are evicted."""

from collections import OrderedDict
from collections.abc import Iterable

from emberline.engine.core.feature import NewBlocks
from emberline.engine.core.sequence import Sequence
from emberline.kv.cache import KVCache
from emberline.kv.tiers.group_tiers import GroupTiers
from emberline.kv.tiers.messages import SavedBlock
from emberline.kv.tiers.tier import BlockMeta

PART_BYTES = 128 << 20  # that are handed over together, and released together when they are copied
MAX_PINNED_SHARE = 8  # at most one in so many blocks of the device pool is referenced because it is being saved
# Blocks of running sequences wait for others, up to MAX_STEPS, because each save wakes two threads. MIN_BLOCKS, or a
# quarter of what may be referenced, are enough: the pool of a small worker is evicted within a few steps.
MIN_BLOCKS, MAX_STEPS = 64, 8


class BlockSaver:
    """A block that waits to be saved is not referenced: if it is evicted before, it is not saved."""

    def __init__(self, cache: KVCache, port: GroupTiers) -> None:
        self._cache = cache
        self._port = port
        self._sizes = [group.layout.block_bytes for group in cache.groups]
        self._waiting: OrderedDict[tuple[int, bytes], SavedBlock] = OrderedDict()  # by group and content key
        self._n_steps = 0  # that the oldest waiting block has waited
        self.urgent = False  # blocks wait that no running sequence references: the next plan may evict them
        self._saves: dict[int, list[SavedBlock]] = {}  # by number: what is being copied
        self._n_saves = 0  # so far
        self._n_pinned = self._pinned_bytes = 0
        self._max_pinned = max(4, cache.n_total // MAX_PINNED_SHARE)
        self._enough = min(MIN_BLOCKS, self._max_pinned // 4)  # blocks, for a save before MAX_STEPS

    def published(self, new: Iterable[NewBlocks]) -> None:
        """Take note of blocks that the prefix index has gained."""
        waiting = self._waiting
        for g, group in enumerate(self._cache.groups):
            indexed = group.index.key
            for seq, first, end in new:
                held, keys = seq.table.groups[g], seq.keys
                for j in range(max(first, held.n_passed), end):
                    key, block = keys[j], held.blocks[j]
                    if indexed(block) == key:
                        waiting[g, key] = SavedBlock(g, block, key, block_meta(seq, j))

    def step_ends(self) -> None:
        """Hand over what waits if it is enough, urgent or has waited long."""
        self._n_steps += bool(self._waiting)
        if self.urgent or self._n_steps >= MAX_STEPS or len(self._waiting) >= self._enough:
            self.dispatch()

    def dispatch(self) -> None:
        """Hand over as many blocks as may be read at once, in parts. What is left stays urgent if it was."""
        self._n_steps = 0
        part, n_bytes, waiting = list[SavedBlock](), 0, self._waiting
        indexed = [group.index.key for group in self._cache.groups]
        while waiting and self._pinned_bytes < self._port.own.max_saving and self._n_pinned < self._max_pinned:
            _, saved = waiting.popitem(last=False)
            if indexed[saved.group](saved.block) != saved.key:
                continue  # evicted meanwhile
            size = self._sizes[saved.group]
            if n_bytes + size > PART_BYTES and part:
                self._save(part)
                part, n_bytes = [], 0
            self._n_pinned += 1
            self._pinned_bytes += size
            n_bytes += size
            part.append(saved)
        if part:
            self._save(part)
        self.urgent = self.urgent and bool(waiting)

    def _save(self, part: list[SavedBlock]) -> None:
        self._n_saves += 1
        self._saves[self._n_saves] = part
        for g, blocks in self._by_group(part):
            self._cache.pin_all(g, blocks)
        self._port.save(self._n_saves, part)

    def _by_group(self, part: list[SavedBlock]) -> list[tuple[int, list[int]]]:
        """Blocks of a save, by KV group."""
        return [(g, [saved.block for saved in part if saved.group == g]) for g in range(len(self._sizes))]

    def saved(self, number: int) -> None:
        """Give up the references to the blocks of a save, which are copied."""
        part = self._saves.pop(number)
        for g, blocks in self._by_group(part):
            self._cache.unpin_all(g, blocks)
            self._pinned_bytes -= self._sizes[g] * len(blocks)
        self._n_pinned -= len(part)


def block_meta(seq: Sequence, j: int) -> BlockMeta:
    """Return the metadata of block j of a sequence, for tiers."""
    owner, session = seq.table.owner
    parent = seq.keys[j - 1] if j else owner
    return BlockMeta(owner, session, j, parent, 0, 0.0, 0.0, 0.0, seq.table.conversation)  # keywords take longer
