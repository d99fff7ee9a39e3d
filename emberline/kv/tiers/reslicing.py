"""Makes a rank's slices of blocks from the slices that groups of another layout have stored.

Every rank keeps its slices under its own layout tag. What is missing there may be stored as slices of another division:
by KV heads, by tokens (decode context parallelism), or whole. Such slices are read, each verified under its own
address, and this rank's is made of them. Divisions by layers are found only where they are this rank's own, since
stages of other groups begin at any layer. Keys that are stored by channel are never divided.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import repeat
from typing import Protocol, cast

import msgspec

from emberline.kv.slices import copy, runs
from emberline.kv.tiers.tier import BlockId, layout_tag
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


class BlockStore(Protocol):
    """Where slices of any layout are read from, by address: as `tier.Tier` reads."""

    def read(self, ids: Sequence[BlockId], buffers: Sequence[memoryview]) -> list[bool]: ...


class Reslicer:
    """Makes the slices of one rank of those that a store has."""

    def __init__(self, store: BlockStore, own: Sequence[KVGroup], whole: Sequence[KVGroup]) -> None:
        """own: this rank's slices of the blocks of each KV group. whole: the same blocks, not divided."""
        self._store = store
        pairs = [pair for pair in zip(own, whole) if pair[0].block_bytes and pair[1].keys == "token"]
        self._own = {layout_tag(group): group for group, _ in pairs}
        self.divisions = {layout_tag(group): divisions(group, undivided) for group, undivided in pairs}

    def read(self, ids: Sequence[BlockId], buffers: Sequence[memoryview], division: Division) -> list[bool]:
        """Fill each buffer with this rank's slice. False: the store lacks a part, or one was not verified."""
        got = [True] * len(ids)
        for part in division if ids else ():
            parts = [memoryview(bytearray(part.block_bytes)) for _ in ids]
            for at, has in enumerate(self._store.read(ids_of(ids, part), parts)):
                got[at] = got[at] and has
                if has:
                    copy(part, parts[at], self._own[ids[at].tag], buffers[at])
        return got


def ids_of(ids: Sequence[BlockId], part: KVGroup) -> list[BlockId]:
    """Addresses of a part of each block."""
    tag = layout_tag(part)
    return [BlockId(key, tag) for key, _ in ids]


def plain_ids(keys: Sequence[bytes], tag: bytes) -> list[BlockId]:
    """Tuples, which are equal to a BlockId, and sooner made."""
    return cast("list[BlockId]", list(zip(keys, repeat(tag))))
