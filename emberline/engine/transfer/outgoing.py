"""The prefill side of KV transfer: requests whose prompt is computed here and sent to a decode engine."""

from collections import Counter
from dataclasses import dataclass, field
from math import inf

from emberline.engine.core.sequence import Sequence
from emberline.kv.cache import KVCache
from emberline.kv.transfer.group_transfers import GroupTransfers
from emberline.kv.transfer.messages import Item
from emberline.kv.transfer.notices import BlocksReleased, OfferGranted, SendAcked, SenderNotice

TIMEOUT_S = 60.0  # for a grant, or for the ack of the last block: no slot is held meanwhile


@dataclass(slots=True, eq=False)
class OutgoingTransfer:
    seq: Sequence
    progress_s: float  # time of the last notice
    offered: bool = False
    wanted: list[set[int]] | None = None  # per group: the blocks that the receiver lacks, once granted
    n_sent: int = 0  # leading blocks that were handed to the sender, as far as they are wanted
    pins: dict[Item, int] = field(default_factory=dict)  # our blocks that the sender still reads
    reported: bool = False  # the client knows what was cached


class OutgoingTransfers:
    """Owns the references that keep blocks in place while the sender reads them."""

    def __init__(self, cache: KVCache, sender: GroupTransfers) -> None:
        self._cache = cache
        self._sender = sender
        self._open: dict[int, OutgoingTransfer] = {}  # by the sequence's number
        self._ended: dict[int, OutgoingTransfer] = {}  # the sequence has ended, its blocks are still read
        self.n_acked = 0  # blocks

    @property
    def n_open(self) -> int:
        return len(self._open)

    @property
    def busy(self) -> bool:
        return bool(self._open or self._ended)

    @property
    def wake_s(self) -> float:
        return min((each.progress_s + TIMEOUT_S for each in self._open.values() if each.offered), default=inf)

    def references(self) -> Counter[Item]:
        """References to our blocks that senders still read, by (group, block)."""
        pins = [each.pins.items() for each in (*self._open.values(), *self._ended.values())]
        return Counter((group, block) for items in pins for (group, _), block in items)

    def begin(self, seq: Sequence, now_s: float) -> None:
        self._open[seq.number] = OutgoingTransfer(seq, now_s)

    def offer(self, seq: Sequence) -> None:
        """Offer the blocks of a sequence whose prefill begins, so that the receiver may reserve some. Idempotent."""
        push = seq.request.push
        transfer = self._open[seq.number]
        assert push is not None
        if not transfer.offered:
            transfer.offered = True
            seq.extend_keys(seq.n_transferable)
            self._sender.offer(seq.number, push, seq.n_transferable, seq.keys[seq.n_transferable - 1])

    def send(self, seq: Sequence, n_blocks: int) -> None:
        """The first n_blocks of the sequence's table are computed: send those that are wanted and were not sent yet."""
        transfer = self._open[seq.number]
        if transfer.wanted is None:
            return
        items: list[tuple[Item, int]] = []
        for j in range(transfer.n_sent, n_blocks):
            for g, (held, wanted) in enumerate(zip(seq.table.groups, transfer.wanted)):
                if j in wanted:
                    self._cache.pin(g, held.blocks[j])
                    transfer.pins[g, j] = held.blocks[j]
                    items.append(((g, j), held.blocks[j]))
        transfer.n_sent = max(transfer.n_sent, n_blocks)
        if items:
            self._sender.send(seq.number, items)

    def is_first_report(self, seq: Sequence) -> bool:
        """True once: the client does not know yet what was cached."""
        transfer = self._open[seq.number]
        reported, transfer.reported = transfer.reported, True
        return not reported

    def leave(self, seq: Sequence, why: str) -> None:
        """The sequence has ended; `why` is for the receiver, if it still waits."""
        if seq.number not in self._open:
            return
        if seq.n_transferable:
            self.offer(seq)  # the receiver learns of the end even if the prefill never began
            self._sender.cancel(seq.number, why)
        transfer = self._open.pop(seq.number)
        if transfer.pins:
            self._ended[seq.number] = transfer

    def handle(self, notice: SenderNotice, now_s: float) -> Sequence | None:
        """The sequence that the notice concerns, if it has not ended."""
        transfer = self._open.get(notice.number) or self._ended.get(notice.number)
        if transfer is None:
            return None
        transfer.progress_s = now_s
        if isinstance(notice, BlocksReleased):
            for group, j in notice.items:
                self._cache.unpin(group, transfer.pins.pop((group, j)))
            if not transfer.pins:
                self._ended.pop(notice.number, None)
        elif isinstance(notice, OfferGranted):
            transfer.wanted = notice.wanted
        elif isinstance(notice, SendAcked):
            self.n_acked += sum(map(len, transfer.wanted or ()))
        return transfer.seq if notice.number in self._open else None

    def expired(self, now_s: float) -> list[Sequence]:
        return [each.seq for each in self._open.values() if each.offered and now_s >= each.progress_s + TIMEOUT_S]
