"""Prefill/decode disaggregation as the scheduler sees it: sequences that send KV to another engine, or await it."""

from functools import partial
from typing import TypeVar

from emberline.engine.core.feature import Brought, Core, Feature
from emberline.engine.core.sequence import NO_SLOT, Flag, Hold, Sequence
from emberline.engine.transfer.incoming import IncomingTransfers, transfer_failed
from emberline.engine.transfer.outgoing import OutgoingTransfers
from emberline.kv.transfer import notices
from emberline.kv.transfer.group_transfers import GroupTransfers
from emberline.kv.transfer.messages import Item
from emberline.kv.transfer.notices import SenderNotice
from emberline.protocol.block_hash import BLOCK_TOKENS
from emberline.protocol.errors import BadInput, EmberlineError
from emberline.protocol.frames import EngineLoad
from emberline.protocol.request import EngineRequest

T = TypeVar("T")
PUSHED = "pushed"  # the source of received blocks, in the usage of a request


class Handover(Feature):
    """Owns the sequences with `Hold.TRANSFER`: neither waiting nor running.

    The port leads to the threads that own the connections (kv/transfer); blocks and epochs are owned here.
    """

    name = "transfers"
    transfers_kv = True

    def __init__(self, port: GroupTransfers, fingerprint: str) -> None:
        self._port = port
        self.executor = port.own
        self._fingerprint = fingerprint
        self._n_releases = -1  # cache.n_releases when transfers were last granted; -1: with steps in flight
        # What the next `advance` does:
        self._ready: list[Sequence] = []  # to be queued
        self._granted: list[Sequence] = []  # may send the blocks they have
        self._ended: list[tuple[Sequence, EmberlineError | None]] = []  # None: all is acknowledged

    def attach(self, core: Core) -> None:
        """Keep the scheduler, over whose cache transfers are made."""
        super().attach(core)
        self._port.order = partial(core.order, self.name)
        self.incoming = IncomingTransfers(core.cache, self._port, self._fingerprint, self._ready.append, self._fail)
        self.outgoing = OutgoingTransfers(core.cache, self._port)

    def references(self) -> dict[Item, int]:
        """Number of references to KV blocks that transfers hold, by (group, block)."""
        return self.incoming.references() + self.outgoing.references()

    # --- a sequence --------------------------------------------------------------------------------------------------

    def check(self, request: EngineRequest) -> None:
        """Raise BadInput for a request that both sends and receives, or that awaits a transfer in use."""
        if request.push is not None and request.awaits:
            raise BadInput("a request sends its KV or receives it, not both", param="awaits")
        if request.awaits:
            self.incoming.check(request.awaits)

    def enter(self, seq: Sequence, now_s: float) -> None:
        """Take note of a sequence that sends or awaits KV, and hold it unless it is to be queued at once."""
        request = seq.request
        if request.push is not None:  # the full blocks of its prompt are computed and sent; nothing is sampled
            seq.set_flag(Flag.PREFILL_ONLY, True)
            del seq.ids[4 * BLOCK_TOKENS * seq.n_transferable :]
            self.outgoing.begin(seq, now_s)
            if not seq.n_transferable:
                seq.holds |= Hold.TRANSFER
                self._ended.append((seq, None))
        elif request.awaits and seq.n_transferable:
            seq.holds |= Hold.TRANSFER
            self.incoming.expect(seq, now_s)

    def precedes(self, seq: Sequence) -> bool:
        """True if an offered prompt of a better rank waits for blocks."""
        return any(other.rank < seq.rank for other in self.incoming.ungranted())

    def gives_back(self, seq: Sequence) -> bool:
        """Give back the received blocks of a prompt of a worse rank; they stay cached until others need the room."""
        return self.incoming.give_back(seq)

    def bring(self, seq: Sequence) -> Brought | None:
        """Say how many blocks were received."""
        if not seq.n_received:
            return None
        n_blocks = self.incoming.n_received_blocks(seq)
        return Brought({PUSHED: n_blocks} if n_blocks else {}, cached=False)

    def admitted(self, seq: Sequence, n_hit: int) -> None:
        """Give up the references to received blocks; offer and send what is cached of a prompt to send."""
        if seq.n_received:
            self.incoming.leave(seq)  # its own table holds the received blocks now
            seq.n_received = 0
        if seq.request.push is not None:
            self.outgoing.offer(seq)
            self.outgoing.send(seq, n_hit)
            if n_hit == seq.n_transferable:  # it has all of it and needs no slot
                seq.holds |= Hold.TRANSFER

    def computed(self, seq: Sequence, n_tokens: int) -> None:
        """Send the computed blocks of a prompt; with the last of them the sequence gives up its slot."""
        if seq.request.push is None:
            return
        self.outgoing.send(seq, seq.table.n_published)
        if n_tokens == seq.n_tokens:
            self.core.park(seq, Hold.TRANSFER)
        if self.outgoing.is_first_report(seq):
            self.core.tell_usage(seq)

    def leave(self, seq: Sequence) -> None:
        """End the transfer of a sequence."""
        if seq.request.push is not None:
            self.outgoing.leave(seq, "the prefill engine gave up the request")
        elif seq.request.awaits:
            self.incoming.leave(seq)

    # --- a step ------------------------------------------------------------------------------------------------------

    def advance(self, now_s: float, device_waits: bool) -> None:
        """Handle notices and timeouts, and grant what there is room for."""
        arrived = self._port.notices()
        if not (arrived or self.incoming.busy or self.outgoing.busy or self._ended or self._ready or self._granted):
            return
        for notice in arrived:
            if isinstance(notice, SenderNotice):
                self._handle_sender(notice, now_s)
            else:
                self.incoming.handle(notice, now_s)
        if now_s >= self.wake_s():
            self.incoming.expire(now_s)
            for seq in self.outgoing.expired(now_s):
                self._fail(seq, "the decode engine did not take the KV in time")
        self._act(now_s)

    def _act(self, now_s: float) -> None:
        """End, send, grant and queue what notices and timeouts have said."""
        for seq, error in _taken(self._ended):
            if self.core.has(seq):
                if error is None:
                    self.core.end(seq, "stop")
                else:
                    self.core.fail(seq, error)
        for seq in _taken(self._granted):
            if seq.slot != NO_SLOT:
                self.outgoing.send(seq, seq.table.n_published)
        self._grant(now_s)
        for seq in _taken(self._ready):
            if seq.holds & Hold.TRANSFER and self.core.has(seq):
                seq.n_received = BLOCK_TOKENS * seq.n_transferable if seq.samples else 0
                self.core.unpark(seq, Hold.TRANSFER)

    def _grant(self, now_s: float) -> None:
        """Reserve blocks for offered prompts, in rank order; not ahead of a waiting sequence that does not fit."""
        cache, admission = self.core.cache, self.core.admission
        self._n_releases = -1 if cache.fence.in_flight else cache.n_releases
        for seq in self.incoming.ungranted():
            if admission.would_overtake(seq):
                return
            seq.extend_keys()
            if not self.incoming.grant(seq, admission.reserved_for_running(), now_s):
                return

    # --- what the engine's owner asks --------------------------------------------------------------------------------

    def busy(self) -> bool:
        """True if a prompt is being sent, or its blocks are still read."""
        return self.outgoing.busy

    def has_notices(self) -> bool:
        """True if a rank has reported something of a transfer."""
        return self._port.has_notices

    def has_work(self) -> bool:
        """True if offered prompts wait for blocks, and some may have become free for them since the last attempt."""
        return self._n_releases != self.core.cache.n_releases and bool(self.incoming.ungranted())

    def wake_s(self) -> float:
        """Time of the next timeout; now, if a sequence has ended or is ready."""
        return 0.0 if self._ended or self._ready else min(self.incoming.wake_s, self.outgoing.wake_s)

    def report(self, load: EngineLoad) -> None:
        """Add transfers to a load report."""
        load.awaiting, load.awaiting_tokens = self.incoming.n_awaiting, self.incoming.awaiting_tokens
        load.pushing = self.outgoing.n_open
        load.blocks_pushed, load.blocks_received = self.outgoing.n_acked, self.incoming.n_received
        load.quarantined = self.incoming.n_quarantined

    def _fail(self, seq: Sequence, why: str) -> None:
        self._ended.append((seq, transfer_failed(why)))

    def _handle_sender(self, notice: SenderNotice, now_s: float) -> None:
        seq = self.outgoing.handle(notice, now_s)
        if seq is None or isinstance(notice, notices.BlocksReleased):
            return
        if isinstance(notice, notices.OfferGranted):
            (self._ready if seq.holds & Hold.TRANSFER else self._granted).append(seq)
        elif isinstance(notice, notices.SendAcked):
            self._ended.append((seq, None))
        elif isinstance(notice, notices.SendRejected):
            self._fail(seq, notice.message)


def _taken(items: list[T]) -> list[T]:
    """Empty a list and return what it had."""
    taken = items[:]
    items.clear()
    return taken
