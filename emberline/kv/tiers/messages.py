"""The interface between the step loop and the tiers: commands in, notices out. No call blocks.

The step loop owns the blocks of the device pool (engine/tiers). Threads own the tiers and host memory (`manager.py`),
on every rank; the orders that they get are in `orders.py`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from emberline.kv.tiers.tier import BlockMeta

Item = tuple[int, int]  # KV group and index in a sequence's chain


class SavedBlock(NamedTuple):
    """A block to save. It is referenced, and not written, until `Saved` has the number of its save."""

    group: int
    block: int
    key: bytes  # content key; each rank has a layout tag of its own
    meta: BlockMeta


class WantedBlock(NamedTuple):
    """A block to fetch into a reserved one of the device pool."""

    item: Item
    block: int
    key: bytes
    meta: BlockMeta
    tier: str

    @property
    def group(self) -> int:
        return self.item[0]


class Saved(msgspec.Struct, frozen=True, tag=True):
    """The blocks of a save are not read any more."""

    number: int


class BlocksFetched(msgspec.Struct, frozen=True, tag=True):
    """Blocks of a fetch are in the device pool, or will not be: a tier does not have them after all.

    Of a cancelled fetch: the blocks that were being written are not written any more.
    """

    number: int
    fetched: Sequence[Item]
    missing: Sequence[Item] = ()
    tier: str = ""  # that `fetched` came from; empty: where they were looked for


class LookedUp(msgspec.Struct, frozen=True, tag=True):
    """Remote tiers have been asked what they hold of a sequence."""

    number: int


Notice = Saved | BlocksFetched | LookedUp
