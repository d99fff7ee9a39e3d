"""The decode side of KV transfer: requests whose prompt another engine computes and writes into our blocks."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import groupby
from math import inf
from operator import itemgetter

from emberline.engine.core.sequence import Sequence
from emberline.kv.cache import BlockTable, KVCache
from emberline.kv.groups import counted_group
from emberline.kv.transfer import notices
from emberline.kv.transfer.group_transfers import GroupTransfers
from emberline.kv.transfer.messages import Item, Offer
from emberline.kv.transfer.notices import ReceiverNotice
from emberline.protocol.block_hash import BLOCK_TOKENS
from emberline.protocol.errors import BadInput, Unavailable

LEASE_S = 10.0  # without a block or a keep-alive, after which the sender is given up,
GRACE_S = 2.0  # plus this: it may have been this process that stalled, with received blocks unread
MAX_SILENCE_S = 300.0  # with keep-alives alone: an engine that is stuck may still send them
WAIT_S = 60.0  # for an offer, or for the request that claims an offer: no block is held meanwhile
MAX_UNCLAIMED = 1024  # offers, and transfers that one side gave up before the other came
GAVE_UP = "the decode engine gave up the request"

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class IncomingTransfer:
    """expected → offered → granted (blocks are reserved under an epoch) → complete; or given up at any moment."""

    seq: Sequence
    n_blocks: int
    progress_s: float  # time of the last sign of life
    received_s: float = 0.0  # when a block was last received, or the grant was made
    peer: int = 0  # the connection that offered it
    epoch: int = 0
    table: BlockTable | None = None  # from the grant on; its references keep received blocks until admission
    missing: set[Item] = field(default_factory=set)
    n_received: int = 0  # blocks of the prompt
    in_grace: bool = False  # its lease has expired, the grace period has not

    @property
    def transfer(self) -> str:
        return self.seq.request.awaits

    @property
    def timeout_s(self) -> float:
        """How long to wait for progress: without limit once offered, when only our own lack of room delays it."""
        if not self.peer:
            return WAIT_S
        return LEASE_S if self.epoch else inf


class IncomingTransfers:
    """Owns the block tables of transfers, their epochs, and the quarantine: blocks that a sender may still write.

    Results are passed to `ready` and `fail`, with the sequence; it is then no longer in transfer.
    """

    def __init__(
        self,
        cache: KVCache,
        receiver: GroupTransfers,
        fingerprint: str,
        ready: Callable[[Sequence], None],
        fail: Callable[[Sequence, str], None],
    ) -> None:
        self._cache = cache
        self._receiver = receiver
        self._fingerprint = fingerprint
        self._ready, self._fail = ready, fail
        layouts = [group.layout for group in cache.groups]
        self._tags = tuple(layout.tag for layout in layouts)
        self._block_bytes = tuple(layout.block_bytes for layout in layouts)
        self._counted_group = layouts.index(counted_group(layouts))  # whose blocks count as the prompt's
        self._by_transfer: dict[str, IncomingTransfer] = {}
        self._by_epoch: dict[int, IncomingTransfer] = {}
        self._complete: dict[int, IncomingTransfer] = {}  # by the sequence's number, until it is admitted
        self._offers: dict[str, tuple[notices.OfferReceived, float]] = {}  # unclaimed, and since when
        self._given_up: dict[str, tuple[str, float]] = {}  # by one side before the other came: why, since when
        self._quarantine: dict[int, tuple[int, list[Item]]] = {}  # by epoch: the sender, (group, block)
        self._n_epochs = 0
        self.n_received = 0  # blocks

    @property
    def busy(self) -> bool:
        return bool(self._by_transfer or self._offers or self._given_up)

    @property
    def wake_s(self) -> float:
        """When `expire` has something to do, unless a notice comes first."""
        limits = [each.progress_s + each.timeout_s for each in self._by_transfer.values()]
        limits += [since_s + WAIT_S for _, since_s in (*self._offers.values(), *self._given_up.values())]
        return min(limits, default=inf)

    @property
    def n_awaiting(self) -> int:
        return len(self._by_transfer)

    @property
    def awaiting_tokens(self) -> int:
        return sum(each.n_blocks * BLOCK_TOKENS for each in self._by_transfer.values())

    @property
    def n_quarantined(self) -> int:
        return sum(len(blocks) for _, blocks in self._quarantine.values())

    def references(self) -> Counter[Item]:
        """References to our blocks that are held here, by (group, block): received, reserved or quarantined."""
        tables = [each.table for each in (*self._by_transfer.values(), *self._complete.values()) if each.table]
        held = Counter((g, b) for table in tables for g, group in enumerate(table.groups) for b in group.blocks)
        held.update(item for _, items in self._quarantine.values() for item in items)
        return held

    def check(self, transfer: str) -> None:
        if transfer in self._by_transfer:
            raise BadInput(f"transfer {transfer!r} is in use", param="awaits")

    def expect(self, seq: Sequence, now_s: float) -> None:
        """From now on the sequence is in transfer, until it is ready or leaves."""
        transfer = IncomingTransfer(seq, seq.n_transferable, now_s)
        self._by_transfer[transfer.transfer] = transfer
        if transfer.transfer in self._given_up:
            self._fail(seq, self._given_up.pop(transfer.transfer)[0])
            return
        notice, _ = self._offers.pop(transfer.transfer, (None, 0.0))
        if notice is not None:
            self._claim(transfer, notice, now_s)

    def leave(self, seq: Sequence) -> None:
        """The sequence has ended or is admitted: received blocks stay cached, others are quarantined."""
        transfer = self._complete.pop(seq.number, None)
        if transfer is None:
            transfer = self._by_transfer.get(seq.request.awaits)
            if transfer is None or transfer.seq is not seq:
                return
            del self._by_transfer[transfer.transfer]
        if transfer.epoch in self._by_epoch:
            del self._by_epoch[transfer.epoch]
            self._quarantine[transfer.epoch] = transfer.peer, self._withdraw(transfer)
            self._receiver.revoke(transfer.peer, transfer.epoch)
        elif transfer.table is None and transfer.peer:
            self._receiver.deny(transfer.peer, transfer.transfer, GAVE_UP)
        elif transfer.table is None:
            self._remember(transfer.transfer, GAVE_UP, transfer.progress_s)
        if transfer.table is not None:
            self._cache.release(transfer.table)

    def give_back(self, seq: Sequence) -> bool:
        """Drop the references to the blocks of the last received sequence of a worse rank. Returns False if none."""
        behind = [each for each in self._complete.values() if each.seq.rank > seq.rank]
        if not behind:
            return False
        last = max(behind, key=lambda each: each.seq.rank)
        del self._complete[last.seq.number]
        if last.table is not None:
            self._cache.release(last.table)
        return True

    def n_received_blocks(self, seq: Sequence) -> int:
        transfer = self._complete.get(seq.number)
        return 0 if transfer is None else transfer.n_received

    def ungranted(self) -> list[Sequence]:
        """Offered sequences that wait for blocks, by rank."""
        if not self._by_transfer:
            return []
        found = [each.seq for each in self._by_transfer.values() if each.peer and not each.epoch]
        return sorted(found, key=lambda seq: seq.rank)

    def grant(self, seq: Sequence, reserved: list[int], now_s: float) -> bool:
        """Take the blocks that the sequence lacks and let the sender write them. False: no room."""
        transfer = self._by_transfer[seq.request.awaits]
        table = self._cache.reserve(seq.keys, transfer.n_blocks, reserved, seq.table.owner)
        if table is None:
            return False
        lacking = self._cache.lacking(table)
        self._n_epochs += 1
        transfer.epoch, transfer.table = self._n_epochs, table
        transfer.progress_s = transfer.received_s = now_s
        transfer.missing = {(g, j) for g, blocks in enumerate(lacking) for j in blocks}
        self._by_epoch[transfer.epoch] = transfer
        self._receiver.grant(transfer.peer, transfer.transfer, transfer.epoch, lacking)
        self._complete_if_received(transfer)
        return True

    # --- notices of the receiver threads ----------------------------------------------------------------------------

    def handle(self, notice: ReceiverNotice, now_s: float) -> None:
        if isinstance(notice, notices.BlocksReceived):
            self._on_blocks(notice, now_s)
        elif isinstance(notice, notices.LeaseRenewed):
            transfer = self._by_epoch.get(notice.epoch)
            if transfer is not None and now_s < transfer.received_s + MAX_SILENCE_S:
                transfer.progress_s, transfer.in_grace = now_s, False
        elif isinstance(notice, notices.OfferReceived):
            self._on_offer(notice, now_s)
        elif isinstance(notice, notices.EpochReleased):
            self._end_quarantine(notice.epoch)
        elif isinstance(notice, notices.SenderGaveUp):
            self._on_sender_gave_up(notice, now_s)
        else:
            self._on_sender_lost(notice)

    def expire(self, now_s: float) -> None:
        self._given_up = {t: each for t, each in self._given_up.items() if now_s < each[1] + WAIT_S}
        for name, (notice, since_s) in list(self._offers.items()):
            if now_s >= since_s + WAIT_S:
                del self._offers[name]
                self._receiver.deny(notice.peer, name, f"no request awaits transfer {name!r}")
        for transfer in self._by_transfer.values():
            if now_s < transfer.progress_s + transfer.timeout_s:
                continue
            if not transfer.in_grace:
                transfer.in_grace, transfer.progress_s = True, now_s - transfer.timeout_s + GRACE_S
            else:
                what = "no KV was received" if transfer.epoch else "no prefill engine offered KV"
                self._fail(transfer.seq, f"{what} within {transfer.timeout_s:g} s")

    def _on_offer(self, notice: notices.OfferReceived, now_s: float) -> None:
        name = notice.offer.transfer
        transfer = self._by_transfer.get(name)
        if name in self._given_up:
            self._receiver.deny(notice.peer, name, self._given_up.pop(name)[0])
        elif transfer is not None and not transfer.peer:
            self._claim(transfer, notice, now_s)
        elif transfer is not None or name in self._offers:
            self._receiver.deny(notice.peer, name, f"transfer {name!r} is offered twice")
        elif len(self._offers) >= MAX_UNCLAIMED:
            self._receiver.deny(notice.peer, name, "too many offers wait for their requests")
        else:
            self._offers[name] = notice, now_s

    def _claim(self, transfer: IncomingTransfer, notice: notices.OfferReceived, now_s: float) -> None:
        """The request and its offer are both here: accept the offer if it matches."""
        mismatch = self._mismatch(transfer, notice.offer)
        if mismatch:
            _log.warning("a KV offer does not match: %s", mismatch, extra={"request_id": transfer.seq.id})
            self._receiver.deny(notice.peer, transfer.transfer, mismatch)
            self._fail(transfer.seq, mismatch)
        else:
            transfer.peer, transfer.progress_s, transfer.in_grace = notice.peer, now_s, False

    def _mismatch(self, transfer: IncomingTransfer, offer: Offer) -> str:
        if offer.fingerprint != self._fingerprint:
            return "the prefill engine has other weights"
        if (offer.tags, offer.block_bytes) != (self._tags, self._block_bytes):
            theirs, ours = zip(offer.tags, offer.block_bytes), zip(self._tags, self._block_bytes)
            return f"the prefill engine has another KV layout: {_described(theirs)}, here {_described(ours)}"
        if offer.n_blocks != transfer.n_blocks:
            return f"the prefill engine offers {offer.n_blocks} blocks, the prompt has {transfer.n_blocks}"
        transfer.seq.extend_keys(transfer.n_blocks)
        if offer.key != transfer.seq.keys[transfer.n_blocks - 1]:
            return "the prefill engine offers the KV of another prompt"
        return ""

    def _on_blocks(self, notice: notices.BlocksReceived, now_s: float) -> None:
        transfer = self._by_epoch.get(notice.epoch)
        if transfer is None or transfer.table is None:
            return  # revoked meanwhile
        transfer.missing.difference_update(notice.items)
        for group, items in groupby(sorted(notice.items), key=itemgetter(0)):
            self._cache.publish_received(transfer.table, transfer.seq.keys, group, [j for _, j in items])
        self.n_received += len(notice.items)
        transfer.n_received += sum(group == self._counted_group for group, _ in notice.items)
        transfer.progress_s = transfer.received_s = now_s
        transfer.in_grace = False
        self._complete_if_received(transfer)

    def _complete_if_received(self, transfer: IncomingTransfer) -> None:
        if not transfer.missing:
            del self._by_epoch[transfer.epoch], self._by_transfer[transfer.transfer]
            self._complete[transfer.seq.number] = transfer
            self._ready(transfer.seq)

    def _on_sender_gave_up(self, notice: notices.SenderGaveUp, now_s: float) -> None:
        """The sender gave up and writes no more: blocks of an epoch that the receiver has ended need no quarantine."""
        self._end_quarantine(notice.epoch)
        why = f"the prefill engine gave up: {notice.message}"
        transfer = self._by_transfer.get(notice.transfer)
        if transfer is not None:
            if transfer.peer in (0, notice.peer) and transfer.epoch == notice.epoch:
                self._stop(transfer, why)
            elif transfer.peer == notice.peer:  # the grant crossed the message: `leave` revokes it
                self._fail(transfer.seq, why)
            return
        unclaimed = self._offers.get(notice.transfer)
        if unclaimed is not None and unclaimed[0].peer == notice.peer:
            del self._offers[notice.transfer]
        if not notice.epoch:
            self._remember(notice.transfer, why, now_s)

    def _remember(self, name: str, why: str, now_s: float) -> None:
        """Remember why one side gave up: the other side's request or offer may still arrive, and then fails."""
        if len(self._given_up) < MAX_UNCLAIMED:
            self._given_up[name] = why, now_s

    def _on_sender_lost(self, notice: notices.SenderLost) -> None:
        for epoch in [epoch for epoch, (peer, _) in self._quarantine.items() if peer == notice.peer]:
            self._end_quarantine(epoch)
        for name in [t for t, (offered, _) in self._offers.items() if offered.peer == notice.peer]:
            del self._offers[name]
        for transfer in [each for each in self._by_transfer.values() if each.peer == notice.peer]:
            self._stop(transfer, f"the prefill engine was lost: {notice.message}")

    def _stop(self, transfer: IncomingTransfer, why: str) -> None:
        """End a transfer without quarantine: its sender writes no more. `leave` gives the received blocks back."""
        self._by_epoch.pop(transfer.epoch, None)
        for group, block in self._withdraw(transfer):
            self._cache.unpin(group, block)
        transfer.peer = 0
        self._fail(transfer.seq, why)

    # --- quarantine -------------------------------------------------------------------------------------------------

    def _withdraw(self, transfer: IncomingTransfer) -> list[Item]:
        """The blocks that may still be written, as (group, block): out of the table, and still referenced."""
        if transfer.table is None:
            return []
        blocks = [(g, self._cache.withdraw(transfer.table, g, j)) for g, j in sorted(transfer.missing)]
        transfer.missing.clear()
        return blocks

    def _end_quarantine(self, epoch: int) -> None:
        _, blocks = self._quarantine.pop(epoch, (0, []))
        for group, block in blocks:
            self._cache.unpin(group, block)


def _described(layouts: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{tag} of {n_bytes} bytes" for tag, n_bytes in layouts)


def transfer_failed(why: str) -> Unavailable:
    """The error of a failed transfer. This engine is healthy: the request may be retried, with another engine."""
    return Unavailable(why, param="transfer", retry_after_s=1)
