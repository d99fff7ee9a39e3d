"""Requests whose prompt's KV is computed elsewhere and pushed into blocks that are reserved for it here."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

from emberline.engine.scheduler.sequence import Sequence
from emberline.kv.cache import BlockTable, KVCache
from emberline.kv.events import watched_group
from emberline.kv.transfer.messages import Item, Offer
from emberline.kv.transfer.notices import Arrived, GivenUp, Offered, PeerLost, Released, Renewed, Transfers
from emberline.protocol.block_hash import BLOCK_TOKENS
from emberline.protocol.errors import BadInput, Unavailable

LEASE_S = 10.0  # without a block or a sign of life: then the sender is given up,
DOUBT_S = 2.0  # after a second look: it may have been this process that stood still, with blocks unread before it
SILENT_S = 300.0  # with nothing but signs of life: an engine that is stuck may still give them
WAIT_S = 60.0  # for a sender to offer, or for a request to claim an offer: neither holds a block meanwhile
MAX_OFFERS = 1024  # that nobody has claimed
GAVE_UP = "the decode engine gave the request up"

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class IncomingTransfer:
    """awaited ─ offered ─ granted (its blocks are reserved under an epoch) ─ complete; or given up at any moment."""

    seq: Sequence
    n_blocks: int
    moved_s: float  # when something was last heard of it
    landed_s: float = 0.0  # when something last came of it, or could from then on
    peer: int = 0  # who offered it
    epoch: int = 0
    table: BlockTable | None = None  # from the grant on; its references keep what has landed until it is admitted
    missing: set[Item] = field(default_factory=set)
    n_landed: int = 0  # blocks of the prompt that came
    doubted: bool = False  # its lease is over but for the second look

    @property
    def transfer(self) -> str:
        return self.seq.request.awaits


@dataclass(slots=True)
class News:
    """What became of sequences that were away."""

    ready: list[Sequence] = field(default_factory=list)
    failed: list[tuple[Sequence, str]] = field(default_factory=list)


class IncomingTransfers:
    """Owns the tables of what is under way, and the quarantine: blocks that an unfinished writer may still write."""

    def __init__(self, cache: KVCache, transfers: Transfers, fingerprint: str) -> None:
        self._cache = cache
        self._transfers = transfers
        self._fingerprint = fingerprint
        layouts = [group.layout for group in cache.groups]
        self._tags = tuple(layout.tag for layout in layouts)
        self._sizes = tuple(layout.block_bytes for layout in layouts)
        self._counted = layouts.index(watched_group(layouts))  # the group whose blocks are counted as the prompt's
        self._by_transfer: dict[str, IncomingTransfer] = {}
        self._by_epoch: dict[int, IncomingTransfer] = {}
        self._complete: dict[int, IncomingTransfer] = {}  # by the sequence's number, until it is admitted
        self._offers: dict[str, tuple[Offered, float]] = {}  # unclaimed, and since when
        self._unwanted: dict[str, tuple[str, float]] = {}  # given up by one side before the other came: why, since when
        self._quarantine: dict[int, tuple[int, list[Item]]] = {}  # by epoch: the writer, (group, block)
        self._n_epochs = 0
        self.n_received = 0  # blocks

    @property
    def next_s(self) -> float:
        """When `expire` has something to do, unless something comes."""
        limits = [arrival.moved_s + _patience_s(arrival) for arrival in self._by_transfer.values()]
        limits += [since_s + WAIT_S for _, since_s in (*self._offers.values(), *self._unwanted.values())]
        return min(limits, default=float("inf"))

    @property
    def n_awaiting(self) -> int:
        return len(self._by_transfer)

    @property
    def awaiting_tokens(self) -> int:
        return sum(arrival.n_blocks * BLOCK_TOKENS for arrival in self._by_transfer.values())

    @property
    def n_quarantined(self) -> int:
        return sum(len(blocks) for _, blocks in self._quarantine.values())

    def check(self, transfer: str) -> None:
        if transfer in self._by_transfer:
            raise BadInput(f"transfer {transfer!r} is in use", param="awaits")

    def expect(self, seq: Sequence, now_s: float) -> News:
        """From now on the sequence is ours, until it is ready or leaves."""
        arrival = IncomingTransfer(seq, seq.n_pushable, now_s)
        self._by_transfer[arrival.transfer] = arrival
        if arrival.transfer in self._unwanted:
            why, _ = self._unwanted.pop(arrival.transfer)
            return News(failed=[(seq, why)])
        offered, _ = self._offers.pop(arrival.transfer, (None, 0.0))
        return News() if offered is None else self._claim(arrival, offered, now_s)

    def leave(self, seq: Sequence) -> None:
        """The sequence has ended, or computes now: what has landed stays cached, what may still land is quarantined."""
        arrival = self._complete.pop(seq.number, None)
        if arrival is None:
            arrival = self._by_transfer.get(seq.request.awaits)
            if arrival is None or arrival.seq is not seq:
                return
            del self._by_transfer[arrival.transfer]
        if arrival.epoch in self._by_epoch:
            del self._by_epoch[arrival.epoch]
            self._quarantine[arrival.epoch] = arrival.peer, self._withdraw(arrival)
            self._transfers.revoke(arrival.peer, arrival.epoch)
        elif arrival.table is None and arrival.peer:
            self._transfers.deny(arrival.peer, arrival.transfer, GAVE_UP)
        elif arrival.table is None:
            self._remember(arrival.transfer, GAVE_UP, arrival.moved_s)
        if arrival.table is not None:
            self._cache.release(arrival.table)

    def n_landed(self, seq: Sequence) -> int:
        arrival = self._complete.get(seq.number)
        return 0 if arrival is None else arrival.n_landed

    # --- room -------------------------------------------------------------------------------------------------------

    def waiting_for_room(self) -> list[Sequence]:
        """Offered, not granted; by rank."""
        found = [a.seq for a in self._by_transfer.values() if a.peer and not a.epoch]
        return sorted(found, key=lambda seq: seq.rank)

    def grant(self, seq: Sequence, spare: list[int], now_s: float) -> News | None:
        """Reserve what the sequence lacks and let it be written. None: no room."""
        arrival = self._by_transfer[seq.request.awaits]
        table = self._cache.reserve(seq.keys, arrival.n_blocks, spare)
        if table is None:
            return None
        lacking = self._cache.lacking(table)
        self._n_epochs += 1
        arrival.epoch, arrival.table, arrival.moved_s, arrival.landed_s = self._n_epochs, table, now_s, now_s
        arrival.missing = {(g, j) for g, blocks in enumerate(lacking) for j in blocks}
        self._by_epoch[arrival.epoch] = arrival
        self._transfers.grant(arrival.peer, arrival.transfer, arrival.epoch, lacking)
        return self._look(arrival)

    # --- what the threads tell --------------------------------------------------------------------------------------

    def hear(self, notice: Offered | Arrived | Renewed | GivenUp | Released | PeerLost, now_s: float) -> News:
        if isinstance(notice, Arrived):
            return self._arrived(notice, now_s)
        if isinstance(notice, Renewed):
            self._renew(notice, now_s)
            return News()
        if isinstance(notice, Offered):
            return self._offered(notice, now_s)
        if isinstance(notice, Released):
            self._lift(notice.epoch)
            return News()
        if isinstance(notice, GivenUp):
            return self._given_up(notice, now_s)
        return self._peer_lost(notice)

    def expire(self, now_s: float) -> News:
        news = News()
        self._unwanted = {t: each for t, each in self._unwanted.items() if now_s < each[1] + WAIT_S}
        for transfer, (offered, since_s) in list(self._offers.items()):
            if now_s >= since_s + WAIT_S:
                del self._offers[transfer]
                self._transfers.deny(offered.peer, transfer, f"no request awaits transfer {transfer!r}")
        for arrival in self._by_transfer.values():
            if now_s < arrival.moved_s + _patience_s(arrival):
                continue
            if not arrival.doubted:
                arrival.doubted, arrival.moved_s = True, now_s - _patience_s(arrival) + DOUBT_S
            else:
                what = "no more KV came" if arrival.epoch else "no prefill engine offered its KV"
                news.failed.append((arrival.seq, f"{what} within {_patience_s(arrival):g} s"))
        return news

    def _offered(self, notice: Offered, now_s: float) -> News:
        transfer = notice.offer.transfer
        arrival = self._by_transfer.get(transfer)
        if transfer in self._unwanted:
            self._transfers.deny(notice.peer, transfer, self._unwanted.pop(transfer)[0])
            return News()
        if arrival is not None and not arrival.peer:
            return self._claim(arrival, notice, now_s)
        if arrival is not None or transfer in self._offers:
            self._transfers.deny(notice.peer, transfer, f"transfer {transfer!r} is offered twice")
        elif len(self._offers) >= MAX_OFFERS:
            self._transfers.deny(notice.peer, transfer, "too many offers wait for their requests")
        else:
            self._offers[transfer] = notice, now_s
        return News()

    def _claim(self, arrival: IncomingTransfer, notice: Offered, now_s: float) -> News:
        """The request and its offer have found each other: does it fit?"""
        wrong = self._misfit(arrival, notice.offer)
        if wrong:
            _log.warning("a transfer does not fit: %s", wrong, extra={"request_id": arrival.seq.id})
            self._transfers.deny(notice.peer, arrival.transfer, wrong)
            return News(failed=[(arrival.seq, wrong)])
        arrival.peer, arrival.moved_s, arrival.doubted = notice.peer, now_s, False
        return News()

    def _misfit(self, arrival: IncomingTransfer, offer: Offer) -> str:
        if offer.fingerprint != self._fingerprint:
            return "the prefill engine has another model's weights"
        if (offer.tags, offer.block_bytes) != (self._tags, self._sizes):
            theirs, ours = zip(offer.tags, offer.block_bytes), zip(self._tags, self._sizes)
            return f"the prefill engine's KV lies otherwise: {_described(theirs)}, here {_described(ours)}"
        if offer.n_blocks != arrival.n_blocks:
            return f"the prefill engine offers {offer.n_blocks} blocks, the prompt has {arrival.n_blocks}"
        return ""

    def _arrived(self, notice: Arrived, now_s: float) -> News:
        arrival = self._by_epoch.get(notice.epoch)
        if arrival is None or arrival.table is None:
            return News()  # revoked meanwhile
        for group, j in notice.items:
            arrival.missing.remove((group, j))
            self._cache.land(arrival.table, arrival.seq.keys, group, j)
        self.n_received += len(notice.items)
        arrival.n_landed += sum(group == self._counted for group, _ in notice.items)
        arrival.moved_s, arrival.landed_s, arrival.doubted = now_s, now_s, False
        return self._look(arrival)

    def _renew(self, notice: Renewed, now_s: float) -> None:
        arrival = self._by_epoch.get(notice.epoch)
        if arrival is not None and now_s < arrival.landed_s + SILENT_S:
            arrival.moved_s, arrival.doubted = now_s, False

    def _look(self, arrival: IncomingTransfer) -> News:
        if arrival.missing:
            return News()
        del self._by_epoch[arrival.epoch], self._by_transfer[arrival.transfer]
        self._complete[arrival.seq.number] = arrival
        return News(ready=[arrival.seq])

    def _given_up(self, notice: GivenUp, now_s: float) -> News:
        """Its writer writes no more: nothing needs the quarantine."""
        self._lift(notice.epoch)
        why = f"the prefill engine gave up: {notice.message}"
        arrival = self._by_transfer.get(notice.transfer)
        if arrival is not None:
            return self._fail(arrival, why) if arrival.peer in (0, notice.peer) else News()
        unclaimed = self._offers.get(notice.transfer)
        if unclaimed is not None and unclaimed[0].peer == notice.peer:
            del self._offers[notice.transfer]
        if not notice.epoch:
            self._remember(notice.transfer, why, now_s)
        return News()

    def _remember(self, transfer: str, why: str, now_s: float) -> None:
        """For the other side, which may still come."""
        if len(self._unwanted) < MAX_OFFERS:
            self._unwanted[transfer] = why, now_s

    def _peer_lost(self, notice: PeerLost) -> News:
        for epoch in [epoch for epoch, (peer, _) in self._quarantine.items() if peer == notice.peer]:
            self._lift(epoch)
        for transfer in [t for t, (offered, _) in self._offers.items() if offered.peer == notice.peer]:
            del self._offers[transfer]
        news = News()
        for arrival in [a for a in self._by_transfer.values() if a.peer == notice.peer]:
            news.failed += self._fail(arrival, f"the prefill engine was lost: {notice.message}").failed
        return news

    def _fail(self, arrival: IncomingTransfer, why: str) -> News:
        """Without quarantine: nobody writes any more. The blocks that lack their content are given back by `leave`."""
        self._by_epoch.pop(arrival.epoch, None)
        for group, block in self._withdraw(arrival):
            self._cache.unpin(group, block)
        arrival.peer = 0
        return News(failed=[(arrival.seq, why)])

    # --- quarantine -------------------------------------------------------------------------------------------------

    def _withdraw(self, arrival: IncomingTransfer) -> list[Item]:
        """The blocks that may still be written, as (group, block): out of the table, and still referenced."""
        if arrival.table is None:
            return []
        blocks = [(g, self._cache.withdraw(arrival.table, g, j)) for g, j in sorted(arrival.missing)]
        arrival.missing.clear()
        return blocks

    def _lift(self, epoch: int) -> None:
        _, blocks = self._quarantine.pop(epoch, (0, []))
        for group, block in blocks:
            self._cache.unpin(group, block)


def _patience_s(arrival: IncomingTransfer) -> float:
    """Before an offer it holds nothing; once it is offered, a lack of room is ours; then blocks must come."""
    if not arrival.peer:
        return WAIT_S
    return LEASE_S if arrival.epoch else float("inf")


def _described(groups: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{tag} of {n_bytes} bytes" for tag, n_bytes in groups)


def failure(why: str) -> Unavailable:
    """Of a transfer: this engine is well. The request may be tried again, with another engine."""
    return Unavailable(why, param="transfer", retry_after_s=1)
