"""A simulated worker's KV cache over segments: reference counts, reservations, and eviction by the engine's own code.

A prompt is a path of segments (see trace.py), so that one of thousands of blocks costs a few dozen operations. A
segment may be present in part: its first blocks.
"""

from collections.abc import Callable, Sequence

from emberline.kv.eviction_order import EvictionOrder, EvictionRun
from emberline.kv.retention import Conversation, Kind, Retention

OnKVChange = Callable[[bool, int, int, int], None]  # stored (else removed), segment, first block, end


def _ignore(stored: bool, segment: int, start: int, end: int) -> None: ...


class OracleOrder(EvictionOrder):
    """Evicts what is used again last, which only a simulation knows: Belady's algorithm, a conversation at a time."""

    def __init__(self, n_blocks: int, retention: Retention) -> None:
        super().__init__(n_blocks, retention, sparse=True)
        self.next_use_s: dict[Conversation, float] = {}

    def _choose_victim(self) -> EvictionRun:
        shared = next(iter(self._queues[Kind.SHARED].values()), None)
        others = [run for run in self._runs.values() if run.kind is not Kind.SHARED]
        if shared is not None and all(shared.used_s < run.used_s for run in others):
            return shared
        return max(others, key=self._next_use_s)

    def _next_use_s(self, run: EvictionRun) -> float:
        if run.conversation is None:
            return float("inf")
        if run.conversation.ended_s < 0:
            return float("inf") if run.kind is Kind.DEAD else 0.0
        next_s = self.next_use_s.get(run.conversation, float("inf"))
        return next_s if next_s >= self._retention.now_s else float("inf")  # it went on elsewhere


class SimKVCache:
    """Blocks are held (by running sequences), idle (cached, evicted in the given order), reserved, or free."""

    def __init__(self, capacity: int, changed: OnKVChange = _ignore, order: EvictionOrder | None = None) -> None:
        self.capacity = capacity
        self.reserved = 0  # blocks of sequences that belong to no segment (yet)
        self._held: dict[int, list[int]] = {}  # segment -> [holders, blocks]
        self._idle: dict[int, int] = {}  # segment -> blocks
        self._order = order or EvictionOrder(capacity, Retention(), sparse=True)  # of the idle ones
        self._n_held = self._n_idle = 0
        self.changed = changed

    @property
    def n_used(self) -> int:
        """Blocks that running sequences need."""
        return self.reserved + self._n_held

    @property
    def n_cached(self) -> int:
        return self._n_held + self._n_idle

    @property
    def room(self) -> int:
        """Blocks available: free and idle ones."""
        return self.capacity - self.reserved - self._n_held

    def present(self, segment: int) -> int:
        """Blocks of a segment."""
        return self._held[segment][1] if segment in self._held else self._idle.get(segment, 0)

    def match(self, path: Sequence[int], lengths: Sequence[int]) -> tuple[int, int]:
        """(segments, blocks) of the path's cached prefix; the last segment may be present in part."""
        n_blocks = 0
        held, idle = self._held, self._idle
        for place, segment in enumerate(path):
            present = held[segment][1] if segment in held else idle.get(segment, 0)
            n_blocks += present
            if present < lengths[place]:
                return place + (present > 0), n_blocks
        return len(path), n_blocks

    def idle_blocks(self, path: Sequence[int], n: int) -> int:
        """Idle blocks of the first n segments: holding them reduces `room`."""
        idle = self._idle
        return sum(idle.get(segment, 0) for segment in path[:n])

    def hold(self, path: Sequence[int], n: int) -> None:
        """Pin the first n segments, which are present, until `release`."""
        held = self._held
        for segment in path[:n]:
            entry = held.get(segment)
            if entry is not None:
                entry[0] += 1
                continue
            blocks = self._revive(segment)
            held[segment] = [1, blocks]
            self._n_held += blocks

    def reserve(self, n_blocks: int) -> None:
        """Take blocks, or return them (below 0). Evicts idle blocks; if that is not enough, `room` becomes negative."""
        self.reserved += n_blocks
        assert self.reserved >= 0, "more blocks returned than were reserved"
        self._evict()

    def publish(self, segment: int, length: int, held_before: bool) -> int:
        """A sequence has computed the segment in blocks it had reserved, and now holds it.

        Returns how many reserved blocks became the segment's: none if another sequence published it first.
        `held_before`: the sequence already holds the segment, for its first blocks.
        """
        entry = self._held.get(segment)
        if entry is None:
            blocks = self._revive(segment) if segment in self._idle else 0
            self._n_held += blocks
            entry = self._held[segment] = [0, blocks]
        entry[0] += not held_before
        new = length - entry[1]
        if new:
            self.changed(True, segment, entry[1], length)
            entry[1] = length
            self._n_held += new
            self.reserved -= new
        return new

    def release(self, path: Sequence[int], n: int, conversation: Conversation | None = None) -> None:
        """Unpin the first n segments, a turn of the conversation."""
        held = self._held
        n_shared = 0 if conversation is None else conversation.n_shared
        freed: list[int] = []
        shared: list[int] = []
        for place, segment in enumerate(path[:n]):
            entry = held[segment]
            entry[0] -= 1
            if not entry[0]:
                del held[segment]
                self._idle[segment] = entry[1]
                self._n_held -= entry[1]
                self._n_idle += entry[1]
                (shared if place < n_shared else freed).append(segment)
        if shared:
            self._order.add_shared(shared)
        if freed and conversation is not None:
            self._order.add(freed, conversation)
        elif freed:
            self._order.add_plain(freed)

    def _revive(self, segment: int) -> int:
        blocks = self._idle.pop(segment)
        self._order.remove((segment,))
        self._n_idle -= blocks
        return blocks

    def _evict(self) -> None:
        excess = self.reserved + self._n_held + self._n_idle - self.capacity
        while excess > 0 and (segment := self._order.peek()) is not None:
            blocks = self._idle[segment]
            evicted = min(blocks, excess)
            if evicted == blocks:
                self._order.take(1)
                del self._idle[segment]
            else:
                self._idle[segment] = blocks - evicted
            self._n_idle -= evicted
            excess -= evicted
            self.changed(False, segment, blocks - evicted, blocks)
