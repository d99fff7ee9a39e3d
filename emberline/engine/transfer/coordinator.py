"""KV transfers as the scheduler sees them: which sequences wait for one, and which can go on."""

from dataclasses import dataclass, field

from emberline.engine.core.sequence import Sequence
from emberline.engine.transfer.incoming import IncomingTransfers, transfer_failed
from emberline.engine.transfer.outgoing import OutgoingTransfers
from emberline.kv.cache import KVCache
from emberline.kv.transfer import notices
from emberline.kv.transfer.notices import Notice, SenderNotice, TransferPort
from emberline.protocol.errors import BadInput, EmberlineError, Unavailable
from emberline.protocol.frames import EngineLoad
from emberline.protocol.request import EngineRequest


class NoTransfers:
    """The port of an engine without transfers: `TransferCoordinator.check` lets no request reach its commands."""

    def notices(self) -> list[Notice]:
        return []

    def _refuse(self, *args: object, **kwargs: object) -> None:
        raise AssertionError("this engine does not transfer KV")

    offer = send = cancel = grant = deny = revoke = _refuse


@dataclass(slots=True)
class TransferUpdate:
    """What the scheduler has to do now."""

    ready: list[Sequence] = field(default_factory=list)  # to be queued
    granted: list[Sequence] = field(default_factory=list)  # may send the blocks they have
    ended: list[tuple[Sequence, EmberlineError | None]] = field(default_factory=list)  # None: all is acknowledged


class TransferCoordinator:
    """Owns the sequences that are `in_transfer`: neither waiting nor running.

    The port leads to the threads that own the connections (kv/transfer); blocks and epochs are owned here.
    """

    def __init__(self, cache: KVCache, port: TransferPort | None, fingerprint: str) -> None:
        self._port: TransferPort = NoTransfers() if port is None else port
        self._enabled = port is not None
        self._update = TransferUpdate()  # for the next `poll`
        self.incoming = IncomingTransfers(cache, self._port, fingerprint, self._ready, self._fail)
        self.outgoing = OutgoingTransfers(cache, self._port)

    @property
    def busy(self) -> bool:
        return self.outgoing.busy

    @property
    def wake_s(self) -> float:
        if self._update.ended or self._update.ready:
            return 0.0
        return min(self.incoming.wake_s, self.outgoing.wake_s)

    def check(self, request: EngineRequest) -> None:
        if request.push is None and not request.awaits:
            return
        if not self._enabled:
            raise Unavailable("this engine does not transfer KV", param="transfer")
        if request.push is not None and request.awaits:
            raise BadInput("a request sends its KV or receives it, not both", param="awaits")
        if request.awaits:
            self.incoming.check(request.awaits)

    def begin(self, seq: Sequence, now_s: float) -> None:
        """A new sequence; it is in transfer unless it is to be queued at once."""
        if seq.prefill_only:
            self.outgoing.begin(seq, now_s)
            if not seq.n_transferable:
                seq.in_transfer = True
                self._update.ended.append((seq, None))
        elif seq.request.awaits and seq.n_transferable:
            seq.in_transfer = True
            self.incoming.expect(seq, now_s)

    def poll(self, now_s: float) -> TransferUpdate | None:
        """The effect of all notices and timeouts since the last call; None: nothing is transferred."""
        arrived, update = self._port.notices(), self._update
        if not (arrived or self.incoming.busy or self.outgoing.busy or update.ended or update.ready or update.granted):
            return None
        for notice in arrived:
            if isinstance(notice, SenderNotice):
                self._handle_sender(notice, now_s)
            else:
                self.incoming.handle(notice, now_s)
        if now_s >= self.wake_s:
            self.incoming.expire(now_s)
            for seq in self.outgoing.expired(now_s):
                self._fail(seq, "the decode engine did not take the KV in time")
        update, self._update = self._update, TransferUpdate()
        return update

    def take_ready(self) -> list[Sequence]:
        """Those whose grant found all blocks in the cache."""
        ready, self._update.ready = self._update.ready, []
        return ready

    def leave(self, seq: Sequence) -> None:
        """The sequence has ended."""
        if seq.prefill_only:
            self.outgoing.leave(seq, "the prefill engine gave up the request")
        elif seq.request.awaits:
            self.incoming.leave(seq)

    def report(self, load: EngineLoad) -> None:
        load.awaiting, load.awaiting_tokens = self.incoming.n_awaiting, self.incoming.awaiting_tokens
        load.pushing = self.outgoing.n_open
        load.blocks_pushed, load.blocks_received = self.outgoing.n_acked, self.incoming.n_received
        load.quarantined = self.incoming.n_quarantined

    def _ready(self, seq: Sequence) -> None:
        self._update.ready.append(seq)

    def _fail(self, seq: Sequence, why: str) -> None:
        self._update.ended.append((seq, transfer_failed(why)))

    def _handle_sender(self, notice: SenderNotice, now_s: float) -> None:
        seq = self.outgoing.handle(notice, now_s)
        if seq is None or isinstance(notice, notices.BlocksReleased):
            return
        if isinstance(notice, notices.OfferGranted):
            (self._update.ready if seq.in_transfer else self._update.granted).append(seq)
        elif isinstance(notice, notices.SendAcked):
            self._update.ended.append((seq, None))
        elif isinstance(notice, notices.SendRejected):
            self._fail(seq, notice.message)
