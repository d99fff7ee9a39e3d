"""The prefix index of the fleet: which worker holds which KV block.

A block is identified by the first half of its content key; a collision costs a wrong guess, never a wrong token. The
set of workers that hold it is a bitset. A worker has a slot, one bit, and gets a new slot when its cache is cleared, so
that clearing costs nothing.

Everything else that must be done to all entries is done by one clock hand, which visits them in the order in which they
were added, a bounded number per call: it removes the bits of slots that were given up, and evicts entries beyond the
byte limit, but for those that a prompt has used since its last visit. The index runs on the core's event loop: no call
takes longer than the keys that it is given.
"""

import sys
from array import array
from collections import deque
from itertools import repeat

from emberline.protocol.block_hash import DIGEST_BYTES

KEY_BYTES = 8  # of the 16 that a content key has
ENTRY_BYTES = 116  # measured, of a dict of such keys with shared values, between two doublings, and their order
MAX_STALE_SLOTS = 64  # before the hand goes round to remove them
VISITS = 512  # entries that the hand visits per call while it has something to do,
VISITS_PER_KEY = 2  # and for each key that is added; then entries are evicted whether used or not
MAX_EXPIRED = 1 << 14  # expected blocks that are dropped per call
_MAX_SHARED = 1 << 16
# The two lowest bits of an entry's bitset belong to the hand.
_USED = 1  # a prompt has used the block since the hand's last visit
_PHASE = 2  # flips with each visit: where it equals the hand's own, the key was visited or added in this round
_FLAGS = _USED | _PHASE

Match = list[tuple[int, int]]  # (number of leading blocks, slot bits of the workers that hold just so many)


