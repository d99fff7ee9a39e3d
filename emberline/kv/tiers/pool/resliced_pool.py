"""The pool as a rank sees it whose group is divided otherwise than the one that has computed a block.

It writes this rank's slices only, and makes what it lacks of the slices of other layouts (`kv/tiers/reslicing.py`).
"""

from collections.abc import Sequence

from emberline.kv.kv_events import TierChanges
from emberline.kv.tiers.pool.pool_tier import PoolTier
from emberline.kv.tiers.reslicing import Division, Reslicer, ids_of, plain_ids
from emberline.kv.tiers.tier import BlockId, TierStats, layout_tag
from emberline.protocol.block_hash import KVGroup


class ReslicedPool:
    """A `tier.Tier` over the pool, of one rank. It writes its own slices only."""

    name = PoolTier.name
    remote = True

    def __init__(self, pool: PoolTier, own: Sequence[KVGroup], whole: Sequence[KVGroup]) -> None:
        self._pool = pool
        self._reslicer = Reslicer(pool, own, whole)
        self._used: dict[bytes, Division] = {}  # by tag: the other division that was found last
        self.write, self.touch, self.retire = pool.write, pool.touch, pool.retire
        self.purge, self.close, self.held = pool.purge, pool.close, pool.held

    @property
    def changes(self) -> TierChanges | None:
        return self._pool.changes

    @changes.setter
    def changes(self, changes: TierChanges | None) -> None:
        self._pool.changes = changes

    def stats(self) -> TierStats:
        return self._pool.stats()

    def holds(self, ids: Sequence[BlockId]) -> list[bool]:
        held = self._pool.holds(ids)
        if self._used and not all(held):
            missing = [at for at, has in enumerate(held) if not has]
            for at, has in zip(missing, self._holds_parts([ids[at] for at in missing])):
                held[at] = has
        return held

    def _holds_parts(self, ids: Sequence[BlockId]) -> list[bool]:
        """True for each block whose parts are in the pool. The step loop asks, in turn with the tier's threads."""
        found = [False] * len(ids)
        for tag, division in list(self._used.items()):  # a reading thread may add to it
            mine = [at for at, (_, each) in enumerate(ids) if each == tag]
            keys = [ids[at][0] for at in mine]
            parts = (self._pool.holds(plain_ids(keys, layout_tag(part))) for part in division)
            for at, has in zip(mine, map(all, zip(*parts))):
                found[at] = has
        return found

    def look_up(self, ids: Sequence[BlockId]) -> None:
        """Look the blocks up in this rank's division, and what it lacks in the one that has the first of them."""
        self._pool.look_up(ids)
        for tag in dict.fromkeys(id_.tag for id_ in ids):
            mine = [id_ for id_ in ids if id_.tag == tag]
            missing = [id_ for id_, held in zip(mine, self._pool.holds(mine)) if not held]
            if not missing or not (others := self._others(tag)):
                continue
            parts = dict.fromkeys(part for division in others for part in division)
            self._pool.look_up([id_ for part in parts for id_ in ids_of(missing[:1], part)])  # one call for all
            for division in others:
                if all(self._pool.holds(ids_of(missing[:1], part))[0] for part in division):
                    for part in division:
                        self._pool.look_up(ids_of(missing[1:], part))
                    self._used[tag] = division
                    break

    def _others(self, tag: bytes) -> Sequence[Division]:
        """Divisions to try, beginning with the one that was found last."""
        used = self._used.get(tag)
        return sorted(self._reslicer.divisions.get(tag, ()), key=lambda division: division != used)

    def read(self, ids: Sequence[BlockId], buffers: Sequence[memoryview]) -> list[bool]:
        got = self._pool.read(ids, buffers)
        for tag in dict.fromkeys(id_.tag for id_, has in zip(ids, got) if not has):
            missing = [at for at, id_ in enumerate(ids) if id_.tag == tag and not got[at]]
            for division in self._others(tag):
                first, *rest = missing
                if not self._reslicer.read([ids[first]], [buffers[first]], division)[0]:
                    continue
                self._used[tag] = division
                got[first] = True
                read = self._reslicer.read([ids[at] for at in rest], [buffers[at] for at in rest], division)
                for at, has in zip(rest, read):
                    got[at] = has
                break
        return got

    def remove(self, ids: Sequence[BlockId]) -> None:
        """Forget the blocks in every division: their content is invalid."""
        self._pool.remove(ids)
        for tag, every in self._reslicer.divisions.items():
            mine = [id_ for id_ in ids if id_.tag == tag]
            for part in {part for division in every for part in division} if mine else ():
                self._pool.remove(ids_of(mine, part))
