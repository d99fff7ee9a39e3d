"""KV on its way to and from other engines, as far as the scheduler is concerned with it."""

from dataclasses import dataclass, field

from emberline.engine.scheduler.sequence import Sequence
from emberline.engine.transfer.incoming import IncomingTransfers, News, failure
from emberline.engine.transfer.outgoing import OutgoingTransfers
from emberline.kv.cache import KVCache
from emberline.kv.transfer.notices import Delivered, Granted, Rejected, Sent, Transfers
from emberline.protocol.errors import EmberlineError
from emberline.protocol.frames import EngineLoad


@dataclass(slots=True)
class Turn:
    """What the scheduler is to do now."""

    queue: list[Sequence] = field(default_factory=list)  # they can be computed, or are to be looked at again
    advance: list[Sequence] = field(default_factory=list)  # they may push what they have
    end: list[tuple[Sequence, EmberlineError | None]] = field(default_factory=list)  # None: all is delivered


class TransferCoordinator:
    """A sequence that is `away` is here: it neither waits nor runs, because its KV travels."""

    def __init__(self, cache: KVCache, transfers: Transfers, fingerprint: str) -> None:
        self.arrivals = IncomingTransfers(cache, transfers, fingerprint)
        self.pushes = OutgoingTransfers(cache, transfers)
        self._transfers = transfers
        self._turn = Turn()  # what came up outside of `hear`

    @property
    def busy(self) -> bool:
        return self.pushes.busy

    @property
    def next_s(self) -> float:
        if self._turn.end or self._turn.queue:
            return 0.0
        return min(self.arrivals.next_s, self.pushes.next_s)

    def begin(self, seq: Sequence, now_s: float) -> None:
        """A new sequence that pushes or awaits; it is away unless it is to be queued at once."""
        if seq.pushes:
            self.pushes.begin(seq, now_s)
            if not seq.n_pushable:
                seq.away = True
                self._turn.end.append((seq, None))
        elif seq.n_pushable:
            seq.away = True
            self._take(self.arrivals.expect(seq, now_s))

    def hear(self, now_s: float) -> Turn:
        """Everything that was told since the last time, and what nobody told for too long."""
        for notice in self._transfers.notices():
            if isinstance(notice, Granted | Sent | Delivered | Rejected):
                self._heard_of_push(notice, now_s)
            else:
                self._take(self.arrivals.hear(notice, now_s))
        if now_s >= self.next_s:
            self._take(self.arrivals.expire(now_s))
            late = self.pushes.expire(now_s)
            self._turn.end += [(seq, failure("the decode engine did not take the KV in time")) for seq in late]
        turn, self._turn = self._turn, Turn()
        return turn

    def ready(self) -> list[Sequence]:
        """Those whose KV turned out to be here already."""
        queue, self._turn.queue = self._turn.queue, []
        return queue

    def grant(self, seq: Sequence, spare: list[int], now_s: float) -> bool:
        """Let an offered prompt be written, if there is room."""
        news = self.arrivals.grant(seq, spare, now_s)
        if news is not None:
            self._take(news)
        return news is not None

    def leave(self, seq: Sequence) -> None:
        """The sequence has ended."""
        if seq.pushes:
            self.pushes.leave(seq, "the prefill engine gave the request up")
        elif seq.request.awaits:
            self.arrivals.leave(seq)

    def report(self, load: EngineLoad) -> None:
        load.awaiting, load.awaiting_tokens = self.arrivals.n_awaiting, self.arrivals.awaiting_tokens
        load.pushing = self.pushes.n_open
        load.blocks_pushed, load.blocks_received = self.pushes.n_pushed, self.arrivals.n_received
        load.quarantined = self.arrivals.n_quarantined

    def _take(self, news: News) -> None:
        self._turn.queue += news.ready
        self._turn.end += [(seq, failure(why)) for seq, why in news.failed]

    def _heard_of_push(self, notice: Granted | Sent | Delivered | Rejected, now_s: float) -> None:
        seq = self.pushes.hear(notice, now_s)
        if seq is None:
            return
        if isinstance(notice, Granted):
            (self._turn.queue if seq.away else self._turn.advance).append(seq)
        elif isinstance(notice, Delivered):
            self._turn.end.append((seq, None))
        elif isinstance(notice, Rejected):
            self._turn.end.append((seq, failure(notice.message)))
