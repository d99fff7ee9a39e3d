"""Simulated tiers of the KV cache behind a worker's device: what they hold, how long reads take, what is fetched.

The choice between fetching and recomputing is the engine's own code; tiers evict least recently used first, as the
engine's do, unless an oracle is asked for. A tier reads and writes one thing
after the other at its rate; what it reads passes the worker's copy engine, which has a queue of its own. Blocks are
stored when they are computed, in all tiers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from emberline.kv.eviction_order import EvictionOrder
from emberline.kv.retention import Conversation, Retention
from emberline.kv.tiers import fetch_policy
from emberline.simulator.kv_cache import OnKVChange, OracleOrder
from emberline.simulator.virtual_clock import VirtualClock

RetentionName = Literal["learned", "lru", "oracle"]
Segment = tuple[int, int]  # and its length in blocks
SAFE_FILLS = 1.5
COPY_BYTES_PER_S = 50e9  # from host memory to the device, of a worker


@dataclass(frozen=True, slots=True)
class TierSpec:
    name: str
    tokens: int  # that a worker holds, or adds to what is shared
    bytes_per_s: float  # of a worker
    latency_s: float = 0.0005
    shared: bool = False  # one pool of all workers, read over the network at the rate of each of them


def make_order(name: RetentionName, n_blocks: int, retention: Retention) -> EvictionOrder:
    return OracleOrder(n_blocks, retention) if name == "oracle" else EvictionOrder(n_blocks, retention, sparse=True)


class SimTier:
    """The segments in one tier of a worker, or of all of them; each may be present in part."""

    def __init__(self, spec: TierSpec, capacity: int, clock: VirtualClock, order: EvictionOrder) -> None:
        self.spec = spec
        self.order = order
        self._is_plain = not isinstance(order, OracleOrder)  # conversations make no difference to it
        self.changed: OnKVChange | None = None
        self._capacity = capacity  # blocks
        self._clock = clock
        self._blocks: dict[int, int] = {}  # by segment
        self._owner: dict[int, str] = {}  # which worker has it, if shared
        self._free_s: dict[str, float] = {}  # when the queue of each worker's drive, memory or network ends
        self._used = 0

    def present(self, segment: int) -> int:
        return self._blocks.get(segment, 0)

    def owner(self, segment: int, reader: str) -> str:
        return self._owner.get(segment, reader) if self.spec.shared else reader

    def store(
        self, segments: Sequence[Segment], conversation: Conversation | None, writer: str, n_bytes: int = 0
    ) -> None:
        """Write them, with n_bytes for each block."""
        conversation = None if self._is_plain else conversation
        before, blocks = self._used, self._blocks
        new = [(segment, length) for segment, length in segments if blocks.get(segment, 0) < length]
        self.order.remove([segment for segment, _ in new if segment in blocks])
        if new:
            self._add([segment for segment, _ in new], conversation)
        for segment, length in new:
            known = blocks.get(segment, 0)
            blocks[segment] = length
            self._owner[segment] = writer
            self._used += length - known
            if self.changed is not None:
                self.changed(True, segment, known, length)
        self.occupy(writer, (self._used - before) * n_bytes)
        while self._used > self._capacity:
            self._evict()

    def outlives(self, n_after: int) -> bool:
        """True if what was stored before `n_after` blocks may still be there: those need not all be different."""
        return n_after < SAFE_FILLS * self._capacity

    def use(self, path: Sequence[int], n_shared: int, conversation: Conversation | None) -> None:
        """A turn begins with these segments."""
        known = [segment for segment in path if segment in self._blocks]
        if conversation is None or self._is_plain:
            self.order.remove(known)
            self.order.add_plain(known)
        elif n_shared:  # its `Retention` follows the rest
            shared = set(path[:n_shared])
            moved = [segment for segment in known if segment in shared]
            self.order.remove(moved)
            self.order.add_shared(moved)

    def occupy(self, worker: str, n_bytes: int) -> float:
        """The time at which a transfer of n_bytes that is queued now ends."""
        end_s = max(self._clock.now_s, self._free_s.get(worker, 0.0)) + n_bytes / self.spec.bytes_per_s
        self._free_s[worker] = end_s
        return end_s

    def queue(self, worker: str) -> fetch_policy.TierQueue:
        waits_s = max(0.0, self._free_s.get(worker, 0.0) - self._clock.now_s)
        rate = self.spec.bytes_per_s
        return fetch_policy.TierQueue(rate, int(waits_s * rate), self.spec.latency_s)

    def _add(self, segments: Sequence[int], conversation: Conversation | None) -> None:
        if conversation is None:
            self.order.add_plain(segments)
        else:
            self.order.add(segments, conversation)

    def _evict(self) -> None:
        segment = self.order.peek()
        assert segment is not None
        blocks = self._blocks[segment]
        evicted = min(blocks, self._used - self._capacity)
        if evicted == blocks:
            self.order.take(1)
            del self._blocks[segment], self._owner[segment]
        else:
            self._blocks[segment] = blocks - evicted
        self._used -= evicted
        if self.changed is not None:
            self.changed(False, segment, blocks - evicted, blocks)


@dataclass(slots=True)
class SimFetch:
    n_tokens: int  # that come from tiers
    arrival_s: float
    by_tier: dict[str, int]  # tokens


class WorkerTiers:
    """The tiers of one worker, fastest first; some may be shared with others."""

    def __init__(
        self, tiers: Sequence[SimTier], worker: str, block_tokens: int, kv_bytes: int, clock: VirtualClock
    ) -> None:
        self.tiers = tiers
        self.own = [tier for tier in tiers if not tier.spec.shared]
        self._worker, self._clock = worker, clock
        self._block_tokens, self._block_bytes = block_tokens, block_tokens * kv_bytes
        self._copy_free_s = 0.0

    def store(self, segments: Sequence[Segment], conversation: Conversation | None) -> None:
        for tier in self.tiers:
            tier.store(segments, conversation, self._worker, self._block_bytes)

    def remember(self, segments: Sequence[Segment], conversation: Conversation | None, n_after: int) -> None:
        """Store segments as of before the simulation began, with n_after blocks stored after them."""
        for tier in self.tiers:
            if tier.spec.shared or tier.outlives(n_after):
                tier.store(segments, conversation, self._worker)

    def use(self, path: Sequence[int], n_shared: int, conversation: Conversation | None) -> None:
        for tier in self.tiers:
            tier.use(path, n_shared, conversation)

    def fetch(
        self,
        path: Sequence[int],
        lengths: Sequence[int],
        n_device: int,
        n_prompt: int,
        compute: fetch_policy.ComputeQueue,
    ) -> SimFetch | None:
        """Begin to fetch blocks behind the first n_device of a prompt, if that is sooner than computing them."""
        parts = self._parts(path, lengths, n_device)
        runs = [
            fetch_policy.TierRun(_queue_name(tier, owner), n * self._block_tokens, n * self._block_bytes)
            for tier, owner, n in parts
        ]
        queues = {_queue_name(tier, owner): tier.queue(owner) for tier, owner, _ in parts}
        copy_s = max(0.0, self._copy_free_s - self._clock.now_s)
        copies = fetch_policy.TierQueue(COPY_BYTES_PER_S, int(copy_s * COPY_BYTES_PER_S))
        n_tail = n_prompt - n_device * self._block_tokens - sum(run.n_tokens for run in runs)
        chosen = fetch_policy.choose(runs, queues, copies, max(1, n_tail), compute)
        if chosen is None:
            return None
        n_left = chosen.n_tokens // self._block_tokens
        self._copy_free_s = self._clock.now_s + copy_s + n_left * self._block_bytes / COPY_BYTES_PER_S
        found = SimFetch(chosen.n_tokens, self._copy_free_s, {})
        for tier, owner, n in parts:
            n = min(n, n_left)
            n_left -= n
            if n:
                end_s = tier.occupy(owner, n * self._block_bytes) + tier.spec.latency_s
                found.arrival_s = max(found.arrival_s, end_s)
                name = tier.spec.name
                found.by_tier[name] = found.by_tier.get(name, 0) + n * self._block_tokens
        return found

    def _parts(self, path: Sequence[int], lengths: Sequence[int], n_device: int) -> list[tuple[SimTier, str, int]]:
        """(tier, worker that reads, blocks) of the path behind the device's blocks, up to the first that is nowhere."""
        parts: list[tuple[SimTier, str, int]] = []
        start = 0
        for segment, length in zip(path, lengths):
            have = max(0, min(length, n_device - start))
            start += length
            for tier in self.tiers:
                if have < length and (n := min(length, tier.present(segment))) > have:
                    parts.append((tier, tier.owner(segment, self._worker), n - have))
                    have = n
            if have < length:
                break
        return parts


def _queue_name(tier: SimTier, owner: str) -> str:
    return f"{tier.spec.name} of {owner}"
