"""KV on its way from a prefill worker to a decode worker: chunk by chunk, behind the computing of the next."""

from dataclasses import dataclass

from emberline.simulator.job import Seq
from emberline.simulator.virtual_clock import Clock
from emberline.simulator.worker import Worker


@dataclass(frozen=True, slots=True)
class Wire:
    bytes_per_s: float = 50e9  # of a worker, out and in: a 400 Gbit/s network card
    latency_s: float = 0.001  # of a push, beside its bytes


class Transfer:
    """One job's. It begins when decode has made room, and ends when the last full block has landed."""

    def __init__(self, links: "Links", target: Worker, n_prompt: int) -> None:
        self._links, self._target = links, target
        self._last = (n_prompt - 1) // 16 * 16
        self._seq: Seq | None = None  # decode's, once it has room
        self._ready = 0  # prompt tokens that prefill has
        self._sent = 0
        self._source = ""

    def granted(self, seq: Seq) -> None:
        """Decode has made room; what it has cached itself need not come."""
        self._seq, self._sent = seq, seq.done
        self._push()

    def computed(self, source: str, ready: int) -> None:
        self._source, self._ready = source, ready
        self._push()

    def _push(self) -> None:
        if self._seq is None or not self._source:
            return
        upto = min(self._ready, self._last)
        n_tokens, self._sent = max(0, upto - self._sent), max(upto, self._sent)
        landed_s = self._links.send(self._source, self._target, n_tokens)
        if self._ready >= self._last:
            seq, self._seq = self._seq, None
            self._links.clock.at(landed_s, self._target.landed, seq)


class Links:
    """Every worker's way out and way in carry one push at a time."""

    def __init__(self, clock: Clock, wire: Wire) -> None:
        self.clock = clock
        self.n_bytes = 0
        self._wire = wire
        self._out: dict[str, float] = {}  # when it is free
        self._in: dict[str, float] = {}

    def send(self, source: str, target: Worker, n_tokens: int) -> float:
        """When so many tokens, sent now, will be there."""
        n_bytes = n_tokens * target.model.kv_bytes
        begins_s = max(self.clock.now_s, self._out.get(source, 0.0), self._in.get(target.name, 0.0))
        ends_s = begins_s + n_bytes / self._wire.bytes_per_s
        self._out[source] = self._in[target.name] = ends_s
        self.n_bytes += n_bytes
        return ends_s + self._wire.latency_s
