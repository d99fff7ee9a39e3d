"""Orders to the tiers of each rank, and what the ranks report: plain data that travels with the plans of steps.

Rank 0 decides what is saved, fetched and evicted, and every rank does it with its own slice of each block. A block has
the same number in the device pools of all ranks, and the same content key. Layout tags are each rank's own, and a
conversation is known to rank 0 alone: `ranks.messages` leaves it out of what is sent.
"""

from typing import ClassVar, NamedTuple

import msgspec

from emberline.kv.tiers.messages import BlocksFetched, LookedUp, Saved, SavedBlock, WantedBlock
from emberline.kv.tiers.tier import BlockMeta

GroupKey = tuple[int, bytes]  # KV group and content key of a block


class WholeBlock(NamedTuple):
    """A block that is not divided: each rank takes its slice of it."""

    group: int
    key: bytes
    meta: BlockMeta
    data: bytes


class _Order(msgspec.Struct, array_like=True):
    urgent: ClassVar[bool] = True


class Save(_Order, tag="save"):
    """Copy blocks to host memory and the tiers behind it. Answered by `Saved`."""

    number: int
    blocks: list[SavedBlock]
    evicted: dict[str, list[tuple[int, bytes]]] = {}  # by tier: group and key of what rank 0 has evicted
    urgent = False


class Fetch(_Order, tag="fetch"):
    """Copy blocks to the device pool. Answered by `BlocksFetched` until every block is named, unless it is
    cancelled."""

    number: int
    blocks: list[WantedBlock]


class CancelFetch(_Order, tag="cancel fetch"):
    """Forget a fetch. Answered by `FetchCancelled`, once nothing is written for it any more."""

    number: int


class Remove(_Order, tag="remove"):
    """Forget blocks, whose content is invalid."""

    keys: list[bytes]


class Flush(_Order, tag="flush"):
    """Write what earlier orders have saved, within a time. Answered by `Flushed`."""

    number: int
    limit_s: float


class Purge(Flush, tag="purge"):
    """Flush, and forget all blocks of an owner, of one of its sessions, or (None) of all owners."""

    owner: bytes | None
    session: bytes | None


class ReadBlocks(_Order, tag="read"):
    """Read blocks from the tiers that hold them. Answered by `SlicesRead`."""

    number: int
    blocks: list[GroupKey]


class WriteBlocks(_Order, tag="write"):
    """Write blocks to the tiers of this machine. Answered by `BlocksWritten`."""

    number: int
    blocks: list[WholeBlock]


TierOrder = Save | Fetch | CancelFetch | Remove | Flush | Purge | ReadBlocks | WriteBlocks


class FetchCancelled(msgspec.Struct, frozen=True, tag=True):
    number: int


class Flushed(msgspec.Struct, frozen=True, tag=True):
    """A `Flush` or a `Purge` is done, or has failed."""

    number: int
    purged: dict[str, int] = {}  # blocks by tier
    error: str = ""


class SlicesRead(msgspec.Struct, frozen=True, tag=True):
    """A rank's slices of the blocks of a `ReadBlocks`, in their order. None: no tier has the block."""

    number: int
    slices: list[bytes | None]


class BlocksWritten(msgspec.Struct, frozen=True, tag=True):
    number: int


TierReport = Saved | BlocksFetched | FetchCancelled | Flushed | LookedUp | SlicesRead | BlocksWritten
