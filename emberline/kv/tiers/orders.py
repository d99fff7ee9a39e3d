"""Orders to the tiers of each rank, and what the ranks report: plain data that travels with the plans of steps.

Rank 0 decides what is saved, fetched and evicted, and every rank does it with its own slice of each block. A block has
the same number in the device pools of all ranks, and the same content key. Layout tags are each rank's own, and a
conversation is known to rank 0 alone: `without_conversation` leaves it out of what is sent.
"""

from typing import ClassVar

import msgspec

from emberline.kv.retention import Conversation
from emberline.kv.tiers.messages import BlocksFetched, SavedBlock, WantedBlock


class Save(msgspec.Struct, tag="save", array_like=True):
    """Copy blocks to host memory and the tiers behind it. Answered by `Saved`."""

    number: int
    blocks: list[SavedBlock]
    evicted: list[tuple[int, bytes]] = []  # group and key of blocks that rank 0's host tier has evicted
    urgent: ClassVar[bool] = False


class Fetch(msgspec.Struct, tag="fetch", array_like=True):
    """Copy blocks to the device pool. Answered by `BlocksFetched` until every block is named, unless it is
    cancelled."""

    number: int
    blocks: list[WantedBlock]
    urgent: ClassVar[bool] = True


class CancelFetch(msgspec.Struct, tag="cancel fetch", array_like=True):
    """Forget a fetch. Answered by `FetchCancelled`, once nothing is written for it any more."""

    number: int
    urgent: ClassVar[bool] = True


class Use(msgspec.Struct, tag="use", array_like=True):
    """Keep blocks as if they were read: they were found in the device pool."""

    keys: list[bytes]
    conversation: Conversation | None = None
    urgent: ClassVar[bool] = False


class Retire(msgspec.Struct, tag="retire", array_like=True):
    """Evict the blocks of a session from a position on first."""

    owner: bytes
    session: bytes
    first: int
    urgent: ClassVar[bool] = False


class Remove(msgspec.Struct, tag="remove", array_like=True):
    """Forget blocks, whose content is invalid."""

    keys: list[bytes]
    urgent: ClassVar[bool] = True


class Purge(msgspec.Struct, tag="purge", array_like=True):
    """Forget all blocks of an owner, of one of its sessions, or (None) of all owners. Answered by `Purged`."""

    number: int
    owner: bytes | None
    session: bytes | None
    urgent: ClassVar[bool] = True


TierOrder = Save | Fetch | CancelFetch | Use | Retire | Remove | Purge


class Saved(msgspec.Struct, frozen=True, tag=True):
    """The blocks of a `Save` are not read any more."""

    number: int


class FetchCancelled(msgspec.Struct, frozen=True, tag=True):
    number: int


class Purged(msgspec.Struct, frozen=True, tag=True):
    number: int
    blocks: dict[str, int] = {}  # by tier
    error: str = ""


TierReport = Saved | BlocksFetched | FetchCancelled | Purged


def without_conversation(value: object) -> None:
    """Encode a conversation, which means nothing to another process, as null."""
    if not isinstance(value, Conversation):
        raise TypeError(f"{type(value).__name__} is no plain data")
