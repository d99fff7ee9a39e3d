"""Transfers of an engine that has several ranks, or whose other side has: every rank sends its slice of each block
directly to those that need it, and rank 0 makes one transfer of these parts.

A part is what one rank of the sender has of the blocks of one rank of the receiver (`slices.routes`). Rank 0 decides:
it tells its followers what to offer, grant and revoke (`orders.py`), and they report what happens. To the step loop
a transfer is granted, received or acknowledged when all its parts are, and lost when one is; blocks are given back once
no peer reads or writes them. Between two engines of one rank each nothing is divided, and nothing of this applies.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from emberline.kv.slices import SliceMismatch, Slices, routes
from emberline.kv.tally import Tally
from emberline.kv.transfer.manager import TransferManager
from emberline.kv.transfer.messages import Item, Offer
from emberline.kv.transfer.notices import (
    BlocksReceived,
    BlocksReleased,
    EpochReleased,
    LeaseRenewed,
    Notice,
    OfferGranted,
    OfferReceived,
    RankNotice,
    SendAcked,
    SenderGaveUp,
    SenderLost,
    SenderNotice,
    SendRejected,
)
from emberline.kv.transfer.orders import (
    CancelParts,
    DenyParts,
    GrantParts,
    OfferParts,
    Peers,
    RevokeParts,
    SendParts,
    TransferExecutor,
    TransferOrder,
    receivers,
    sequence_and_rank,
)
from emberline.kv.transfer.sender import TransportOpener
from emberline.kv.transfer.transport import BlockSink, ReceiveTransport
from emberline.protocol.block_hash import KVGroup
from emberline.protocol.request import Push

MAX_OPEN = 1024  # incoming transfers in parts

Peer = tuple[int, int]  # our rank, and the number of a connection there


@dataclass(slots=True, eq=False)
class _Outgoing:
    push: Push
    n_parts: int
    granted: int = 0  # parts
    acked: int = 0
    ended: bool = False  # the step loop knows
    readers: Tally[Item] = field(default_factory=Tally)  # blocks that some part still reads


@dataclass(slots=True, eq=False)
class _Incoming:
    number: int  # of the peer, as the step loop knows it: below 0
    offer: Offer  # of all parts, as if it were of whole blocks
    parts: dict[tuple[int, int], int | None]  # by the ranks of both sides: our connection, once it is offered
    epoch: int = 0
    writing: set[Peer] = field(default_factory=set)  # that may write, from the grant on
    missing: Tally[Item] = field(default_factory=Tally)  # blocks of which some part was not received yet
    ending: Notice | None = None  # what it is told once no peer writes any more

    @property
    def peers(self) -> set[Peer]:
        return {(to, peer) for (_, to), peer in self.parts.items() if peer is not None}


class RankTransfers(TransferManager):
    """Rank 0's `notices.TransferPort`, or that of an engine alone."""

    def __init__(
        self,
        fingerprint: str,
        layouts: Sequence[KVGroup],
        memory: BlockSink | None,
        receive_transports: Sequence[ReceiveTransport],
        send_transports: Sequence[str],
        open_transport: TransportOpener,
    ) -> None:
        super().__init__(fingerprint, layouts, memory, receive_transports, send_transports, open_transport)
        self.ranks: tuple[Slices, ...] = ()  # of this group; empty: this engine is alone
        self._order: Callable[[TransferOrder], None]
        self._outgoing: dict[int, _Outgoing] = {}  # by the sequence's number
        self._incoming: dict[str, _Incoming] = {}  # by transfer
        self._n_parted = 0  # incoming transfers in parts so far
        self._merged: list[Notice] = []  # of the call of `notices` that runs

    def form(self, ranks: tuple[Slices, ...]) -> None:
        """Transfer for a group from now on, whose rank 0 this is."""
        self.ranks = ranks

    def start(self, order: Callable[[TransferOrder], None]) -> None:
        """Give orders to all ranks by this function, this one among them."""
        self._order = order

    def executor(self) -> TransferExecutor:
        """Rank 0's own part of orders."""
        return TransferExecutor(self, 0, self._slices)

    def report(self, rank: int, reported: Iterable[Notice]) -> None:
        """Notices of a follower, from any thread."""
        for notice in reported:
            self._notices.put(RankNotice(rank, notice))

    @property
    def _slices(self) -> tuple[Slices, ...]:
        return self.ranks or (self._layouts,)

    def notices(self) -> list[Notice]:
        taken = super().notices()
        if not taken or (not self.ranks and not self._outgoing and not self._incoming and not _any_parts(taken)):
            return taken
        for notice in taken:
            self._merge(*((notice.rank, notice.notice) if isinstance(notice, RankNotice) else (0, notice)))
        merged, self._merged = self._merged, []
        return merged

    def _merge(self, rank: int, notice: Notice) -> None:
        if isinstance(notice, SenderNotice):
            if notice.number < 0:
                self._merge_sent(notice)
            else:
                self._merged.append(notice)
        elif isinstance(notice, OfferReceived):
            self._on_offer(rank, notice)
        elif isinstance(notice, SenderLost):
            self._on_lost(rank, notice)
        elif isinstance(notice, SenderGaveUp):
            self._on_gave_up(rank, notice)
        else:
            self._merge_received(rank, notice)

    # --- sending ----------------------------------------------------------------------------------------------------

    def offer(self, number: int, push: Push, n_blocks: int, key: bytes) -> None:
        if not self.ranks and not push.ranks:
            super().offer(number, push, n_blocks, key)
            return
        try:
            if not push.ranks:
                raise SliceMismatch("the request does not say which slices of each block the decode engine has")
            n_parts = len(routes(self._slices, receivers(push)))
        except SliceMismatch as error:
            self._notices.put(SendRejected(number, f"the decode engine has another KV layout: {error}"))
            return
        self._outgoing[number] = _Outgoing(push, n_parts)
        self._order(OfferParts(number, push, n_blocks, key))

    def send(self, number: int, items: Sequence[tuple[Item, int]]) -> None:
        out = self._outgoing.get(number)
        if out is None:
            super().send(number, items)
            return
        out.readers.expect([item for item, _ in items], out.n_parts)
        self._order(SendParts(number, out.push, list(items)))

    def cancel(self, number: int, message: str) -> None:
        out = self._outgoing.get(number)
        if out is None:
            super().cancel(number, message)
        elif not out.ended:
            self._end_sending(number, out, message)

    def _end_sending(self, number: int, out: _Outgoing, message: str) -> None:
        out.ended = True
        self._order(CancelParts(number, out.push, message))
        self._forget_sent(number, out)

    def _merge_sent(self, notice: SenderNotice) -> None:
        number, _ = sequence_and_rank(notice.number)
        out = self._outgoing.get(number)
        if out is None:
            return
        if isinstance(notice, BlocksReleased):
            released, _ = out.readers.said(notice.items)
            if released:
                self._merged.append(BlocksReleased(number, released))
        elif not out.ended:
            if isinstance(notice, OfferGranted):
                out.granted += 1
                if out.granted == out.n_parts:
                    self._merged.append(OfferGranted(number, notice.wanted))
            elif isinstance(notice, SendAcked):
                out.acked += 1
                if out.acked == out.n_parts:
                    out.ended = True
                    self._merged.append(SendAcked(number))
            else:
                self._merged.append(SendRejected(number, notice.message))
                self._end_sending(number, out, notice.message)
        self._forget_sent(number, out)

    def _forget_sent(self, number: int, out: _Outgoing) -> None:
        if out.ended and not out.readers:
            self._outgoing.pop(number, None)

    # --- receiving --------------------------------------------------------------------------------------------------

    def grant(self, peer: int, transfer: str, epoch: int, blocks: list[dict[int, int]]) -> None:
        incoming = self._of_peer(peer)
        if incoming is None:
            super().grant(peer, transfer, epoch, blocks)
            return
        incoming.epoch, incoming.writing = epoch, incoming.peers
        items = [(g, j) for g, wanted in enumerate(blocks) for j in wanted]
        incoming.missing = Tally(items, len(incoming.parts))
        self._order(GrantParts(_by_rank(incoming.peers), transfer, epoch, blocks))
        if not incoming.missing:
            del self._incoming[transfer]

    def deny(self, peer: int, transfer: str, message: str) -> None:
        incoming = self._of_peer(peer)
        if incoming is None:
            super().deny(peer, transfer, message)
            return
        del self._incoming[incoming.offer.transfer]
        self._order(DenyParts(_by_rank(incoming.peers), transfer, message))

    def revoke(self, peer: int, epoch: int) -> None:
        incoming = self._of_peer(peer)
        if incoming is not None:
            self._end_receiving(incoming, EpochReleased(epoch))
        elif peer < 0:
            self._notices.put(EpochReleased(epoch))
        else:
            super().revoke(peer, epoch)

    def _of_peer(self, number: int) -> _Incoming | None:
        if number >= 0:
            return None
        return next((each for each in self._incoming.values() if each.number == number), None)

    def _on_offer(self, rank: int, notice: OfferReceived) -> None:
        offer, peer = notice.offer, notice.peer
        if not offer.ranks and not self.ranks:
            self._merged.append(notice)
            return
        incoming = self._incoming.get(offer.transfer)
        part = (offer.rank, rank)
        if incoming is None:
            if len(self._incoming) >= MAX_OPEN:
                self._order(DenyParts({rank: [peer]}, offer.transfer, "too many transfers"))
                return
            self._n_parted += 1
            try:
                if not offer.ranks:
                    raise SliceMismatch("the prefill engine sends whole blocks, and this engine has several ranks")
                wanted = dict.fromkeys(routes(offer.ranks, self._slices))
                offered = self._as_own(offer)
            except SliceMismatch as error:  # the step loop finds other tags than its own, and denies it
                tags = (f"{', '.join(offer.tags)} ({error})",)
                wanted, offered = {part: None}, msgspec.structs.replace(offer, tags=tags)
            incoming = self._incoming[offer.transfer] = _Incoming(-self._n_parted, offered, wanted)
        first = incoming.offer
        alike = (offer.fingerprint, offer.n_blocks, offer.key) == (first.fingerprint, first.n_blocks, first.key)
        if not alike or incoming.parts.get(part, peer) is not None:
            self._order(
                DenyParts({rank: [peer]}, offer.transfer, "another rank has offered something else, or the same")
            )
            return
        incoming.parts[part] = peer
        if None not in incoming.parts.values():
            self._merged.append(OfferReceived(incoming.number, first))

    def _as_own(self, offer: Offer) -> Offer:
        """An offer whose parts make whole blocks of this group."""
        tags, sizes = zip(*((layout.tag, layout.block_bytes) for layout in self._layouts))
        return msgspec.structs.replace(offer, tags=tags, block_bytes=sizes)

    def _merge_received(self, rank: int, notice: Notice) -> None:
        assert isinstance(notice, BlocksReceived | LeaseRenewed | EpochReleased)
        incoming = next((each for each in self._incoming.values() if each.epoch == notice.epoch), None)
        if incoming is None or isinstance(notice, LeaseRenewed):
            self._merged.append(notice)
        elif isinstance(notice, BlocksReceived):
            complete, _ = incoming.missing.said(notice.items)
            if incoming.ending is None:
                if complete:
                    self._merged.append(BlocksReceived(notice.epoch, complete))
                if not incoming.missing:
                    del self._incoming[incoming.offer.transfer]
        else:
            self._stopped(incoming, (rank, notice.peer))

    # --- the end of a transfer --------------------------------------------------------------------------------------

    def _on_lost(self, rank: int, notice: SenderLost) -> None:
        peer = (rank, notice.peer)
        if rank == 0:
            self._merged.append(notice)  # its other transfers
        for incoming in [each for each in self._incoming.values() if peer in each.peers]:
            if incoming.epoch:
                self._end_receiving(incoming, SenderLost(incoming.number, notice.message), peer)
            else:
                self._drop(incoming, notice.message, peer)

    def _on_gave_up(self, rank: int, notice: SenderGaveUp) -> None:
        peer, incoming = (rank, notice.peer), self._incoming.get(notice.transfer)
        if incoming is None or peer not in incoming.peers:
            if incoming is None:
                self._merged.append(notice)
            return
        if incoming.epoch:  # where the message crossed our grant, that is revoked
            gave_up = SenderGaveUp(incoming.number, notice.transfer, incoming.epoch, notice.message)
            self._end_receiving(incoming, gave_up, peer if notice.epoch == incoming.epoch else None)
        else:
            self._drop(incoming, notice.message, peer)

    def _drop(self, incoming: _Incoming, why: str, gone: Peer) -> None:
        """A transfer that was not granted: no peer writes. The step loop may not know of it yet."""
        transfer = incoming.offer.transfer
        del self._incoming[transfer]
        others = _by_rank(incoming.peers - {gone})
        self._order(DenyParts(others, transfer, f"another rank of the prefill engine has ended it: {why}"))
        self._merged.append(SenderGaveUp(incoming.number, transfer, 0, why))

    def _end_receiving(self, incoming: _Incoming, why: Notice, stopped: Peer | None = None) -> None:
        """Some part has ended, or the step loop ends all: revoke the others, and say so once no peer writes."""
        first = incoming.ending is None
        if first or isinstance(why, EpochReleased):
            incoming.ending = why
        if first:
            self._order(RevokeParts(_by_rank(incoming.writing - {stopped}), incoming.epoch))
        if stopped is not None:
            self._stopped(incoming, stopped)

    def _stopped(self, incoming: _Incoming, peer: Peer) -> None:
        incoming.writing.discard(peer)
        if not incoming.writing and incoming.ending is not None:
            self._incoming.pop(incoming.offer.transfer, None)
            self._notices.put(incoming.ending)


def _any_parts(taken: Sequence[Notice]) -> bool:
    return any(isinstance(notice, OfferReceived) and notice.offer.ranks for notice in taken)


def _by_rank(peers: Iterable[Peer]) -> Peers:
    found: Peers = {}
    for rank, peer in sorted(peers):
        found.setdefault(rank, []).append(peer)
    return found
