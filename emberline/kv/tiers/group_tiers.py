"""The tiers of all ranks as one, as rank 0's step loop sees them. An engine with one rank is a group of one.

A block is saved when every rank has copied its slice, and fetched when every rank has it: a slice that one rank has
lost is missing everywhere, and the block is computed again, and saved where it is missing. What rank 0's tiers hold is
taken for what all hold, so followers evict what rank 0 evicts.
"""

import errno
from collections.abc import Iterable, Sequence
from itertools import count
from threading import Event
from typing import Any

from emberline.kv.slices import copy
from emberline.kv.tally import GroupPort, Tally
from emberline.kv.tiers.manager import FLUSH_S, TierManager
from emberline.kv.tiers.messages import BlocksFetched, Item, LookedUp, Saved, SavedBlock, WantedBlock
from emberline.kv.tiers.orders import (
    CancelFetch,
    Fetch,
    FetchCancelled,
    Flush,
    GroupKey,
    Purge,
    ReadBlocks,
    Remove,
    Save,
    TierOrder,
    TierReport,
    WholeBlock,
    WriteBlocks,
)

ANSWER_S = 60.0  # for every rank to read or write a batch of blocks
Asked = ReadBlocks | WriteBlocks | Flush


class GroupTiers(GroupPort[TierOrder, TierReport]):
    """Gives orders to the tiers of every rank. `own`: those of this rank, which tell what all hold."""

    own: TierManager

    def __init__(self, own: TierManager) -> None:
        super().__init__(own)
        self.n_ranks = len(own.ranks)
        self._ended = Tally[tuple[type, int]]()  # what every rank reports once, with the number of its order
        self._fetches: dict[int, Tally[Item]] = {}
        self._cancelled: dict[int, Sequence[Item]] = {}  # blocks of fetches that some rank may still write
        self._numbers = count(1)  # of orders that other threads give
        self._asked: dict[int, tuple[dict[int, Any], Event]] = {}  # answers by rank; set: all have come
        if self.n_ranks > 1:
            own.record_evictions()

    def merge(self, rank: int, report: TierReport) -> None:
        """Take in the report of one rank."""
        number = report.number
        if isinstance(report, LookedUp):
            self.merged.append(report)
        elif isinstance(report, BlocksFetched):
            if (tally := self._fetches.get(number)) is not None:
                found, missing = tally.said(report.fetched, report.missing)
                if found or missing:
                    self.merged.append(BlocksFetched(number, found, missing, report.tier))
        elif isinstance(report, Saved | FetchCancelled):
            if self._ended.said([(type(report), number)])[0]:
                is_save = isinstance(report, Saved)
                self.merged.append(report if is_save else BlocksFetched(number, (), self._cancelled.pop(number)))
        elif (asked := self._asked.get(number)) is not None:
            answers, all_have_answered = asked
            answers[rank] = report
            if len(answers) == self.n_ranks:
                all_have_answered.set()

    def save(self, number: int, blocks: list[SavedBlock]) -> None:
        """Save blocks, which are referenced until `Saved` has their number."""
        self._ended.expect([(Saved, number)], self.n_ranks)
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
            self._ended.expect([(FetchCancelled, number)], self.n_ranks)
        self.order(CancelFetch(number))
        return left

    def remove(self, keys: Sequence[bytes]) -> None:
        """Forget blocks, whose content is invalid."""
        self.order(Remove(list(keys)))

    # --- what other threads wait for, while the step loop runs ------------------------------------------------------

    def flush(self, limit_s: float = FLUSH_S) -> bool:
        """Wait until what was saved by now, on every rank, is where it belongs. Returns False if it took longer."""
        try:
            self._flush(Flush(next(self._numbers), limit_s))
        except OSError:
            return False
        return True

    def purge(self, owner: bytes | None, session: bytes | None) -> dict[str, int]:
        """Forget blocks on every rank: of an owner, of one of its sessions, or all. Returns their number by tier, in
        which a block counts once: ranks have slices of the same blocks. Raises OSError if something may be left."""
        purged: dict[str, int] = {}
        for answer in self._flush(Purge(next(self._numbers), FLUSH_S, owner, session)):
            purged |= {tier: max(n, purged.get(tier, 0)) for tier, n in answer.purged.items()}
        return purged

    def read(self, blocks: Sequence[GroupKey]) -> list[bytes | None]:
        """Read whole blocks, to which every rank contributes its slice. None: some rank does not have its slice."""
        answers = self._ask(ReadBlocks(next(self._numbers), list(blocks)))
        return [self._joined(group, [each.slices[n] for each in answers]) for n, (group, _) in enumerate(blocks)]

    def write(self, blocks: Sequence[WholeBlock]) -> None:
        """Write blocks to the tiers of this worker: every rank its slice."""
        self._ask(WriteBlocks(next(self._numbers), list(blocks)))

    def _joined(self, group: int, slices: Sequence[bytes | None]) -> bytes | None:
        """Make a whole block of the slices of all ranks."""
        target, block = self.own.whole[group], bytearray(self.own.whole[group].block_bytes)
        for rank, data in zip(self.own.ranks, slices):
            if data is None:
                return None
            copy(rank[group], data, target, block)
        return bytes(block)

    def _flush(self, order: Flush) -> list[Any]:
        answers = self._ask(order, 2 * order.limit_s)
        for answer in answers:
            if answer.error:
                raise OSError(errno.EIO, answer.error)
        return answers

    def _ask(self, order: Asked, limit_s: float = ANSWER_S) -> list[Any]:
        """Give an order. Returns the answers of all ranks, in their order. Raises OSError if some rank has not answered
        in time."""
        answers, all_have_answered = self._asked[order.number] = {}, Event()
        try:
            self.order(order)
            self.own.queue.wake()
            if not all_have_answered.wait(limit_s):
                raise OSError(errno.ETIMEDOUT, "a rank does not answer")
        finally:
            del self._asked[order.number]
        return [answers[rank] for rank in range(self.n_ranks)]
