"""The tiers of all ranks as one, as rank 0's step loop sees them. An engine with one rank is a group of one.

A block is saved when every rank has copied its slice, and fetched when every rank has it: a slice that one rank has
lost is missing everywhere, and the block is computed again, and saved where it is missing. What rank 0's tiers hold is
taken for what all hold, so followers evict what rank 0 evicts.
"""

import errno
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from itertools import count
from typing import TypeVar

from emberline.kv.retention import Retention
from emberline.kv.slices import copy
from emberline.kv.tally import Answers, GroupPort, Tally
from emberline.kv.tiers.manager import FLUSH_S, TierManager
from emberline.kv.tiers.messages import BlocksFetched, Item, LookedUp, Saved, SavedBlock, WantedBlock
from emberline.kv.tiers.orders import (
    BlocksWritten,
    CancelFetch,
    Fetch,
    FetchCancelled,
    Flush,
    Flushed,
    GroupKey,
    Purge,
    ReadBlocks,
    Remove,
    Save,
    SlicesRead,
    TierOrder,
    TierReport,
    WholeBlock,
    WriteBlocks,
)

ANSWER_S = 60.0  # for every rank to read or write a batch of blocks
Answer = TypeVar("Answer")


class GroupTiers(GroupPort[TierOrder, TierReport]):
    """A `messages.TierPort`, which gives orders to the tiers of every rank, its own among them."""

    own: TierManager

    def __init__(self, own: TierManager) -> None:
        super().__init__(own)
        self.n_ranks = len(own.ranks)
        self.whole = own.whole  # layouts of blocks that are not divided
        self.names, self.remote, self.changes, self.all_tiers = own.names, own.remote, own.changes, own.all_tiers
        self.find, self.look_up, self.queues = own.find, own.look_up, own.queues
        self.used, self.retire = own.used, own.retire  # rank 0 decides for all what is evicted
        self.stats, self.max_saving = own.stats, own.max_saving
        self._numbers = count(1)  # of flushes, which other threads begin
        self._answers = Answers({Flushed: Flushed.merged})
        self._fetches: dict[int, Tally[Item]] = {}
        self._cancelled: dict[int, Sequence[Item]] = {}  # blocks of fetches that some rank may still write
        self._flushes: dict[int, Future[Flushed]] = {}
        self._reads: dict[int, tuple[dict[int, SlicesRead], Future[None]]] = {}  # what each rank has read
        self._writes: dict[int, Future[BlocksWritten]] = {}
        if self.n_ranks > 1:
            own.record_evictions()

    def start(self, retention: Retention, order: Callable[[TierOrder], None]) -> None:
        """Follow a retention, and give orders by this function from now on."""
        self.order = order
        self.own.follow(retention)

    @property
    def report_s(self) -> float:
        """Time at which statistics are to be asked for again; inf if they are not known to have changed."""
        return self.own.report_s

    def merge(self, rank: int, report: TierReport) -> None:
        """Take in the report of one rank."""
        if isinstance(report, LookedUp):
            self.merged.append(report)
        elif isinstance(report, BlocksFetched):
            if (tally := self._fetches.get(report.number)) is not None:
                found, missing = tally.said(report.fetched, report.missing)
                if found or missing:
                    self.merged.append(BlocksFetched(report.number, found, missing, report.tier))
        elif isinstance(report, SlicesRead):
            if (reading := self._reads.get(report.number)) is not None:
                reading[0][rank] = report
                if len(reading[0]) == self.n_ranks:
                    reading[1].set_result(None)
        elif (answer := self._answers.said(report, report.number)) is None:
            pass  # others are awaited
        elif isinstance(answer, Saved):
            self.merged.append(answer)
        elif isinstance(answer, FetchCancelled):
            self.merged.append(BlocksFetched(answer.number, (), self._cancelled.pop(answer.number)))
        elif isinstance(answer, BlocksWritten):
            if (written := self._writes.pop(answer.number, None)) is not None:
                written.set_result(answer)
        elif (flush := self._flushes.pop(answer.number, None)) is not None:
            flush.set_result(answer)

    def save(self, number: int, blocks: list[SavedBlock]) -> None:
        """Save blocks, which are referenced until `Saved` has their number."""
        self._answers.expect(Saved, number, self.n_ranks)
        self.order(Save(number, blocks, self.own.make_room(number, blocks) if self.n_ranks > 1 else {}))

    def fetch(self, number: int, blocks: Iterable[WantedBlock]) -> None:
        """Begin a fetch, or add blocks to it."""
        wanted = list(blocks)
        self._fetches.setdefault(number, Tally()).expect([block.item for block in wanted], self.n_ranks)
        self.order(Fetch(number, wanted))

    def cancel(self, number: int) -> Sequence[Item]:
        """End a fetch, complete or not. Returns the blocks that some rank may still write: `BlocksFetched` names them
        once none does."""
        tally = self._fetches.pop(number, None)
        if tally is None:
            return ()
        left = tuple(tally)
        if left:
            self._cancelled[number] = left
            self._answers.expect(FetchCancelled, number, self.n_ranks)
        self.order(CancelFetch(number))
        return left

    def remove(self, keys: Sequence[bytes]) -> None:
        """Forget blocks, whose content is invalid."""
        self.order(Remove(list(keys)))

    # --- what other threads wait for, while the step loop runs ------------------------------------------------------

    def flush(self, limit_s: float = FLUSH_S) -> bool:
        """Wait until what was saved by now, on every rank, is where it belongs. Returns False if it took longer."""
        try:
            self._wait_for(Flush(next(self._numbers), limit_s))
        except OSError:
            return False
        return True

    def purge(self, owner: bytes | None, session: bytes | None) -> dict[str, int]:
        """Forget blocks on every rank: of an owner, of one of its sessions, or all. Returns their number by tier, in
        which a block counts once, whatever the number of ranks. Raises OSError if something may be left."""
        return self._wait_for(Purge(next(self._numbers), FLUSH_S, owner, session))

    def read(self, blocks: Sequence[GroupKey]) -> list[bytes | None]:
        """Read whole blocks, to which every rank contributes its slice. None: some rank does not have its slice."""
        number = next(self._numbers)
        slices: dict[int, SlicesRead] = {}
        done = Future[None]()
        self._reads[number] = slices, done
        try:
            self._await(ReadBlocks(number, list(blocks)), done)
        finally:
            del self._reads[number]
        return [
            self._joined(group, [slices[rank].slices[n] for rank in range(self.n_ranks)])
            for n, (group, _) in enumerate(blocks)
        ]

    def _joined(self, group: int, slices: Sequence[bytes | None]) -> bytes | None:
        """Make a whole block of the slices of all ranks."""
        target, block = self.whole[group], bytearray(self.whole[group].block_bytes)
        for rank, data in zip(self.own.ranks, slices):
            if data is None:
                return None
            copy(rank[group], data, target, block)
        return bytes(block)

    def write(self, blocks: Sequence[WholeBlock]) -> None:
        """Write blocks to the tiers of this worker: every rank its slice."""
        number = next(self._numbers)
        done = self._writes[number] = Future()
        self._answers.expect(BlocksWritten, number, self.n_ranks)
        self._await(WriteBlocks(number, list(blocks)), done)

    def _wait_for(self, order: Flush) -> dict[str, int]:
        flush = self._flushes[order.number] = Future()
        self._answers.expect(Flushed, order.number, self.n_ranks)
        try:
            flushed = self._await(order, flush, 2 * order.limit_s)
        finally:
            self._flushes.pop(order.number, None)
        if flushed.error:
            raise OSError(errno.EIO, flushed.error)
        return flushed.purged

    def _await(self, order: TierOrder, done: "Future[Answer]", limit_s: float = ANSWER_S) -> Answer:
        """Give an order, and wait for what is made of the answers of all ranks."""
        self.order(order)
        self.own.queue.wake()
        try:
            return done.result(limit_s)
        except TimeoutError:
            raise OSError(errno.ETIMEDOUT, "a rank does not answer") from None
