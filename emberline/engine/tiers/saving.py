"""Blocks on their way from the device pool to the tiers: saved when they are published, not when they are evicted."""

from emberline.engine.core.sequence import Sequence
from emberline.kv.cache import KVCache
from emberline.kv.tiers.messages import SavedBlock, TierPort
from emberline.kv.tiers.tier import BlockId, BlockMeta, layout_tag

PART_BYTES = 32 << 20  # that are handed over together, and released together when they are copied
MAX_PINNED_SHARE = 8  # at most one in so many blocks of the device pool is referenced because it is being saved
# Blocks of running sequences wait for others, up to MAX_STEPS, because each save wakes two threads. MIN_BLOCKS, or a
# quarter of what may be referenced, are enough: the pool of a small worker is evicted within a few steps.
MIN_BLOCKS, MAX_STEPS = 64, 8


class BlockSaver:
    """A block that waits to be saved is not referenced: if it is evicted before, it is not saved."""

    def __init__(self, cache: KVCache, port: TierPort) -> None:
        self._cache = cache
        self._port = port
        self._layouts = [group.layout for group in cache.groups]
        self._tags = [layout_tag(layout) for layout in self._layouts]
        self._waiting: dict[tuple[int, bytes], BlockMeta] = {}  # by group and content key, in order
        self._n_steps = 0  # that the oldest waiting block has waited
        self.urgent = False  # blocks wait that no running sequence references: the next plan may evict them
        self._saves: dict[int, list[SavedBlock]] = {}  # by number: what is being copied
        self._n_saves = 0  # so far
        self._n_pinned = self._pinned_bytes = 0
        self._max_pinned = max(4, cache.n_total // MAX_PINNED_SHARE)
        self._enough = min(MIN_BLOCKS, self._max_pinned // 4)  # blocks, for a save before MAX_STEPS

    def published(self, seq: Sequence, first: int, end: int) -> None:
        """The blocks first .. end - 1 of the sequence's table are in the prefix index."""
        session = seq.session_digest
        for g, (group, held) in enumerate(zip(self._cache.groups, seq.table.groups)):
            for j in range(max(first, held.n_passed), end):
                key = seq.keys[j]
                if key in group.index and group.index.block(key) == held.blocks[j]:
                    self._waiting[g, key] = block_meta(seq, session, j)

    def step_ends(self) -> None:
        """Hand over what waits if it is enough, urgent or has waited long."""
        self._n_steps += bool(self._waiting)
        if self.urgent or self._n_steps >= MAX_STEPS or len(self._waiting) >= self._enough:
            self.dispatch()

    def dispatch(self) -> None:
        """Hand over as many blocks as may be read at once, in parts."""
        self._n_steps, self.urgent = 0, False
        if not self._waiting:
            return
        room = self._port.max_saving - self._pinned_bytes
        part: list[SavedBlock] = []
        part_bytes = 0
        while self._waiting and room > 0 and self._n_pinned < self._max_pinned:
            g, key = next(iter(self._waiting))
            meta = self._waiting.pop((g, key))
            group = self._cache.groups[g]
            if key not in group.index:
                continue  # evicted meanwhile
            block = group.index.block(key)
            self._cache.pin(g, block)
            self._n_pinned += 1
            n_bytes = self._layouts[g].block_bytes
            if part and part_bytes + n_bytes > PART_BYTES:
                self._save(part, part_bytes)
                part, part_bytes = [], 0
            room -= n_bytes
            part_bytes += n_bytes
            part.append(SavedBlock(g, block, BlockId(key, self._tags[g]), meta))
        if part:
            self._save(part, part_bytes)

    def _save(self, part: list[SavedBlock], n_bytes: int) -> None:
        self._n_saves += 1
        self._saves[self._n_saves] = part
        self._pinned_bytes += n_bytes
        self._port.save(self._n_saves, part)

    def saved(self, number: int) -> None:
        """Give up the references to the blocks of a save, which are copied."""
        blocks = self._saves.pop(number)
        for g, layout in enumerate(self._layouts):
            mine = [saved.block for saved in blocks if saved.group == g]
            self._cache.unpin_all(g, mine)
            self._pinned_bytes -= layout.block_bytes * len(mine)
        self._n_pinned -= len(blocks)


def block_meta(seq: Sequence, session: bytes, j: int) -> BlockMeta:
    parent = seq.keys[j - 1] if j else seq.root_key
    conversation = seq.table.conversation
    return BlockMeta(owner=seq.root_key, session=session, position=j, parent=parent, conversation=conversation)
