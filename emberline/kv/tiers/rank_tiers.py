"""Tiers behind several ranks: each keeps its own slices of blocks, and rank 0 decides for all.

A block is saved when every rank has copied its slice, and fetched when every rank has it: a slice that one rank has
lost is missing everywhere, and the block is computed again, and saved where it is missing. What rank 0's tiers hold
is taken for what all hold; followers only report.
"""

import errno
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from emberline.kv.retention import Conversation
from emberline.kv.tiers.host import HostTier
from emberline.kv.tiers.manager import FLUSH_S, TierManager
from emberline.kv.tiers.messages import BlocksCopied, BlocksFetched, Item, Notice, SavedBlock, WantedBlock
from emberline.kv.tiers.mover import BlockMover
from emberline.kv.tiers.rank_commands import (
    BlockSlice,
    CancelFetch,
    FetchCancelled,
    FetchSlices,
    PurgeTiers,
    RemoveKeys,
    RetireSession,
    SaveSlices,
    SlicesFetched,
    SlicesSaved,
    TierCommand,
    TierReport,
    TiersPurged,
    UseKeys,
)
from emberline.kv.tiers.tier import Tier, layout_tag
from emberline.protocol.block_hash import KVGroup


@dataclass(slots=True, eq=False)
class _Fetch:
    left: dict[Item, int] = field(default_factory=dict)  # how many ranks have not named the block yet
    lost: set[Item] = field(default_factory=set)  # some rank does not have it


@dataclass(slots=True, eq=False)
class _Ending:
    """A cancelled fetch whose blocks may still be written."""

    blocks: Sequence[Item]
    writing: set[Item]  # by this rank
    n_followers: int  # that have not answered


@dataclass(slots=True, eq=False)
class _Purge:
    n_followers: int
    errors: list[str] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)


class RankTiers(TierManager):
    """Rank 0's `messages.TierPort`: the tiers of all ranks as one."""

    def __init__(
        self, layouts: Sequence[KVGroup], mover: BlockMover, host: HostTier, tiers: Sequence[Tier], host_rate: float
    ) -> None:
        super().__init__(layouts, mover, host, tiers, host_rate)
        self._tell: Callable[[TierCommand], None] = lambda command: None
        self._numbers = count(1)  # of saves and purges, which other threads begin
        self._by_save: dict[int, tuple[Sequence[SavedBlock], list[int]]] = {}  # the blocks, and ranks left
        self._own_saves: dict[int, int] = {}  # numbers, by the identity of the blocks
        self._by_fetch: dict[int, _Fetch] = {}
        self._ending: dict[int, _Ending] = {}
        self._purges: dict[int, _Purge] = {}
        self._merged: list[Notice] = []

    def form(self, n_ranks: int, tell: Callable[[TierCommand], None]) -> None:
        """`tell` says something to all followers, in order with the steps."""
        self.n_ranks, self._tell = n_ranks, tell

    def report(self, reports: Iterable[TierReport]) -> None:
        """Of one follower, from any thread."""
        queue: Any = self._notices
        for report in reports:
            if isinstance(report, TiersPurged):
                self._purged(report)
            else:
                queue.put(report)

    def notices(self) -> list[Notice]:
        taken: list[Any] = super().notices()
        for notice in taken:
            if isinstance(notice, BlocksCopied):
                self._saved(self._own_saves.pop(id(notice.blocks)))
            elif isinstance(notice, SlicesSaved):
                self._saved(notice.number)
            elif isinstance(notice, BlocksFetched):
                self._fetched(notice.number, notice.fetched, notice.missing, own=True)
            elif isinstance(notice, SlicesFetched):
                self._fetched(notice.number, notice.fetched, notice.missing, own=False)
            elif isinstance(notice, FetchCancelled):
                if (ending := self._ending.get(notice.number)) is not None:
                    ending.n_followers -= 1
                    self._end(notice.number, ending)
            else:
                self._merged.append(notice)
        merged, self._merged = self._merged, []
        return merged

    # --- saving -----------------------------------------------------------------------------------------------------

    def save(self, blocks: Sequence[SavedBlock]) -> None:
        number = next(self._numbers)
        self._by_save[number] = blocks, [self.n_ranks]
        self._own_saves[id(blocks)] = number
        super().save(blocks)
        self._tell(SaveSlices(number, list(map(BlockSlice.of, blocks))))

    def _saved(self, number: int) -> None:
        blocks, left = self._by_save[number]
        left[0] -= 1
        if not left[0]:
            del self._by_save[number]
            self._merged.append(BlocksCopied(blocks))

    # --- fetching ---------------------------------------------------------------------------------------------------

    def fetch(self, number: int, blocks: Iterable[WantedBlock]) -> None:
        wanted = list(blocks)
        state = self._by_fetch.setdefault(number, _Fetch())
        state.left.update((block.item, self.n_ranks) for block in wanted)
        super().fetch(number, wanted)
        self._tell(FetchSlices(number, list(map(BlockSlice.of, wanted))))

    def _fetched(self, number: int, fetched: Sequence[Item], missing: Sequence[Item], own: bool) -> None:
        state = self._by_fetch.get(number)
        if state is None:
            if own and (ending := self._ending.get(number)) is not None:
                ending.writing.difference_update(fetched, missing)
                self._end(number, ending)
            return
        state.lost.update(missing)
        named = [*fetched, *missing]
        for item in named:
            state.left[item] -= 1
        done = [item for item in named if not state.left[item]]
        for item in done:
            del state.left[item]
        if done:
            found = [item for item in done if item not in state.lost]
            self._merged.append(BlocksFetched(number, found, [item for item in done if item in state.lost]))

    def cancel(self, number: int) -> Sequence[Item]:
        """What some rank has not named may be written by it until it has answered."""
        writing, state = set(super().cancel(number)), self._by_fetch.pop(number, None)
        if state is None:
            return tuple(writing)
        if state.left:
            self._ending[number] = _Ending(tuple(state.left), writing, self.n_ranks - 1)
        self._tell(CancelFetch(number))
        return tuple(state.left)

    def _end(self, number: int, ending: _Ending) -> None:
        if not ending.writing and ending.n_followers == 0:
            del self._ending[number]
            self._merged.append(BlocksFetched(number, (), ending.blocks))

    # --- what else every tier is told -------------------------------------------------------------------------------

    def used(self, keys: Sequence[bytes], conversation: Conversation | None) -> None:
        super().used(keys, conversation)
        self._tell(UseKeys(list(keys)))

    def retire(self, owner: bytes, session: bytes, first: int) -> None:
        super().retire(owner, session, first)
        self._tell(RetireSession(owner, session, first))

    def remove(self, keys: Sequence[bytes]) -> None:
        super().remove(keys)
        self._tell(RemoveKeys(list(keys)))

    def purge(self, owner: bytes | None, session: bytes | None) -> dict[str, int]:
        """Blocks count once, whatever the number of ranks."""
        number = next(self._numbers)
        purge = self._purges[number] = _Purge(self.n_ranks - 1)
        self._tell(PurgeTiers(number, owner, session))
        try:
            purged = super().purge(owner, session)
            if not purge.done.wait(2 * FLUSH_S):
                raise OSError(errno.ETIMEDOUT, "a rank does not answer")
        finally:
            del self._purges[number]
        if purge.errors:
            raise OSError(errno.EIO, f"another rank: {purge.errors[0]}")
        return purged

    def _purged(self, report: TiersPurged) -> None:
        if (purge := self._purges.get(report.number)) is not None:
            purge.errors += [report.error] if report.error else []
            purge.n_followers -= 1
            if not purge.n_followers:
                purge.done.set()


