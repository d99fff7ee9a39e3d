"""The threads of one tier below host memory: they read and write its blocks, and wait for it as long as it takes."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

from emberline.kv.tiers.fetch_policy import TierQueue
from emberline.kv.tiers.host import HostTier, Slot
from emberline.kv.tiers.rates import ReadRate
from emberline.kv.tiers.tier import BlockId, BlockMeta, Tier

N_READERS = 2  # one checks and passes on what it has read while the other one reads
SLOT_WAIT_S = 0.05  # between looks at whether a fetch that waits for host memory is still wanted
MAX_UNWRITTEN = 256 << 20  # bytes that wait to be written, and at most half of host memory
WRITE_WAIT_S = 1.0  # for room to write; then blocks are dropped
WRITE_BATCH_BYTES = 16 << 20
ASSUMED_RATES = {"disk": (1e9, 0.001), "pool": (1e9, 0.002)}  # bytes per second and latency, until they are measured

_log = logging.getLogger(__name__)

# What follows a read: the index of the first block, slots with the bytes (whose references it gets), which are valid.
OnRead = Callable[[int, Sequence[Slot], Sequence[bool]], None]


_Write = tuple[list[BlockId], list[Slot], list[BlockMeta]]


@dataclass(slots=True, frozen=True, eq=False)
class _Read:
    ids: Sequence[BlockId]
    size: int  # of a block
    cancelled: Callable[[], bool]
    done: OnRead


@dataclass(slots=True, frozen=True)
class _LookUp:
    ids: Sequence[BlockId]
    done: Callable[[], None]


class TierWorker:
    def __init__(self, tier: Tier, host: HostTier) -> None:
        self.tier = tier
        self._host = host
        self.rate = ReadRate(*ASSUMED_RATES.get(tier.name, (1e9, 0.001)))
        self._reads: SimpleQueue[_Read | _LookUp | None] = SimpleQueue()
        self._writes: SimpleQueue[_Write | threading.Event | None] = SimpleQueue()
        self._open_reads: set[_Read] = set()  # queued, or running
        self._read_over = threading.Condition()  # guards them
        self._max_unwritten = min(MAX_UNWRITTEN, host.capacity_bytes // 2)
        self._unwritten = 0  # bytes
        self._stalled = False  # nothing was written for as long as a block may wait
        self._written = threading.Condition()
        self.n_dropped = 0  # blocks
        self._threads = [threading.Thread(target=self._write_all, name=f"kv-{tier.name}-write", daemon=True)]
        for _ in range(N_READERS):
            self._threads.append(threading.Thread(target=self._read_all, name=f"kv-{tier.name}-read", daemon=True))
        for thread in self._threads:
            thread.start()

    def queue(self) -> TierQueue:
        return self.rate.queue()

    def look_up(self, ids: Sequence[BlockId], done: Callable[[], None]) -> None:
        self._reads.put(_LookUp(ids, done))

    def read(self, ids: Sequence[BlockId], size: int, cancelled: Callable[[], bool], done: OnRead) -> None:
        self.rate.queued(size * len(ids))
        entry = _Read(ids, size, cancelled, done)
        with self._read_over:
            self._open_reads.add(entry)
        self._reads.put(entry)

    def wait_read(self, timeout_s: float) -> bool:
        """Wait until the reads that were queued before, and what follows them, are over."""
        with self._read_over:
            before = set(self._open_reads)
            return self._read_over.wait_for(lambda: before.isdisjoint(self._open_reads), timeout_s)

    def write(self, ids: Sequence[BlockId], slots: Sequence[Slot], metas: Sequence[BlockMeta]) -> None:
        """Queue blocks to be written, those that the tier lacks; waits a while for room. Takes its own references."""
        held = self.tier.holds(ids)
        lacking = deque(at for at, has in enumerate(held) if not has)
        while lacking:
            part: list[int] = []
            n_bytes = 0
            while lacking and n_bytes < WRITE_BATCH_BYTES:
                part.append(lacking.popleft())
                n_bytes += len(slots[part[-1]].buffer)
            with self._written:
                wait_s = 0.0 if self._stalled else WRITE_WAIT_S  # else saving to other tiers would wait, too
                if not self._written.wait_for(lambda: self._unwritten < self._max_unwritten, wait_s):
                    self._stalled = True
                    self.n_dropped += len(part) + len(lacking)
                    return
                self._unwritten += n_bytes
            chosen = [slots[at] for at in part]
            self._host.hold(chosen)
            self._writes.put(([ids[at] for at in part], chosen, [metas[at] for at in part]))

    def flush(self, done: threading.Event) -> None:
        """Set the event when everything that was queued before is written."""
        self._writes.put(done)

    def stop(self, until_s: float) -> None:
        self._writes.put(None)
        for _ in range(N_READERS):
            self._reads.put(None)
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        closing = threading.Thread(target=self.tier.close, daemon=True)  # it may hang, and this process must end
        closing.start()
        closing.join(max(1.0, until_s - time.monotonic()))

    def _read_all(self) -> None:
        while (entry := self._reads.get()) is not None:
            if isinstance(entry, _LookUp):
                try:
                    self.tier.look_up(entry.ids)
                except Exception:
                    _log.exception("the %s tier cannot look up blocks", self.tier.name)
                entry.done()
                continue
            try:
                self._read(entry)
            finally:
                with self._read_over:
                    self._open_reads.remove(entry)
                    self._read_over.notify_all()

    def _read(self, entry: _Read) -> None:
        """In parts, as there are slots. Of a cancelled read the rest is not read."""
        at, n = 0, len(entry.ids)
        while at < n:
            slots: list[Slot] = []
            while not slots and not entry.cancelled():
                slots = self._host.take(entry.size, n - at, wait_s=SLOT_WAIT_S)
            if not slots:
                self.rate.dropped(entry.size * (n - at))
                return
            ids = entry.ids[at : at + len(slots)]
            self.rate.begin()
            try:
                valid = self.tier.read(ids, [slot.buffer for slot in slots])
                assert len(valid) == len(ids)
            except Exception:
                _log.exception("the %s tier failed to read blocks", self.tier.name)
                valid = [False] * len(ids)
            self.rate.done(entry.size * len(ids), entry.size * sum(valid))
            entry.done(at, slots, valid)
            at += len(slots)

    def _write_all(self) -> None:
        while (entry := self._writes.get()) is not None:
            if isinstance(entry, threading.Event):
                entry.set()
                continue
            ids, slots, metas = entry
            try:
                self.tier.write(ids, [slot.buffer for slot in slots], metas)
            except Exception:
                _log.exception("the %s tier failed to write blocks", self.tier.name)
            self._host.drop(slots)
            with self._written:
                self._unwritten -= sum(len(slot.buffer) for slot in slots)
                self._stalled = False
                self._written.notify_all()
