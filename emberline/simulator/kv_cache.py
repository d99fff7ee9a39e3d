"""A simulated worker's KV cache over segments: reference counts, reservations and LRU eviction.

A prompt is a path of segments (see trace.py), so that one of thousands of blocks costs a few dozen operations. A
segment may be present in part: its first blocks.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

OnKVChange = Callable[[bool, int, int, int], None]  # stored (else removed), segment, first block, end


def _ignore(stored: bool, segment: int, start: int, end: int) -> None: ...


class SimKVCache:
    """Blocks are held (by running sequences), idle (cached, evicted least recently used first), reserved, or free."""

    def __init__(self, capacity: int, changed: OnKVChange = _ignore) -> None:
        self.capacity = capacity
        self.reserved = 0  # blocks of sequences that belong to no segment (yet)
        self._held: dict[int, list[int]] = {}  # segment -> [holders, blocks]
        self._idle: OrderedDict[int, int] = OrderedDict()  # segment -> blocks; oldest first, children before parents
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
        held, idle = self._held, self._idle
        for segment in path[:n]:
            entry = held.get(segment)
            if entry is not None:
                entry[0] += 1
                continue
            blocks = idle.pop(segment)
            held[segment] = [1, blocks]
            self._n_idle -= blocks
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
            blocks = self._idle.pop(segment, 0)
            self._n_idle -= blocks
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

    def release(self, path: Sequence[int], n: int) -> None:
        """Unpin the first n segments; the deepest become the oldest."""
        held = self._held
        for place in range(n - 1, -1, -1):
            segment = path[place]
            entry = held[segment]
            entry[0] -= 1
            if not entry[0]:
                del held[segment]
                self._idle[segment] = entry[1]
                self._n_held -= entry[1]
                self._n_idle += entry[1]

    def _evict(self) -> None:
        excess = self.reserved + self._n_held + self._n_idle - self.capacity
        while excess > 0 and self._idle:
            segment, blocks = next(iter(self._idle.items()))
            evicted = min(blocks, excess)
            if evicted == blocks:
                del self._idle[segment]
            else:
                self._idle[segment] = blocks - evicted
            self._n_idle -= evicted
            excess -= evicted
            self.changed(False, segment, blocks - evicted, blocks)