class FollowerTiers:
    """A follower's tiers: does what rank 0 says. For one thread at a time; `tiers` None: it has none, and says so."""

    def __init__(
        self, tiers: TierManager | None, layouts: Sequence[KVGroup], report: Callable[[list[TierReport]], None]
    ) -> None:
        self.tiers, self._report = tiers, report
        self._tags = [layout_tag(layout) for layout in layouts]
        self._saves: dict[int, tuple[int, Sequence[SavedBlock]]] = {}  # by the identity of the blocks
        self._writing: dict[int, set[Item]] = {}  # by cancelled fetch

    def execute(self, command: TierCommand) -> None:
        tiers = self.tiers
        if isinstance(command, SaveSlices):
            if tiers is None:
                self._report([SlicesSaved(command.number)])
                return
            blocks = [block.saved(self._tags) for block in command.blocks]
            self._saves[id(blocks)] = command.number, blocks
            tiers.save(blocks)
        elif isinstance(command, FetchSlices):
            if tiers is None:
                missing = [(block.group, block.index) for block in command.blocks]
                self._report([SlicesFetched(command.number, [], missing)])
                return
            tiers.fetch(command.number, [block.wanted(self._tags) for block in command.blocks])
        elif isinstance(command, CancelFetch):
            writing = set(() if tiers is None else tiers.cancel(command.number))
            if writing:
                self._writing[command.number] = writing
            else:
                self._report([FetchCancelled(command.number)])
        elif isinstance(command, PurgeTiers):
            threading.Thread(target=self._purge, args=(command,), name="kv-purge", daemon=True).start()
        elif tiers is not None:
            if isinstance(command, UseKeys):
                tiers.used(command.keys, None)
            elif isinstance(command, RetireSession):
                tiers.retire(command.owner, command.session, command.first)
            else:
                tiers.remove(command.keys)

    def reports(self) -> list[TierReport]:
        """What has happened since the last call."""
        made: list[TierReport] = []
        for notice in () if self.tiers is None else self.tiers.notices():
            if isinstance(notice, BlocksCopied):
                made.append(SlicesSaved(self._saves.pop(id(notice.blocks))[0]))
            elif isinstance(notice, BlocksFetched):
                if (writing := self._writing.get(notice.number)) is None:
                    made.append(SlicesFetched(notice.number, list(notice.fetched), list(notice.missing)))
                    continue
                writing.difference_update(notice.fetched, notice.missing)
                if not writing:
                    del self._writing[notice.number]
                    made.append(FetchCancelled(notice.number))
        return made

    def _purge(self, command: PurgeTiers) -> None:
        error = ""
        try:
            if self.tiers is not None:
                self.tiers.purge(command.owner, command.session)
        except OSError as failure:
            error = str(failure)
        self._report([TiersPurged(command.number, error)])
