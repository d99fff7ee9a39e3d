"""The interface between the step loop and the tiers: commands in, notices out. No call blocks.

The step loop owns the blocks of the device pool (engine/tiers). Threads own the tiers and host memory (`manager.py`),
on every rank; the orders that they get are in `orders.py`.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from emberline.kv.cache import EventSource
from emberline.kv.retention import Conversation, Retention
from emberline.kv.tiers.fetch_policy import TierQueue
from emberline.kv.tiers.tier import BlockId, BlockMeta
from emberline.protocol.frames import TierStats

Item = tuple[int, int]  # KV group and index in a sequence's chain


class SavedBlock(NamedTuple):
    """A block to save. It is referenced, and not written, until `Saved` has the number of its save."""

    group: int
    block: int
    id: BlockId
    meta: BlockMeta


class WantedBlock(NamedTuple):
    """A block to fetch into a reserved one of the device pool."""

    item: Item
    block: int
    id: BlockId
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


class TierPort(Protocol):
    """Used by the step loop's thread."""

    names: tuple[str, ...]  # of the tiers, fastest first
    remote: bool  # some tier must be asked before `find`
    max_saving: int  # bytes that may be read for saves at once

    @property
    def own(self) -> Any:
        """The tiers of this rank, which execute orders: `TierManager`."""

    @property
    def changes(self) -> Sequence[EventSource]:
        """KV events of each tier."""

    @property
    def has_notices(self) -> bool:
        """True if a rank has reported something."""

    @property
    def report_s(self) -> float:
        """Time at which statistics are to be asked for again; inf if they are not known to have changed."""

    def notices(self) -> list[Notice]:
        """Take in what ranks have reported. Returns what is done on all of them."""

    def save(self, number: int, blocks: list[SavedBlock]) -> None:
        """Save blocks. Answered by `Saved`."""

    def find(self, tag: bytes, keys: Sequence[bytes]) -> list[str | None]:
        """The fastest tier that holds each block, of one layout."""

    def look_up(self, number: int, ids: Sequence[BlockId]) -> None:
        """Ask remote tiers; answered by `LookedUp`."""

    def fetch(self, number: int, blocks: Iterable[WantedBlock]) -> None:
        """Begin a fetch, or add blocks to it. Answered by `BlocksFetched` until each block is named, unless it is
        cancelled."""

    def cancel(self, number: int) -> Sequence[Item]:
        """End a fetch, complete or not: the blocks that may still be written, which `BlocksFetched` will name. Others
        are not written. Fetches have numbers of their own, which are not used again."""

    def start(self, retention: Retention, order: Callable[[Any], None]) -> None:
        """Follow a retention in what tiers keep, and give orders to all ranks by this function. Called once, first."""

    def used(self, keys: Sequence[bytes], conversation: Conversation | None) -> None:
        """Blocks with these content keys were found in the device pool, for a turn of this conversation: tiers keep
        them as if they were read."""

    def retire(self, owner: bytes, session: bytes, first: int) -> None:
        """The session has ended: tiers evict its blocks from this position on first, also those that an earlier process
        has written."""

    def remove(self, keys: Sequence[bytes]) -> None:
        """The content of blocks with these keys is invalid: forget it."""

    def queues(self) -> tuple[dict[str, TierQueue], TierQueue]:
        """What a fetch has to expect of each tier, and of the copies into the device pool."""

    def stats(self) -> tuple[TierStats, ...]: ...
