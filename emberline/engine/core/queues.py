"""Running and waiting sequences by rank, the slots they run in, and which of them gives way to which."""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from math import inf
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from emberline.engine.core.limits import WorkLimits
from emberline.engine.core.rows import Cell, Places, Rows
from emberline.engine.core.sequence import NO_SLOT, Flag, Sequence
from emberline.kv.cache import KVCache
from emberline.protocol.request import Priority

# An interactive request may arrive and wait for the end of a step. So batch-class sequences lengthen a step by so much,
# until there was no interactive request for QUIET_S:
BATCH_PREFILL_S = 0.02  # with their prompts
BATCH_DECODE_S = 0.025  # with their replies, together with those of others: they take turns
QUIET_S = 5.0
MAX_ADMISSIONS = 1 << 31  # before their numbers begin again: columns of plans have 32 bits for them

_BATCH = Priority.BATCH  # a lookup in an Enum takes longer than what is asked of it in every step
by_rank = attrgetter("rank")


class Selection:
    """Some of the running sequences, by slot: code for all of them reads `rows`, and touches no sequence."""

    __slots__ = ("_by_slot", "flags", "rows", "slots")

    def __init__(self, rows: Rows, slots: Places, by_slot: dict[int, Sequence], flags: int) -> None:
        """flags: those that none of them has are not set."""
        self.rows, self.slots, self._by_slot, self.flags = rows, slots, by_slot, flags

    def __len__(self) -> int:
        return len(self.slots)

    def __getitem__(self, place: int) -> Sequence:
        return self._by_slot[int(self.slots[place])]

    def __iter__(self) -> Iterator[Sequence]:
        return map(self._by_slot.__getitem__, self.slots.tolist())

    def cells(self, row: int) -> NDArray[np.int64]:
        """A row of `Rows.cells`, for these sequences."""
        return self.rows.by_slot[row][self.slots]

    def where(self, wanted: NDArray[np.bool_]) -> "Selection":
        """Select the sequences whose places are True."""
        return Selection(self.rows, self.slots[wanted], self._by_slot, self.flags)


class Queues:
    """Running and waiting sequences, and the slots of the running ones."""

    def __init__(self, n_slots: int, cache: KVCache) -> None:
        self.rows = Rows(n_slots, len(cache.groups))
        self.by_slot: dict[int, Sequence] = {}  # running sequences
        self.request_ids = [""] * n_slots  # of their requests, by slot
        self.stop_ids: Counter[int] = Counter()  # stop tokens of the running sequences, and how many have each
        self.running: list[Sequence] = []  # by rank
        self.waiting: list[Sequence] = []  # by rank; not all are `admissible` yet
        self.waiting_tokens = 0  # of the waiting sequences, without those whose KV was received
        self.free_slots = list(reversed(range(n_slots)))
        self._cache = cache
        self.n_admitted = 0  # so far, modulo MAX_ADMISSIONS
        self._order: Places | None = None

    def admissible(self) -> Iterator[Sequence]:
        """Waiting sequences that nothing holds back, by rank."""
        return (seq for seq in self.waiting if not seq.holds)

    def enqueue(self, seq: Sequence, step: int) -> None:
        insort(self.waiting, seq, key=by_rank)
        seq.queued_step = step
        self.waiting_tokens += seq.n_tokens - seq.n_received

    def dequeue(self, seq: Sequence) -> None:
        self.waiting.remove(seq)
        self.waiting_tokens -= seq.n_tokens - seq.n_received

    @property
    def order(self) -> Places:
        """Slots of the running sequences by rank."""
        if self._order is None:
            self._order = np.array([seq.slot for seq in self.running], np.intp)
        return self._order

    @property
    def prefill_tokens(self) -> int:
        """Tokens that running sequences have to compute before their next ones are sampled."""
        return self.rows.n_prefill(Flag.PREFILL_ONLY)

    def select(self, slots: Places, flags: int = -1) -> Selection:
        """The running sequences of some slots. flags: those that none of them has are not set."""
        return Selection(self.rows, slots, self.by_slot, flags)

    def run(self, seq: Sequence, n_computed: int) -> None:
        """Give a sequence a slot; its table has the KV of n_computed tokens."""
        insort(self.running, seq, key=by_rank)
        slot = seq.slot = self.free_slots.pop()
        self.by_slot[slot], self.request_ids[slot], self._order = seq, seq.request.id, None
        cells = self.rows.cells[:, slot]
        cells[[Cell.NUMBER, Cell.ADMISSION, Cell.SLOT]] = seq.number, self.n_admitted, slot
        cells[[Cell.N_COMPUTED, Cell.LAST]] = n_computed, int.from_bytes(seq.ids[-4:], "little")
        cells[[Cell.N_KNOWN, Cell.N_KEPT]] = len(seq.kept_ids) >> 2
        cells[[Cell.MOST, Cell.FLAGS, Cell.PLANNED]] = seq.most_tokens, seq.flags, seq.last_planned
        self.rows.flags |= seq.flags
        self.stop_ids.update(seq.stop_ids)
        self.n_admitted = (self.n_admitted + 1) % MAX_ADMISSIONS
        self.grown(seq)

    def grown(self, seq: Sequence) -> None:
        """Take note of a change of a running sequence's block table."""
        self.rows.views[Cell.ROOM][seq.slot] = self._cache.room(seq.table)
        if self._cache.windowed:
            self.rows.cells[Cell.PASSED :, seq.slot] = [held.n_passed for held in seq.table.groups]

    def vacate(self, seq: Sequence) -> None:
        """Take a sequence's slot back; what steps in flight sample for it is ignored."""
        self.running.remove(seq)
        self.free_slots.append(seq.slot)
        del self.by_slot[seq.slot]
        self._order = None
        for token_id in seq.stop_ids:
            if self.stop_ids[token_id] == 1:
                del self.stop_ids[token_id]
            else:
                self.stop_ids[token_id] -= 1
        seq.last_planned = seq.planned_step
        seq.kept_ids += self.rows.take_recent(seq.slot)
        self.rows.clear(seq.slot)
        seq.slot = NO_SLOT


