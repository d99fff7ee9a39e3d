"""The pool as a rank sees it whose group is divided otherwise than the one that has computed a block.

Every rank keeps its slices under its own layout tag. What is missing there may be in the pool as slices of another
division: by KV heads, by tokens (decode context parallelism), or whole. Such slices are read, each verified under its
own address, and this rank's is made of them. Divisions by layers are found only where they are this rank's own, since
stages of other groups begin at any layer.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import repeat
from typing import cast

import msgspec

from emberline.kv.kv_events import TierChanges
from emberline.kv.slices import copy, runs
from emberline.kv.tiers.pool.pool_tier import PoolTier
from emberline.kv.tiers.tier import BlockId, TierStats, layout_tag
from emberline.protocol.block_hash import BLOCK_TOKENS, KVGroup

MAX_PARTS = 8  # into which heads and tokens are divided

Division = tuple[KVGroup, ...]  # slices that together have this rank's slice


@lru_cache(64)
def divisions(own: KVGroup, whole: KVGroup) -> tuple[Division, ...]:
    """Other divisions of a block, each as those slices that hold a part of this rank's."""
    found = []
    for layers in dict.fromkeys((whole.layers, own.layers)):
        for n_heads in _divisors(whole.kv_heads):
            for n_tokens in _divisors(BLOCK_TOKENS) if whole.planes == 1 else (1,):
                parts = [each for each in _divided(whole, layers, n_heads, n_tokens) if runs(each, own)]
                if own not in parts:
                    found.append(tuple(parts))
    return tuple(found)


def _divisors(n: int) -> list[int]:
    return [parts for parts in range(1, MAX_PARTS + 1) if n % parts == 0]


def _divided(whole: KVGroup, layers: tuple[int, ...], n_heads: int, n_tokens: int) -> Iterator[KVGroup]:
    heads, tokens = whole.kv_heads // n_heads, BLOCK_TOKENS // n_tokens
    for head in range(n_heads):
        for token in range(n_tokens):
            yield msgspec.structs.replace(
                whole,
                layers=layers,
                kv_heads=heads,
                first_head=whole.first_head + head * heads,
                tokens=(token * tokens, (token + 1) * tokens),
            )


class ReslicedPool:
    """A `tier.Tier` over the pool, of one rank. It writes its own slices only."""

    name = PoolTier.name
    remote = True

    def __init__(self, pool: PoolTier, own: Sequence[KVGroup], whole: Sequence[KVGroup]) -> None:
        self._pool = pool
        pairs = [pair for pair in zip(own, whole) if pair[0].block_bytes and pair[1].keys == "token"]
        self._own = {layout_tag(group): group for group, _ in pairs}
        self._divisions = {layout_tag(group): divisions(group, undivided) for group, undivided in pairs}
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
            parts = (self._pool.holds(_plain_ids(keys, layout_tag(part))) for part in division)
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
            self._pool.look_up([id_ for part in parts for id_ in _ids_of(missing[:1], part)])  # one call for all
            for division in others:
                if all(self._pool.holds(_ids_of(missing[:1], part))[0] for part in division):
                    for part in division:
                        self._pool.look_up(_ids_of(missing[1:], part))
                    self._used[tag] = division
                    break

    def _others(self, tag: bytes) -> Sequence[Division]:
        """Divisions to try, beginning with the one that was found last."""
        used = self._used.get(tag)
        return sorted(self._divisions.get(tag, ()), key=lambda division: division != used)

    def read(self, ids: Sequence[BlockId], buffers: Sequence[memoryview]) -> list[bool]:
        got = self._pool.read(ids, buffers)
        for tag in dict.fromkeys(id_.tag for id_, has in zip(ids, got) if not has):
            missing = [at for at, id_ in enumerate(ids) if id_.tag == tag and not got[at]]
            for division in self._others(tag):
                first, *rest = missing
                if not self._read_parts([ids[first]], [buffers[first]], division)[0]:
                    continue
                self._used[tag] = division
                got[first] = True
                read = self._read_parts([ids[at] for at in rest], [buffers[at] for at in rest], division)
                for at, has in zip(rest, read):
                    got[at] = has
                break
        return got

    def _read_parts(self, ids: Sequence[BlockId], buffers: Sequence[memoryview], division: Division) -> list[bool]:
        """Make this rank's slices of those of a division."""
        got = [True] * len(ids)
        for part in division if ids else ():
            parts = [memoryview(bytearray(part.block_bytes)) for _ in ids]
            for at, has in enumerate(self._pool.read(_ids_of(ids, part), parts)):
                got[at] = got[at] and has
                if has:
                    copy(part, parts[at], self._own[ids[at].tag], buffers[at])
        return got

    def remove(self, ids: Sequence[BlockId]) -> None:
        """Forget the blocks in every division: their content is invalid."""
        self._pool.remove(ids)
        for tag, every in self._divisions.items():
            mine = [id_ for id_ in ids if id_.tag == tag]
            for part in {part for division in every for part in division} if mine else ():
                self._pool.remove(_ids_of(mine, part))


def _ids_of(ids: Sequence[BlockId], part: KVGroup) -> list[BlockId]:
    tag = layout_tag(part)
    return [BlockId(key, tag) for key, _ in ids]


def _plain_ids(keys: Sequence[bytes], tag: bytes) -> list[BlockId]:
    """Tuples, which are equal to a BlockId, and sooner made."""
    return cast("list[BlockId]", list(zip(keys, repeat(tag))))
