"""The tiers of all ranks as one, as rank 0's step loop sees them. An engine with one rank is a group of one.

A block is saved when every rank has copied its slice, and fetched when every rank has it: a slice that one rank has
lost is missing everywhere, and the block is computed again, and saved where it is missing. What rank 0's tiers hold is
taken for what all hold, so followers evict from host memory what rank 0 evicts.
"""

import contextlib
import errno
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

from emberline.kv.notice_queue import NoticeQueue
from emberline.kv.retention import Conversation, Retention
from emberline.kv.tally import Tally
from emberline.kv.tiers.manager import FLUSH_S, TierManager
from emberline.kv.tiers.messages import BlocksCopied, BlocksFetched, Item, LookedUp, Notice, SavedBlock, WantedBlock
from emberline.kv.tiers.orders import (
    CancelFetch,
    Fetch,
    FetchCancelled,
    Flush,
    Flushed,
    Purge,
    Remove,
    Retire,
    Save,
    Saved,
    TierOrder,
    TierReport,
)


@dataclass(slots=True, eq=False)
class _Flush:
    left: int  # ranks that have not answered
    purged: dict[str, int] = field(default_factory=dict)  # blocks by tier
    error: str = ""
    done: threading.Event = field(default_factory=threading.Event)


class GroupTiers:
    """A `messages.TierPort`, which gives orders to the tiers of every rank, its own among them."""

    def __init__(self, own: TierManager, n_ranks: int = 1) -> None:
        self.own, self.n_ranks = own, n_ranks
        self.names, self.remote, self.changes, self.all_tiers = own.names, own.remote, own.changes, own.all_tiers
        self.find, self.look_up, self.queues = own.find, own.look_up, own.queues
        self.stats, self.close = own.stats, own.close
        self._order: Callable[[TierOrder], None]
        self._numbers = count(1)  # of saves and flushes, which other threads begin
        self._saves: dict[int, Sequence[SavedBlock]] = {}
        self._saving_bytes = 0
        self._copies: Tally[int] = Tally()  # numbers of saves
        self._fetches: dict[int, Tally[Item]] = {}
        self._cancelled: dict[int, Sequence[Item]] = {}  # blocks of fetches that some rank may still write
        self._stops: Tally[int] = Tally()  # numbers of cancelled fetches
        self._flushes: dict[int, _Flush] = {}
        if n_ranks > 1:
            own.record_evictions()

    def start(self, retention: Retention, order: Callable[[TierOrder], None]) -> None:
        """Follow a retention, and give orders by this function from now on."""
        self._order = order
        self.own.follow(retention)

    def report(self, reports: Iterable[TierReport]) -> None:
        """Take the reports of a follower, from any thread."""
        for report in reports:
            self.own.queue.put(report)

    @property
    def has_notices(self) -> bool:
        """True if a rank has reported something."""
        return bool(self.own.queue)

    @property
    def report_s(self) -> float:
        """Time at which statistics are to be asked for again; inf if they are not known to have changed."""
        return self.own.report_s

    def notices(self) -> list[Notice]:
        """Take in what ranks have reported. Returns what is done on all of them."""
        merged: list[Notice] = []
        for report in self.own.reports():
            if isinstance(report, Saved):
                for number in self._copies.said((report.number,))[0]:
                    blocks = self._saves.pop(number)
                    self._saving_bytes -= self._size(blocks)
                    merged.append(BlocksCopied(blocks))
            elif isinstance(report, BlocksFetched):
                if (tally := self._fetches.get(report.number)) is not None:
                    found, missing = tally.said(report.fetched, report.missing)
                    if found or missing:
                        merged.append(BlocksFetched(report.number, found, missing, report.tier))
            elif isinstance(report, FetchCancelled):
                for number in self._stops.said((report.number,))[0]:
                    merged.append(BlocksFetched(number, (), self._cancelled.pop(number)))
            elif isinstance(report, LookedUp):
                merged.append(report)
            else:
                self._flushed(report)
        return merged

    # --- saving -----------------------------------------------------------------------------------------------------

    def room(self) -> int:
        """Bytes that `save` may take now; small or negative: later."""
        return self.own.max_saving - self._saving_bytes

    def save(self, blocks: Sequence[SavedBlock]) -> None:
        """Save blocks, which are referenced until `BlocksCopied` names them."""
        number = next(self._numbers)
        self._saves[number] = blocks
        self._saving_bytes += self._size(blocks)
        self._copies.expect((number,), self.n_ranks)
        evicted = self.own.make_room(number, blocks) if self.n_ranks > 1 else []
        self._order(Save(number, list(blocks), evicted))

    def _size(self, blocks: Sequence[SavedBlock]) -> int:
        sizes = self.own.sizes
        return sum([sizes[block.group] for block in blocks])

    # --- fetching ---------------------------------------------------------------------------------------------------

    def fetch(self, number: int, blocks: Iterable[WantedBlock]) -> None:
        """Begin a fetch, or add blocks to it."""
        wanted = list(blocks)
        self._fetches.setdefault(number, Tally()).expect([block.item for block in wanted], self.n_ranks)
        self._order(Fetch(number, wanted))

    def cancel(self, number: int) -> Sequence[Item]:
        """End a fetch, complete or not. Returns the blocks that some rank may still write: `BlocksFetched` names them
        once none does."""
        tally = self._fetches.pop(number, None)
        if tally is None:
            return ()
        left = tuple(tally)
        if left:
            self._cancelled[number] = left
            self._stops.expect((number,), self.n_ranks)
        self._order(CancelFetch(number))
        return left

    # --- what else every tier is told -------------------------------------------------------------------------------

    def used(self, keys: Sequence[bytes], conversation: Conversation | None) -> None:
        """Keep blocks that were found in the device pool, as if they were read."""
        self.own.touch(keys, conversation, self._order)

    def retire(self, owner: bytes, session: bytes, first: int) -> None:
        """Evict the blocks of a session that has ended first, from a position on."""
        self._order(Retire(owner, session, first))

    def remove(self, keys: Sequence[bytes]) -> None:
        """Forget blocks, whose content is invalid."""
        self._order(Remove(list(keys)))

    # --- what other threads wait for, while the step loop runs ------------------------------------------------------

    def flush(self, limit_s: float = FLUSH_S) -> bool:
        """Wait until what was saved by now, on every rank, is where it belongs. Returns False if it took longer."""
        with contextlib.suppress(OSError):
            self._wait_for(Flush(next(self._numbers), limit_s))
            return True
        return False

    def purge(self, owner: bytes | None, session: bytes | None) -> dict[str, int]:
        """Forget blocks on every rank: of an owner, of one of its sessions, or all. Returns their number by tier, in
        which a block counts once, whatever the number of ranks. Raises OSError if something may be left."""
        return self._wait_for(Purge(next(self._numbers), FLUSH_S, owner, session))

    def _wait_for(self, order: Flush) -> dict[str, int]:
        flush = self._flushes[order.number] = _Flush(self.n_ranks)
        self._order(order)
        self.own.queue.wake()
        try:
            if not flush.done.wait(2 * order.limit_s):
                raise OSError(errno.ETIMEDOUT, "a rank does not answer")
        finally:
            del self._flushes[order.number]
        if flush.error:
            raise OSError(errno.EIO, flush.error)
        return flush.purged

    def _flushed(self, report: Flushed) -> None:
        if (flush := self._flushes.get(report.number)) is not None:
            flush.error = flush.error or report.error
            for name, n in report.purged.items():
                flush.purged[name] = max(n, flush.purged.get(name, 0))
            flush.left -= 1
            if not flush.left:
                flush.done.set()


class NoTiers:
    """Stands for the tiers of a follower that has none: every slice is lost."""

    def __init__(self) -> None:
        self.queue: NoticeQueue[TierReport] = NoticeQueue()
        self.reports, self.close = self.queue.take, self.queue.close

    def execute(self, orders: Sequence[TierOrder]) -> None:
        """Answer orders at once."""
        for order in orders:
            if isinstance(order, Save):
                self.queue.put(Saved(order.number))
            elif isinstance(order, Fetch):
                self.queue.put(BlocksFetched(order.number, [], [block.item for block in order.blocks]))
            elif isinstance(order, CancelFetch):
                self.queue.put(FetchCancelled(order.number))
            elif isinstance(order, Flush):
                self.queue.put(Flushed(order.number))