class FleetPrefixIndex:
    """Finds leading matches by bisection: sound because engines evict the end of a prefix before its beginning."""

    def __init__(self, max_bytes: int) -> None:
        self._held: dict[int, int] = {}  # by KV events
        self._expected: dict[int, int] = {}  # by routing decisions, not confirmed yet
        self._expirations: deque[tuple[float, int, list[int]]] = deque()  # of expected blocks, in order
        self._live = 0  # slot bits in use
        self._stale = 0  # slot bits given up in this round of the hand, or in the one before it
        self._sweeping = 0  # given up before this round: after it no entry has them
        self._free: list[int] = []
        self._n_slots = _FLAGS.bit_length()
        self._shared: dict[int, int] = {}  # one int object per bitset
        self._max_keys = max(1024, max_bytes // ENTRY_BYTES)
        # Keys of `_held` in the order in which they were added or last visited. A key that was removed stays until the
        # hand comes; if it is added again meanwhile, it is here twice until then.
        self._order: deque[array[int]] = deque()
        self.n_ordered = 0  # keys in `_order`
        self.n_visited = 0  # keys that the hand has come to since the start
        self._phase = 0  # of the hand: 0 or _PHASE
        self._round_left = 0  # parts of `_order` to visit until the round is complete

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
        """Forget all blocks of its worker. The slot is not used again before no entry has its bit."""
        self._live &= ~(1 << slot)
        self._stale |= 1 << slot

    def stored(self, slot: int, keys: bytes) -> None:
        split = _split(keys)
        held, bit = self._held, 1 << slot
        masks = list(map(held.get, split, repeat(0)))
        if any(masks):
            self._append([key for key, mask in zip(split, masks) if not mask])
            after = {mask: self._share(mask | bit if mask else bit | self._phase) for mask in set(masks)}
            held.update(zip(split, map(after.__getitem__, masks)))
        else:
            self._append(split)
            held.update(zip(split, repeat(self._share(bit | self._phase))))
        self.tidy(len(split))

    def removed(self, slot: int, keys: bytes) -> None:
        split = _split(keys)
        self._unset(self._held, slot, split)
        if self._expected:
            self._unset(self._expected, slot, split)
        self.tidy()

    def used(self, keys: bytes, n_blocks: int) -> None:
        """A prompt that begins with these blocks was dispatched: they are evicted later than others."""
        held = self._held
        if not n_blocks or len(held) < self._max_keys // 2:
            return  # it does not evict soon
        first, last = _key(keys, 0), _key(keys, n_blocks - 1)
        if held.get(first, 0) & held.get(last, 0) & _USED:
            return  # all of them are marked, but for those that the hand has visited since
        split = _split(keys[: n_blocks * DIGEST_BYTES])
        masks = list(map(held.get, split, repeat(0)))
        after = {mask: self._share(mask | _USED) for mask in set(masks)}
        if 0 in after:  # some are only expected
            held.update((key, after[mask]) for key, mask in zip(split, masks) if mask)
        else:
            held.update(zip(split, map(after.__getitem__, masks)))

    def expect(self, slot: int, keys: bytes, until_s: float) -> None:
        """The worker is about to hold these blocks, in addition to those it is believed to hold."""
        if split := _split(keys):
            bit, expected = 1 << slot, self._expected
            masks = list(map(expected.get, split, repeat(0)))
            after = {mask: self._share(mask | bit) for mask in set(masks)}
            expected.update(zip(split, map(after.__getitem__, masks)))
            self._expirations.append((until_s, slot, split))
            self.tidy(len(split))

    def unexpect(self, slot: int, keys: bytes) -> None:
        if self._expected:
            self._unset(self._expected, slot, _split(keys))

    def expire(self, now_s: float) -> None:
        """Drop expected blocks that no KV event has confirmed in time."""
        n_left = MAX_EXPIRED
        while self._expirations and self._expirations[0][0] <= now_s and n_left > 0:
            n_left -= self._drop_expected()

    def tidy(self, n_added: int = 0) -> None:
        """Let the hand go on, as far as there is need and the call may take."""
        n_most = VISITS + VISITS_PER_KEY * n_added
        for spare_used in (True, False):
            n_left = n_most
            while n_left > 0 and self._has_work(spare_used):
                n_left -= 1 + self._visit(spare_used)

    def match(self, keys: bytes) -> Match:
        """Return the number of leading blocks that each worker holds, deepest first. Workers without an entry hold
        none."""
        n = len(keys) // DIGEST_BYTES
        if not n:
            return []
        held, expected = self._held.get, self._expected.get
        key = int.from_bytes(keys[:KEY_BYTES], sys.byteorder)  # `_key`, without a call
        mask = (held(key, 0) | expected(key, 0)) & self._live
        match: Match = []
        # Block `low` is held by `at_low`, block `high` by a subset `at_high`; the others end in between. The later span
        # is pushed last, so that depths come out descending. Most prompts are held to their end, or not at all.
        start = (n - 1) * DIGEST_BYTES
        key = int.from_bytes(keys[start : start + KEY_BYTES], sys.byteorder)
        at_end = (held(key, 0) | expected(key, 0)) & mask
        spans = [(0, n - 1, mask, at_end), (n - 1, n, at_end, 0)]
        while spans:
            low, high, at_low, at_high = spans.pop()
            if at_low == at_high:
                continue
            if high - low == 1:
                match.append((high, at_low ^ at_high))
                continue
            middle = (low + high) // 2
            start = middle * DIGEST_BYTES
            key = int.from_bytes(keys[start : start + KEY_BYTES], sys.byteorder)
            at_middle = (held(key, 0) | expected(key, 0) | at_high) & at_low
            spans.append((low, middle, at_low, at_middle))
            spans.append((middle, high, at_middle, at_high))
        return match

    def _unset(self, known: dict[int, int], slot: int, keys: list[int]) -> None:
        bit = 1 << slot
        if known.keys().isdisjoint(keys):
            return
        masks = list(map(known.pop, keys, repeat(0)))
        after = {mask: self._share(mask & ~bit) for mask in set(masks) if mask & ~bit & ~_FLAGS}
        if after:
            known.update((key, after[mask]) for key, mask in zip(keys, masks) if mask in after)

    def _share(self, mask: int) -> int:
        """One int object for all blocks with the same holders."""
        if len(self._shared) > _MAX_SHARED:
            self._shared.clear()
        return self._shared.setdefault(mask, mask)

    def _drop_expected(self) -> int:
        _, slot, split = self._expirations.popleft()
        self._unset(self._expected, slot, split)
        return len(split)

    # --- the clock hand ----------------------------------------------------------------------------------------------

    def _append(self, keys: list[int]) -> None:
        """Put keys behind all that the hand visits in this round."""
        self.n_ordered += len(keys)
        for start in range(0, len(keys), VISITS):
            part = keys[start : start + VISITS]
            if len(self._order) > self._round_left and len(self._order[-1]) + len(part) <= VISITS:
                self._order[-1].extend(part)
            else:
                self._order.append(array("Q", part))

    def _has_work(self, spare_used: bool) -> bool:
        if len(self) > self._max_keys and self._held:
            return True
        return spare_used and (
            (self._stale | self._sweeping).bit_count() > MAX_STALE_SLOTS
            or self.n_ordered > 2 * len(self._held) + 4 * VISITS  # most of them were removed
        )

    def _visit(self, spare_used: bool) -> int:
        """Visit the next part: how many keys that were."""
        if not self._round_left:
            self._begin_round()
        if not self._order:
            return 0
        part = self._order.popleft()
        self._round_left -= 1
        self.n_ordered -= len(part)
        self.n_visited += len(part)
        held, live, phase = self._held, self._live, self._phase
        n_over = len(self) - self._max_keys
        kept = []
        for key in part:
            mask = held.get(key)
            if mask is None or mask & _PHASE == phase:
                continue  # it was removed; in the second case added again later
            if not mask & live or (n_over > 0 and not (spare_used and mask & _USED)):
                del held[key]
                n_over -= 1
                continue
            flags = phase if n_over > 0 else phase | mask & _USED
            held[key] = self._share(mask & live | flags)
            kept.append(key)
        self._append(kept)
        return len(part)

    def _begin_round(self) -> None:
        """All entries were visited since the last time: none has the bits that were being swept."""
        pending = 0
        for _, slot, _ in self._expirations:
            pending |= 1 << slot
        swept = self._sweeping & ~pending
        self._sweeping, self._stale = self._stale | self._sweeping & pending, 0
        while swept:
            self._free.append((swept & -swept).bit_length() - 1)
            swept &= swept - 1
        self._phase ^= _PHASE
        self._round_left = len(self._order)


def _key(keys: bytes, block: int) -> int:
    start = block * DIGEST_BYTES
    return int.from_bytes(keys[start : start + KEY_BYTES], sys.byteorder)


def _split(keys: bytes) -> list[int]:
    """The first half of each key, as a number in native byte order."""
    halves = array("Q", keys[: len(keys) // DIGEST_BYTES * DIGEST_BYTES])
    return halves[:: DIGEST_BYTES // KEY_BYTES].tolist()


def shared_blocks(match: Match, slot_bits: list[int]) -> int:
    """Count the leading blocks that more than half of the workers hold: the beginning that many conversations share.
    `slot_bits` are the workers' slots."""
    bits = 0
    for of_worker in slot_bits:
        bits |= of_worker
    n_holders = 0
    for depth, mask in match:
        n_holders += (mask & bits).bit_count()
        if 2 * n_holders > len(slot_bits):
            return depth
    return 0
