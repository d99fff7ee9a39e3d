"""The prefix index of the fleet: which worker holds which KV block.

A block is identified by the first half of its content key; a collision costs a wrong guess, never a wrong token. The
set of workers that hold it is a bitset. A worker has a slot, one bit, and gets a new slot when its cache is cleared, so
that clearing costs nothing; stale bits are swept later, many at once.
"""

import sys
from array import array
from collections import deque
from itertools import islice, repeat

from emberline.protocol.block_hash import DIGEST_BYTES

KEY_BYTES = 8  # of the 16 that a content key has
ENTRY_BYTES = 108  # measured, of a dict of such keys with shared values, between two doublings
MAX_STALE_SLOTS = 64  # before all entries are swept
_MAX_SHARED = 1 << 16

Match = list[tuple[int, int]]  # (number of leading blocks, slot bits of the workers that hold just so many)


class FleetPrefixIndex:
    """Finds leading matches by bisection: sound because engines evict the end of a prefix before its beginning."""

    def __init__(self, max_bytes: int) -> None:
        self._held: dict[int, int] = {}  # by KV events
        self._expected: dict[int, int] = {}  # by routing decisions, not confirmed yet
        self._expirations: deque[tuple[float, int, list[int]]] = deque()  # of expected blocks, in order
        self._live = 0  # slot bits in use
        self._stale = 0  # slot bits given up and not swept yet
        self._free: list[int] = []
        self._n_slots = 0
        self._shared: dict[int, int] = {}  # one int object per bitset
        self._max_keys = max(1024, max_bytes // ENTRY_BYTES)

    def __len__(self) -> int:
        return len(self._held) + len(self._expected)

    def take_slot(self) -> int:
        if not self._free:
            self._free.append(self._n_slots)
            self._n_slots += 1
        slot = self._free.pop()
        self._live |= 1 << slot
        return slot

    def drop_slot(self, slot: int) -> None:
        """Forget all blocks of its worker. The slot is not used again before the sweep."""
        self._live &= ~(1 << slot)
        self._stale |= 1 << slot
        if self._stale.bit_count() > MAX_STALE_SLOTS:
            self._sweep()

    def stored(self, slot: int, keys: bytes) -> None:
        self._set(self._held, slot, _split(keys))

    def removed(self, slot: int, keys: bytes) -> None:
        split = _split(keys)
        self._unset(self._held, slot, split)
        if self._expected:
            self._unset(self._expected, slot, split)

    def expect(self, slot: int, keys: bytes, until_s: float) -> None:
        """The worker is about to hold these blocks, in addition to those it is believed to hold."""
        if split := _split(keys):
            self._set(self._expected, slot, split)
            self._expirations.append((until_s, slot, split))

    def unexpect(self, slot: int, keys: bytes) -> None:
        if self._expected:
            self._unset(self._expected, slot, _split(keys))

    def expire(self, now_s: float) -> None:
        """Drop expected blocks that no KV event has confirmed in time."""
        while self._expirations and self._expirations[0][0] <= now_s:
            _, slot, split = self._expirations.popleft()
            if self._live >> slot & 1:
                self._unset(self._expected, slot, split)

    def match(self, keys: bytes) -> Match:
        """How many leading blocks each worker holds, deepest first. Workers in no entry hold none."""
        n = len(keys) // DIGEST_BYTES
        mask = self._mask(keys, 0) & self._live if n else 0
        match: Match = []
        # Block `low` is held by `at_low`, block `high` by a subset `at_high`; the others end in between. The later span
        # is pushed last, so that depths come out descending.
        spans = [(0, n, mask, 0)]
        while spans:
            low, high, at_low, at_high = spans.pop()
            if at_low == at_high:
                continue
            if high - low == 1:
                match.append((high, at_low ^ at_high))
                continue
            middle = (low + high) // 2
            at_middle = (self._mask(keys, middle) | at_high) & at_low
            spans.append((low, middle, at_low, at_middle))
            spans.append((middle, high, at_middle, at_high))
        return match

    def _mask(self, keys: bytes, block: int) -> int:
        start = block * DIGEST_BYTES
        key = int.from_bytes(keys[start : start + KEY_BYTES], sys.byteorder)
        return self._held.get(key, 0) | self._expected.get(key, 0)

    def _set(self, known: dict[int, int], slot: int, keys: list[int]) -> None:
        """Neighbouring blocks mostly have the same holders, or none yet: thousands of them cost a few calls."""
        bit = 1 << slot
        if known.keys().isdisjoint(keys):
            known.update(zip(keys, repeat(self._share(bit))))
        else:
            masks = list(map(known.get, keys, repeat(0)))
            after = {mask: self._share(mask | bit) for mask in set(masks)}
            known.update(zip(keys, map(after.__getitem__, masks)))
        if len(self) > self._max_keys:
            self._shrink()

    def _unset(self, known: dict[int, int], slot: int, keys: list[int]) -> None:
        bit = 1 << slot
        if known.keys().isdisjoint(keys):
            return
        masks = list(map(known.pop, keys, repeat(0)))
        if others := set(masks) - {0, bit}:
            after = {mask: self._share(mask & ~bit) for mask in others}
            known.update((key, after[mask]) for key, mask in zip(keys, masks) if mask in others)

    def _share(self, mask: int) -> int:
        """One int object for all blocks with the same holders."""
        if len(self._shared) > _MAX_SHARED:
            self._shared.clear()
        return self._shared.setdefault(mask, mask)

    def _shrink(self) -> None:
        """Drop what no live worker holds, then the oldest eighth."""
        self._sweep()
        for known in (self._expected, self._held):
            n_over = len(self) - self._max_keys * 7 // 8
            for key in list(islice(known, max(0, n_over))):
                del known[key]

    def _sweep(self) -> None:
        """Remove stale bits from all entries; only then can their slots be used again."""
        self._shared.clear()
        self._held, self._expected = self._live_entries(self._held), self._live_entries(self._expected)
        self._expirations = deque(entry for entry in self._expirations if self._live >> entry[1] & 1)
        while self._stale:
            self._free.append((self._stale & -self._stale).bit_length() - 1)
            self._stale &= self._stale - 1

    def _live_entries(self, known: dict[int, int]) -> dict[int, int]:
        live = self._live
        return {key: self._share(mask & live) for key, mask in known.items() if mask & live}


def _split(keys: bytes) -> list[int]:
    """The first half of each key, as a number in native byte order."""
    halves = array("Q", keys[: len(keys) // DIGEST_BYTES * DIGEST_BYTES])
    return halves[:: DIGEST_BYTES // KEY_BYTES].tolist()
