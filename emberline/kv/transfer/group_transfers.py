"""The KV transfers of all ranks as one, as rank 0's step loop sees them. An engine with one rank is a group of one.

Every rank sends its slice of each block directly to the ranks that need it; each such pair is a part of the transfer
(`orders.py`). Rank 0 orders what is offered, sent, granted and revoked, and ranks report what happens. To the step loop
a transfer is granted, received or acknowledged when all its parts are, and lost when one is; blocks are given back once
no peer reads or writes them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from emberline.kv.slices import SliceMismatch, Slices, routes
from emberline.kv.tally import GroupPort, Tally
from emberline.kv.transfer.manager import TransferManager
from emberline.kv.transfer.messages import Denied, Grant, Item, Offer, Revoke
from emberline.kv.transfer.notices import (
    BlocksReceived,
    BlocksReleased,
    EpochReleased,
    LeaseRenewed,
    Notice,
    OfferGranted,
    OfferReceived,
    SendAcked,
    SenderGaveUp,
    SenderLost,
    SenderNotice,
    SendRejected,
)
from emberline.kv.transfer.orders import CancelParts, OfferParts, Peers, SendParts, TellSenders, TransferOrder, parts
from emberline.protocol.parallel_layout import MAX_RANKS
from emberline.protocol.request import Push

MAX_PARTIAL = 1024  # incoming transfers of which some part is not offered yet

Peer = tuple[int, int]  # our rank, and the number of a connection there


@dataclass(slots=True, eq=False)
class _Outgoing:
    push: Push
    n_parts: int
    awaited: Tally[type] = field(default_factory=Tally)  # notices that each part gives once
    ended: bool = False  # the step loop knows
    readers: Tally[Item] = field(default_factory=Tally)  # blocks that some part still reads


@dataclass(slots=True, eq=False)
class _Incoming:
    number: int  # of the peer, as the step loop knows it: below 0, one for each transfer
    offer: Offer  # of all parts, as if it were of whole blocks
    parts: dict[tuple[int, int], Peer | None]  # by the ranks of both sides: who offers the part, once it is offered
    epoch: int = 0  # from the grant on
    stopped: set[Peer] = field(default_factory=set)  # peers that write no more
    missing: Tally[Item] = field(default_factory=Tally)  # blocks of which some part was not received yet
    ending: Notice | None = None  # what the step loop is told once no peer writes any more

    @property
    def peers(self) -> set[Peer]:
        """Peers that may write, or that wait for a grant."""
        return {peer for peer in self.parts.values() if peer is not None} - self.stopped

    @property
    def is_offered(self) -> bool:
        """True if every part is offered, so that the step loop knows of the transfer."""
        return None not in self.parts.values()


class GroupTransfers(GroupPort[TransferOrder, Notice]):
    """Gives orders to the transfers of every rank, those of this one (`own`) among them."""

    own: TransferManager

    def __init__(self, own: TransferManager, ranks: tuple[Slices, ...] = ()) -> None:
        """ranks: slices that each rank of the group has of a block; empty if this engine has one rank."""
        super().__init__(own)
        if ranks:
            own.join(0, ranks)
        self._outgoing: dict[int, _Outgoing] = {}  # by the sequence's number
        self._incoming: dict[str, _Incoming] = {}  # by transfer
        self._by_epoch: dict[int, _Incoming] = {}
        self._n_incoming = 0  # so far
        self.accept = own.accept

    def merge(self, rank: int, report: Notice) -> None:
        """Take in a notice of a rank, about a part of a transfer."""
        if isinstance(report, SenderNotice):
            self._merge_sent(report, report.number // MAX_RANKS)
        elif isinstance(report, OfferReceived):
            self._on_offer(report.offer, (rank, report.peer))
        elif isinstance(report, SenderLost):
            self._on_lost((rank, report.peer), report.message)
        elif isinstance(report, SenderGaveUp):
            self._on_gave_up((rank, report.peer), report)
        elif isinstance(report, LeaseRenewed):
            self.merged.append(report)
        elif (incoming := self._by_epoch.get(report.epoch)) is None:
            pass  # all its blocks were received
        elif isinstance(report, EpochReleased):
            self._stopped(incoming, (rank, report.peer))
        else:
            complete, _ = incoming.missing.said(report.items)
            if complete and incoming.ending is None:
                self.merged.append(BlocksReceived(report.epoch, complete))
            if not incoming.missing and incoming.ending is None:
                self._forget(incoming)

    # --- sending ----------------------------------------------------------------------------------------------------

    def offer(self, number: int, push: Push, n_blocks: int, key: bytes) -> None:
        """Offer the blocks of a sequence. Answered by `OfferGranted`, then `SendAcked`; or by `SendRejected`."""
        try:
            n_parts = len(parts(push, self.own.ranks))
        except SliceMismatch as error:
            self.merged.append(SendRejected(number, f"the decode engine has another KV layout: {error}"))
            return
        self._outgoing[number] = _Outgoing(push, n_parts, Tally([OfferGranted, SendAcked], n_parts))
        self.order(OfferParts(number, push, n_blocks, key))

    def send(self, number: int, items: Sequence[tuple[Item, int]]) -> None:
        """Send items, each from a block, which is referenced until `BlocksReleased` names the item."""
        out = self._outgoing[number]
        out.readers.expect([item for item, _ in items], out.n_parts)
        self.order(SendParts(number, out.push, list(items)))

    def cancel(self, number: int, message: str) -> None:
        """End a transfer, complete or not: what is still to be sent is not. `BlocksReleased` names every item."""
        out = self._outgoing.get(number)
        if out is not None and not out.ended:
            out.ended = True
            self.order(CancelParts(number, out.push, message))
            self._forget_sent(number, out)

    def _merge_sent(self, notice: SenderNotice, number: int) -> None:
        out = self._outgoing.get(number)
        if out is None:
            return
        if isinstance(notice, BlocksReleased):
            released, _ = out.readers.said(notice.items)
            if released:
                self.merged.append(BlocksReleased(number, released))
        elif out.ended:
            return
        elif isinstance(notice, SendRejected):
            self.merged.append(SendRejected(number, notice.message))
            self.cancel(number, notice.message)
        elif out.awaited.said([type(notice)])[0]:
            out.ended = isinstance(notice, SendAcked)
            self.merged.append(msgspec.structs.replace(notice, number=number))
        self._forget_sent(number, out)

    def _forget_sent(self, number: int, out: _Outgoing) -> None:
        if out.ended and not out.readers:
            self._outgoing.pop(number, None)

    # --- receiving --------------------------------------------------------------------------------------------------

    def grant(self, peer: int, transfer: str, epoch: int, blocks: list[dict[int, int]]) -> None:
        """Let the peers of a transfer write blocks."""
        incoming = self._offered(peer, transfer)
        if incoming is None:
            return  # `SenderLost` or `SenderGaveUp` is among the notices that are being handled
        incoming.epoch = epoch
        self._by_epoch[epoch] = incoming
        items = [(g, j) for g, wanted in enumerate(blocks) for j in wanted]
        incoming.missing = Tally(items, len(incoming.parts))
        self._tell(incoming.peers, Grant(transfer, epoch, blocks))
        if not incoming.missing:
            self._forget(incoming)

    def deny(self, peer: int, transfer: str, message: str) -> None:
        """Refuse an offer."""
        if (incoming := self._offered(peer, transfer)) is not None:
            self._forget(incoming)
            self._tell(incoming.peers, Denied(transfer, message))

    def revoke(self, peer: int, epoch: int) -> None:
        """End a grant. Answered by `EpochReleased` once no peer writes, or by `SenderLost`."""
        incoming = self._by_epoch.get(epoch)
        if incoming is None:
            self.merged.append(EpochReleased(epoch))
            return
        if incoming.ending is None:
            self._tell(incoming.peers, Revoke(epoch))
        incoming.ending = EpochReleased(epoch)

    def _offered(self, peer: int, transfer: str) -> _Incoming | None:
        incoming = self._incoming.get(transfer)
        return incoming if incoming is not None and incoming.number == peer else None

    def _tell(self, peers: Iterable[Peer], message: Grant | Denied | Revoke) -> None:
        found: Peers = {}
        for rank, peer in sorted(peers):
            found.setdefault(rank, []).append(peer)
        if found:
            self.order(TellSenders(found, message))

    def _forget(self, incoming: _Incoming) -> None:
        del self._incoming[incoming.offer.transfer]
        self._by_epoch.pop(incoming.epoch, None)

    def _on_offer(self, offer: Offer, peer: Peer) -> None:
        part = (offer.rank, peer[0])
        incoming = self._incoming.get(offer.transfer)
        if incoming is None:
            if offer.ranks and sum(not each.is_offered for each in self._incoming.values()) >= MAX_PARTIAL:
                self._tell([peer], Denied(offer.transfer, "too many transfers"))
                return
            incoming = self._incoming[offer.transfer] = self._new(offer, part)
        first = incoming.offer
        alike = (offer.fingerprint, offer.n_blocks, offer.key) == (first.fingerprint, first.n_blocks, first.key)
        if not alike or incoming.parts.get(part, peer) is not None:
            why = f"transfer {offer.transfer!r} is offered twice, or another rank has offered something else"
            self._tell([peer], Denied(offer.transfer, why))
            return
        incoming.parts[part] = peer
        if incoming.is_offered:
            self.merged.append(OfferReceived(incoming.number, first))

    def _new(self, offer: Offer, part: tuple[int, int]) -> _Incoming:
        """Begin a transfer with the first offer of a part of it."""
        self._n_incoming += 1
        ranks = self.own.ranks
        wanted: Iterable[tuple[int, int]] = (part,)
        if offer.ranks or len(ranks) > 1:
            try:
                if not offer.ranks:
                    raise SliceMismatch("the prefill engine sends whole blocks, and this engine has several ranks")
                wanted = routes(offer.ranks, ranks)
                tags, sizes = zip(*((layout.tag, layout.block_bytes) for layout in ranks[0]))
                offer = msgspec.structs.replace(offer, tags=tags, block_bytes=sizes)  # the parts make whole blocks
            except SliceMismatch as error:  # the step loop finds other tags than its own, and denies it
                offer = msgspec.structs.replace(offer, tags=(f"{', '.join(offer.tags)} ({error})",))
        return _Incoming(-self._n_incoming, offer, dict.fromkeys(wanted))

    # --- the end of a transfer --------------------------------------------------------------------------------------

    def _on_lost(self, peer: Peer, why: str) -> None:
        for incoming in [each for each in self._incoming.values() if peer in each.peers]:
            number, transfer = incoming.number, incoming.offer.transfer
            known = incoming.is_offered  # else a request may await it
            self._stopped(incoming, peer, SenderLost(number, why) if known else SenderGaveUp(number, transfer, 0, why))

    def _on_gave_up(self, peer: Peer, notice: SenderGaveUp) -> None:
        incoming = self._incoming.get(notice.transfer)
        if incoming is None:
            self.merged.append(notice)
        elif peer in incoming.peers:  # where the message crossed our grant, that is revoked
            gave_up = SenderGaveUp(incoming.number, notice.transfer, incoming.epoch, notice.message)
            self._stopped(incoming, peer if notice.epoch == incoming.epoch else None, gave_up)

    def _stopped(self, incoming: _Incoming, peer: Peer | None, why: SenderLost | SenderGaveUp | None = None) -> None:
        """Take note that a peer writes no more, or of why a transfer ends: its other parts are denied or revoked, and
        the step loop is told once no peer writes."""
        if peer is not None:
            incoming.stopped.add(peer)
        if why is not None and incoming.ending is None:
            incoming.ending = why
            reason = f"another rank of the prefill engine has ended it: {why.message}"
            end = Revoke(incoming.epoch) if incoming.epoch else Denied(incoming.offer.transfer, reason)
            self._tell(incoming.peers, end)
        if incoming.ending is not None and not (incoming.epoch and incoming.peers):
            self._forget(incoming)
            self.merged.append(incoming.ending)
