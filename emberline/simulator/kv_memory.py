"""A modelled worker's KV memory: which runs of blocks it holds, for whom, and which go first.

Prompts are paths in a tree of segments (runs of blocks that no prompt of the trace parts), so that a prompt of two
thousand blocks costs a few dozen steps. A segment may be there in part: its first blocks.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

Changed = Callable[[bool, int, int, int], None]  # stored (or removed), segment, blocks from, to


def _ignore(stored: bool, segment: int, start: int, end: int) -> None: ...


class Cache:
    """Blocks are held (by sequences that run), cached (evicted least recently used first), reserved, or free."""

    def __init__(self, capacity: int, changed: Changed = _ignore) -> None:
        self.capacity = capacity
        self.reserved = 0  # blocks of sequences that are not (yet) of a shared segment
        self._held: dict[int, list[int]] = {}  # segment -> [holders, blocks]
        self._idle: OrderedDict[int, int] = OrderedDict()  # segment -> blocks; oldest first, children before parents
        self._n_held = self._n_idle = 0
        self._changed = changed

    @property
    def n_used(self) -> int:
        """Blocks that somebody needs now."""
        return self.reserved + self._n_held

    @property
    def n_cached(self) -> int:
        return self._n_held + self._n_idle

    @property
    def room(self) -> int:
        """Blocks that could be had: free ones, and cached ones that nobody holds."""
        return self.capacity - self.reserved - self._n_held

    def match(self, path: Sequence[int], lengths: Sequence[int]) -> tuple[int, int]:
        """(segments, blocks) of the path's beginning that are there; the last of the segments perhaps in part."""
        n_blocks = 0
        held, idle = self._held, self._idle
        for place, segment in enumerate(path):
            there = held[segment][1] if segment in held else idle.get(segment, 0)
            n_blocks += there
            if there < lengths[place]:
                return place + (there > 0), n_blocks
        return len(path), n_blocks

    def idle_blocks(self, path: Sequence[int], n: int) -> int:
        """Of the first n segments, blocks that nobody holds yet: holding them takes away from `room`."""
        idle = self._idle
        return sum(idle.get(segment, 0) for segment in path[:n])

    def hold(self, path: Sequence[int], n: int) -> None:
        """Keep the first n segments, which are there, until `release`."""
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
        """Take so many blocks, or give them back (below 0). Cached ones make room; when none can, `room` is below 0."""
        self.reserved += n_blocks
        assert self.reserved >= 0, "more blocks given back than were reserved"
        self._make_room()

    def publish(self, segment: int, length: int, held_before: bool) -> int:
        """A sequence has computed the segment in blocks it had reserved, and now holds it.

        Returns how many of its reserved blocks became the segment's: none where another was faster.
        `held_before`: the sequence holds the segment already, for its first blocks.
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
            self._changed(True, segment, entry[1], length)
            entry[1] = length
            self._n_held += new
            self.reserved -= new
        return new

    def release(self, path: Sequence[int], n: int) -> None:
        """The first n segments are not needed by this sequence any more; the deepest become the oldest."""
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

    def _make_room(self) -> None:
        excess = self.reserved + self._n_held + self._n_idle - self.capacity
        while excess > 0 and self._idle:
            segment, blocks = next(iter(self._idle.items()))
            gone = min(blocks, excess)
            if gone == blocks:
                del self._idle[segment]
            else:
                self._idle[segment] = blocks - gone
            self._n_idle -= gone
            excess -= gone
            self._changed(False, segment, blocks - gone, blocks)
