"""What rank 0 tells the other ranks about tiers, and what they report: plain data, in the order of the steps.

Every rank has tiers of its own for its slices. Rank 0 alone decides what is saved and fetched; a block has the same
number in the device pools of all ranks, and the same content key. Layout tags are each rank's own.
"""

import msgspec

from emberline.kv.tiers.messages import Item, SavedBlock, WantedBlock
from emberline.kv.tiers.tier import BlockId, BlockMeta


class BlockSlice(msgspec.Struct, array_like=True):
    """A block to save or to fetch, without what differs between ranks."""

    group: int
    index: int  # in the sequence's chain
    block: int  # of the device pool
    key: bytes  # content key
    owner: bytes
    session: bytes
    parent: bytes
    tier: str = ""  # from which it is fetched

    @classmethod
    def of(cls, block: SavedBlock | WantedBlock) -> "BlockSlice":
        group = block.group if isinstance(block, SavedBlock) else block.item[0]
        tier = "" if isinstance(block, SavedBlock) else block.tier
        meta = block.meta
        return cls(group, meta.position, block.block, block.id.key, meta.owner, meta.session, meta.parent, tier)

    def saved(self, tags: list[bytes]) -> SavedBlock:
        return SavedBlock(self.group, self.block, BlockId(self.key, tags[self.group]), self._meta)

    def wanted(self, tags: list[bytes]) -> WantedBlock:
        block_id = BlockId(self.key, tags[self.group])
        return WantedBlock((self.group, self.index), self.block, block_id, self._meta, self.tier)

    @property
    def _meta(self) -> BlockMeta:
        return BlockMeta(owner=self.owner, session=self.session, position=self.index, parent=self.parent)


class SaveSlices(msgspec.Struct, tag="save", array_like=True):
    """Answered by `SlicesSaved`."""

    number: int
    blocks: list[BlockSlice]


class FetchSlices(msgspec.Struct, tag="fetch", array_like=True):
    """Answered by `SlicesFetched` until every block is named, unless it is cancelled."""

    number: int
    blocks: list[BlockSlice]


class CancelFetch(msgspec.Struct, tag="cancel fetch", array_like=True):
    """Answered by `FetchCancelled`, once nothing is written for it any more."""

    number: int


class UseKeys(msgspec.Struct, tag="use", array_like=True):
    keys: list[bytes]


class RetireSession(msgspec.Struct, tag="retire", array_like=True):
    owner: bytes
    session: bytes
    first: int


class RemoveKeys(msgspec.Struct, tag="remove", array_like=True):
    keys: list[bytes]


class PurgeTiers(msgspec.Struct, tag="purge", array_like=True):
    """Answered by `TiersPurged`."""

    number: int
    owner: bytes | None
    session: bytes | None


TierCommand = SaveSlices | FetchSlices | CancelFetch | UseKeys | RetireSession | RemoveKeys | PurgeTiers


class SlicesSaved(msgspec.Struct, frozen=True, tag=True):
    number: int


class SlicesFetched(msgspec.Struct, frozen=True, tag=True):
    number: int
    fetched: list[Item]
    missing: list[Item]


class FetchCancelled(msgspec.Struct, frozen=True, tag=True):
    number: int


class TiersPurged(msgspec.Struct, frozen=True, tag=True):
    number: int
    error: str = ""


TierReport = SlicesSaved | SlicesFetched | FetchCancelled | TiersPurged