class PreemptionPolicy:
    """The sequence of the last rank gives way. So the first in rank always advances, and every sequence ends."""

    def victim(self, running: list[Sequence], step: int) -> Sequence:
        """The sequence whose blocks to take when one of this step cannot grow; it may be that one itself."""
        return next(seq for seq in reversed(running) if seq.planned_step != step)

    def displaced(self, queues: Queues) -> tuple[Sequence, Sequence] | None:
        """A waiting sequence of a better class, and the running one whose place it may take."""
        last = queues.running[-1] if queues.running else None
        first = next(queues.admissible(), None)
        if last is None or first is None or first.effective_class >= last.effective_class:
            return None
        return first, last


class BatchYielding:
    """Sequences of the batch class yield to the others: in turns, in time, and without starving."""

    def __init__(self, limits: WorkLimits) -> None:
        self._limits = limits
        self._now_s = 0.0
        self._interactive_s = -QUIET_S  # when there was last a request of another class
        self._n_paused = 0  # consecutive steps that batch-class sequences have yielded
        self._promoted: Sequence | None = None

    def advance(self, queues: Queues, now_s: float) -> None:
        """Before a plan."""
        self._now_s = now_s
        running, waiting = queues.running, queues.waiting
        if self._promoted is None:  # the best classes come first
            some = running and running[0].effective_class != _BATCH
            some = some or (waiting and waiting[0].effective_class != _BATCH)
        else:
            some = len(running) - n_batch(running) + len(waiting) - n_batch(waiting) > 1
        if some:
            self._interactive_s = now_s

    def ended(self, seq: Sequence) -> None:
        if seq is self._promoted:
            self._promoted = None

    @property
    def is_limited(self) -> bool:
        """True if an interactive request is here, or may be soon."""
        return self._now_s - self._interactive_s < QUIET_S

    def prefill_limit_s(self, seq: Sequence) -> float:
        """Return the longest time for a step's prompts with which this sequence's chunk may join them."""
        return BATCH_PREFILL_S if self.is_limited and seq.effective_class == Priority.BATCH else inf

    def resting(self, queues: Queues, most: float) -> set[int]:
        """Numbers of the batch-class sequences that have no row in this step, so that no more than `most` sequences
        decode, one of the batch class at least: those whose last row is the most recent."""
        running = queues.running
        n_others = len(running) - n_batch(running)
        decoding = [seq for seq in running[n_others:] if seq.n_due == 1]
        if len(decoding) <= max(1, most - n_others):
            return set()
        decoding.sort(key=attrgetter("planned_step"))
        return {seq.number for seq in decoding[max(1, int(most) - n_others) :]}

    def promote(self, queues: Queues, step: int) -> None:
        """Rank a starved sequence with the default class; one at a time."""
        waiting = queues.waiting
        if not waiting or waiting[-1].effective_class != Priority.BATCH:
            return
        first = waiting[-n_batch(waiting)]
        if step - first.queued_step >= self._limits.starved_steps and self._promoted is None:
            self._promoted = first
            waiting.remove(first)
            first.effective_class = Priority.DEFAULT
            insort(waiting, first, key=by_rank)

    def pauses(self, queues: Queues) -> bool:
        """True if batch-class sequences have no row in this step, because a better class has prompts to compute."""
        running = queues.running
        if not running or running[-1].effective_class != _BATCH:
            self._n_paused = 0
            return False
        prompts = any(seq.n_due > 1 for seq in running if seq.effective_class != Priority.BATCH)
        first = None if prompts else next(queues.admissible(), None)
        urgent = prompts or (first is not None and first.effective_class != Priority.BATCH)
        may_pause = urgent and self._n_paused < self._limits.paused_steps
        self._n_paused = self._n_paused + 1 if may_pause else 0
        return self._n_paused > 0


def n_batch(by_rank_order: list[Sequence]) -> int:
    """Number of sequences of the batch class, which comes last."""
    if not by_rank_order or by_rank_order[-1].effective_class != _BATCH:
        return 0
    return len(by_rank_order) - bisect_left(by_rank_order, (Priority.BATCH, -1), key=by_rank)
