"""Requests whose prompt is computed here and pushed to the engine that will answer them."""

from dataclasses import dataclass, field

from emberline.engine.scheduler.sequence import Sequence
from emberline.kv.cache import KVCache
from emberline.kv.transfer.messages import Item
from emberline.kv.transfer.notices import Delivered, Granted, Rejected, Sent, Transfers

PATIENCE_S = 60.0  # for a grant, or for the last block to be acknowledged: no slot is held meanwhile


@dataclass(slots=True, eq=False)
class OutgoingTransfer:
    seq: Sequence
    moved_s: float
    offered: bool = False
    wanted: list[set[int]] | None = None  # per group: what the other side lacks, once it has said so
    n_handed: int = 0  # leading blocks that were handed to the sender, as far as they are wanted
    pins: dict[Item, int] = field(default_factory=dict)  # our blocks that are still being read
    told: bool = False  # the client knows what was cached


class OutgoingTransfers:
    """Owns the references that keep blocks in place while they are read."""

    def __init__(self, cache: KVCache, transfers: Transfers) -> None:
        self._cache = cache
        self._transfers = transfers
        self._open: dict[int, OutgoingTransfer] = {}  # by the sequence's number
        self._ended: dict[int, OutgoingTransfer] = {}  # their sequences are gone, their blocks still read
        self.n_pushed = 0  # blocks

    @property
    def n_open(self) -> int:
        return len(self._open)

    @property
    def busy(self) -> bool:
        return bool(self._open or self._ended)

    @property
    def next_s(self) -> float:
        return min((each.moved_s + PATIENCE_S for each in self._open.values() if each.offered), default=float("inf"))

    def begin(self, seq: Sequence, now_s: float) -> None:
        self._open[seq.number] = OutgoingTransfer(seq, now_s)

    def offer(self, seq: Sequence) -> None:
        """It is being computed now: the other side may reserve room for it. The second time is nothing."""
        push = seq.request.push
        pushing = self._open[seq.number]
        assert push is not None
        if not pushing.offered:
            pushing.offered = True
            self._transfers.offer(seq.number, push, seq.n_pushable)

    def hand_over(self, seq: Sequence, n_blocks: int) -> bool:
        """The first n_blocks of the sequence's table are computed. True: all of the prompt is on its way."""
        pushing = self._open[seq.number]
        if pushing.wanted is None:
            return False
        items: list[tuple[Item, int]] = []
        for j in range(pushing.n_handed, n_blocks):
            for g, (held, wanted) in enumerate(zip(seq.table.groups, pushing.wanted)):
                if j in wanted:
                    self._cache.pin(g, held.blocks[j])
                    pushing.pins[g, j] = held.blocks[j]
                    items.append(((g, j), held.blocks[j]))
        pushing.n_handed = max(pushing.n_handed, n_blocks)
        if items:
            self._transfers.send(seq.number, items)
        return pushing.n_handed == seq.n_pushable

    def first_news(self, seq: Sequence) -> bool:
        """Once: whether the client is still to be told what was cached."""
        pushing = self._open[seq.number]
        told, pushing.told = pushing.told, True
        return not told

    def leave(self, seq: Sequence, why: str) -> None:
        """The sequence has ended; `why` is for the other side, if it still waits."""
        if seq.number not in self._open:
            return
        if seq.n_pushable:
            self.offer(seq)  # who awaits it is told, even if it never began
            self._transfers.cancel(seq.number, why)
        pushing = self._open.pop(seq.number)
        if pushing.pins:
            self._ended[seq.number] = pushing

    def hear(self, notice: Granted | Sent | Delivered | Rejected, now_s: float) -> Sequence | None:
        """The sequence that the notice concerns, if it is still here."""
        pushing = self._open.get(notice.number) or self._ended.get(notice.number)
        if pushing is None:
            return None
        pushing.moved_s = now_s
        if isinstance(notice, Sent):
            for group, j in notice.items:
                self._cache.unpin(group, pushing.pins.pop((group, j)))
            if not pushing.pins:
                self._ended.pop(notice.number, None)
        elif isinstance(notice, Granted):
            pushing.wanted = notice.wanted
        elif isinstance(notice, Delivered):
            self.n_pushed += sum(map(len, pushing.wanted or ()))
        return pushing.seq if notice.number in self._open else None

    def expire(self, now_s: float) -> list[Sequence]:
        if now_s < self.next_s:
            return []
        return [each.seq for each in self._open.values() if each.offered and now_s >= each.moved_s + PATIENCE_S]
