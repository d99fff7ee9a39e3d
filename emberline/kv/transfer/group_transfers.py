"""The KV transfers of all ranks as one, as rank 0's step loop sees them. An engine with one rank is a group of one.

Every rank sends its slice of each block directly to the ranks that need it; each such pair is a part of the transfer
(`orders.py`). Rank 0 orders what is offered, sent, granted and revoked, and ranks report what happens. To the step loop
a transfer is granted, received or acknowledged when all its parts are, and lost when one is; blocks are given back once
no peer reads or writes them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from emberline.kv.slices import SliceMismatch, Slices, routes
from emberline.kv.tally import Answers, GroupPort, Tally
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
    answers: Answers = field(default_factory=Answers)  # of parts that are granted, and acknowledged
    ended: bool = False  # the step loop knows
    readers: Tally[Item] = field(default_factory=Tally)  # blocks that some part still reads


@dataclass(slots=True, eq=False)
class _Incoming:
    number: int  # of the peer, as the step loop knows it: below 0, one for each transfer
    offer: Offer  # of all parts, as if it were of whole blocks
    parts: dict[tuple[int, int], Peer | None]  # by the ranks of both sides: who offers the part, once it is offered
    epoch: int = 0  # from the grant on
    writing: set[Peer] = field(default_factory=set)  # that may write
    missing: Tally[Item] = field(default_factory=Tally)  # blocks of which some part was not received yet
    ending: Notice | None = None  # what the step loop is told once no peer writes any more

    @property
    def peers(self) -> set[Peer]:
        return {peer for peer in self.parts.values() if peer is not None}

    @property
    def is_offered(self) -> bool:
        """True if every part is offered, so that the step loop knows of the transfer."""
        return None not in self.parts.values()


class GroupTransfers(GroupPort[TransferOrder, Notice]):
    """A `notices.TransferPort`, which gives orders to the transfers of every rank, its own among them."""

    own: TransferManager

    def start(self, order: Callable[[TransferOrder], None]) -> None:
        """Give orders to all ranks by this function, this one among them."""
        self.order = order

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
            self._merge_sent(report)
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
        elif isinstance(report, BlocksReceived):
            self._merge_received(incoming, report)
        else:
            self._stopped(incoming, (rank, report.peer))

    # --- sending ----------------------------------------------------------------------------------------------------

    def offer(self, number: int, push: Push, n_blocks: int, key: bytes) -> None:
        """Offer the blocks of a sequence."""
        try:
            out = _Outgoing(push, len(parts(push, self.own.ranks)))
        except SliceMismatch as error:
            self.merged.append(SendRejected(number, f"the decode engine has another KV layout: {error}"))
            return
        for kind in (OfferGranted, SendAcked):
            out.answers.expect(kind, number, out.n_parts)
        self._outgoing[number] = out
        self.order(OfferParts(number, push, n_blocks, key))

    def send(self, number: int, items: Sequence[tuple[Item, int]]) -> None:
        """Send blocks, which are referenced until `BlocksReleased` names them."""
        out = self._outgoing[number]
        out.readers.expect([item for item, _ in items], out.n_parts)
        self.order(SendParts(number, out.push, list(items)))

    def cancel(self, number: int, message: str) -> None:
        """End a transfer, complete or not."""
        out = self._outgoing.get(number)
        if out is not None and not out.ended:
            out.ended = True
            self.order(CancelParts(number, out.push, message))
            self._forget_sent(number, out)

    def _merge_sent(self, notice: SenderNotice) -> None:
        number = notice.number // MAX_RANKS
        out = self._outgoing.get(number)
        if out is None:
            return
        if isinstance(notice, BlocksReleased):
            released, _ = out.readers.said(notice.items)
            if released:
                self.merged.append(BlocksReleased(number, released))
        elif isinstance(notice, SendRejected):
            if not out.ended:
                self.merged.append(SendRejected(number, notice.message))
                self.cancel(number, notice.message)
        elif out.answers.said(notice, number) is not None and not out.ended:
            out.ended = isinstance(notice, SendAcked)
            self.merged.append(msgspec.structs.replace(notice, number=number))
        self._forget_sent(number, out)

    def _forget_sent(self, number: int, out: _Outgoing) -> None:
        if out.ended and not out.readers:
            self._outgoing.pop(number, None)

    # --- receiving --------------------------------------------------------------------------------------------------

    def grant(self, peer: int, transfer: str, epoch: int, blocks: list[dict[int, int]]) -> None:
        """Let the peers of a transfer write blocks."""
        incoming = self._incoming.get(transfer)
        if incoming is None or incoming.number != peer:
            return  # `SenderLost` or `SenderGaveUp` is among the notices that are being handled
        incoming.epoch, incoming.writing = epoch, incoming.peers
        self._by_epoch[epoch] = incoming
        items = [(g, j) for g, wanted in enumerate(blocks) for j in wanted]
        incoming.missing = Tally(items, len(incoming.parts))
        self._tell(incoming.peers, Grant(transfer, epoch, blocks))
        if not incoming.missing:
            self._forget(incoming)

    def deny(self, peer: int, transfer: str, message: str) -> None:
        """Refuse an offer."""
        incoming = self._incoming.get(transfer)
        if incoming is not None and incoming.number == peer:
            self._forget(incoming)
            self._tell(incoming.peers, Denied(transfer, message))

    def revoke(self, peer: int, epoch: int) -> None:
        """End a grant. Answered by `EpochReleased` once no peer writes."""
        incoming = self._by_epoch.get(epoch)
        if incoming is not None:
            self._end(incoming, EpochReleased(epoch))
        else:
            self.merged.append(EpochReleased(epoch))

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

    def _merge_received(self, incoming: _Incoming, notice: BlocksReceived) -> None:
        complete, _ = incoming.missing.said(notice.items)
        if incoming.ending is None:
            if complete:
                self.merged.append(BlocksReceived(notice.epoch, complete))
            if not incoming.missing:
                self._forget(incoming)

    # --- the end of a transfer --------------------------------------------------------------------------------------

    def _on_lost(self, peer: Peer, why: str) -> None:
        for incoming in [each for each in self._incoming.values() if peer in each.peers]:
            number, transfer = incoming.number, incoming.offer.transfer
            known = incoming.is_offered  # else a request may await it
            self._end(incoming, SenderLost(number, why) if known else SenderGaveUp(number, transfer, 0, why), peer)

    def _on_gave_up(self, peer: Peer, notice: SenderGaveUp) -> None:
        incoming = self._incoming.get(notice.transfer)
        if incoming is None:
            self.merged.append(notice)
        elif peer in incoming.peers:  # where the message crossed our grant, that is revoked
            gave_up = SenderGaveUp(incoming.number, notice.transfer, incoming.epoch, notice.message)
            self._end(incoming, gave_up, peer if notice.epoch == incoming.epoch else None)

    def _end(
        self, incoming: _Incoming, why: SenderLost | SenderGaveUp | EpochReleased, stopped: Peer | None = None
    ) -> None:
        """End a transfer of which some part has ended, or which the step loop ends: deny or revoke the others, and say
        so once no peer writes."""
        first = incoming.ending is None
        if first or isinstance(why, EpochReleased):
            incoming.ending = why
        if first and incoming.epoch:
            self._tell(incoming.writing - {stopped}, Revoke(incoming.epoch))
        elif first and not isinstance(why, EpochReleased):
            reason = f"another rank of the prefill engine has ended it: {why.message}"
            self._tell(incoming.peers - {stopped}, Denied(incoming.offer.transfer, reason))
        if stopped is not None or not incoming.epoch:
            self._stopped(incoming, stopped)

    def _stopped(self, incoming: _Incoming, peer: Peer | None) -> None:
        incoming.writing -= {peer}
        if not incoming.writing and incoming.ending is not None:
            self._forget(incoming)
            self.merged.append(incoming.ending)
