"""The host-memory tier: blocks in slots of large segments of memory, also the staging area of every other tier."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

import msgspec
import numpy as np

from emberline.kv.eviction_order import EvictionOrder
from emberline.kv.host_memory import private_pages
from emberline.kv.kv_events import TierChanges
from emberline.kv.retention import Conversation, Retention
from emberline.kv.tiers.tier import BlockId, BlockMeta, TierStats

SEGMENT_BYTES = 32 << 20  # while one is pinned, at 23 to 30 GB/s, the process launches no kernels
MAX_SEGMENTS = 16_384  # larger ones rather than more: Linux allows a process 65,530 mappings
PAGE_BYTES = 4096
WRITE_WAIT_S = 1.0  # for a slot that is in use
AHEAD_BYTES = 1 << 30  # that are allocated before they are used: touching and pinning take about 0.1 s for as many

_log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class Segment:
    """Page-aligned host memory. `address` is that of its first byte."""

    buffer: memoryview
    address: int


class Slot(msgspec.Struct, eq=False, gc=False):
    """Room for one block. Its holders, or the index of the tier, keep it from being used for another."""

    buffer: memoryview
    address: int
    number: int  # among those of its size
    n_refs: int = 0
    id: BlockId | None = None  # while the tier holds a block in it
    meta: BlockMeta = BlockMeta()
    conversation: Conversation | None = None  # that its block stays with
    shared: bool = False  # its block is part of several
    used_s: float = 0.0  # monotonic
    wipe: bool = False  # its block was purged while it was in use


class SlotClass:
    """The slots for blocks of one size, and the order in which blocks are evicted from them."""

    def __init__(self, most: int) -> None:
        self.order = EvictionOrder(most, Retention(), sparse=True, by_age=True)
        self.slots: list[Slot] = []  # by number
        self.free: list[Slot] = []
        self.in_use: set[int] = set()  # numbers of slots that hold a block of the tier and are referenced
        self.n_promised = 0  # slots that blocks on their way here will take

    def add(self, slots: Sequence[Slot]) -> None:
        """To the order: in that of their chain, by what they belong to."""
        for (shared, conversation), run in groupby(slots, key=attrgetter("shared", "conversation")):
            numbers = [slot.number for slot in run]
            if shared:
                self.order.add_shared(numbers)
            elif conversation is None:
                self.order.add_plain(numbers)
            else:
                self.order.add(numbers, conversation)

    def evict(self, n: int) -> list[Slot]:
        return [self.slots[number] for number in self.order.take_others(n, but=self.in_use)]


class HostTier:
    """`sizes`: of the blocks that it must have room for. `keep` False: it only stages blocks on their way to other
    tiers and back, and holds none."""

    name = "host"
    remote = False

    def __init__(
        self,
        capacity_bytes: int,
        sizes: Iterable[int],
        keep: bool = True,
        allocate: Callable[[int], Segment] | None = None,
        segment_bytes: int = SEGMENT_BYTES,
        ahead_bytes: int = AHEAD_BYTES,
    ) -> None:
        """`segment_bytes`: wanted size of a part of memory; it is rounded to whole blocks of every size. `ahead_bytes`:
        memory that is allocated before it is used."""
        self.capacity_bytes, self.keeps = capacity_bytes, keep
        self._allocate = allocate or plain_segment
        self._without_room = sorted(set(sizes))  # block sizes that have no segment yet
        share, largest = capacity_bytes // (4 * len(self._without_room)), padded(self._without_room[-1])
        wanted = min(share, max(segment_bytes, capacity_bytes // MAX_SEGMENTS))
        self._ahead_bytes = ahead_bytes
        self.segment_bytes = max(1, wanted // largest) * largest
        self._changed = threading.Condition()  # guards everything below
        self._blocks: dict[bytes, dict[bytes, Slot]] = {}  # by layout tag and content key
        self._classes = {size: SlotClass(max(1, capacity_bytes // padded(size))) for size in self._without_room}
        self._segments: list[Segment] = []  # without slots yet
        self._allocated = 0
        self._used = 0
        self._stats = TierStats(self.name, capacity_bytes=capacity_bytes)
        self._stopped = False
        self._grows = False  # a thread allocates more
        self._wanted = False  # that thread is to allocate a segment though it is not short of memory
        self.changes: TierChanges | None = None
        self.evicted: deque[BlockId] | None = None  # what was evicted, if somebody wants to know

    # --- memory -----------------------------------------------------------------------------------------------------

    def allocate_all(self) -> None:
        """Allocate the memory ahead of its use; blocking. Until then slots are made of what there is."""
        while self.grow():
            pass

    def start_allocating(self) -> None:
        """Run `allocate_ahead` in a thread. From now on `take` waits for what it allocates."""
        self._grows = True
        threading.Thread(target=self.allocate_ahead, name="kv-allocate", daemon=True).start()

    def allocate_ahead(self) -> None:
        """Allocate memory shortly before it is used, or when `allocate_more` asks, so that a start takes no longer.
        Blocks until all memory is allocated or the tier is closed."""
        self._grows = True
        grown = True
        while grown:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or self._is_short or self._wanted)
            grown = self.grow()
            with self._changed:
                self._wanted, self._grows = False, grown
                self._changed.notify_all()

    def allocate_more(self) -> bool:
        """Wait for one more segment: while there is no work, so that a burst waits for no memory and no pinning.
        Returns False if all memory is allocated."""
        with self._changed:
            self._wanted = self._grows
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._stopped or not self._wanted)
            return self._grows and not self._stopped

    @property
    def _is_short(self) -> bool:
        unused = sum(len(segment.buffer) for segment in self._segments)
        return any(unused + len(known.free) * size < self._ahead_bytes for size, known in self._classes.items() if size)

    def grow(self) -> bool:
        """Allocate one more segment. Returns False if there is no more to allocate."""
        with self._changed:
            n_bytes = min(self.segment_bytes, self.capacity_bytes - self._allocated)
            if self._stopped or n_bytes < PAGE_BYTES:
                return False
            self._allocated += n_bytes
        try:
            segment = self._allocate(n_bytes)
        except Exception as error:  # whatever it is: what could be allocated is used
            _log.warning("no more host memory for the KV cache: %s", error)
            with self._changed:
                self.capacity_bytes = self._allocated = self._allocated - n_bytes
                self._stats.state = f"degraded: {self._allocated} bytes could be allocated, no more: {error}"
            return False
        with self._changed:
            self._segments.append(segment)
            if self._without_room:
                self._divide(self._without_room.pop())
            self._changed.notify_all()
        return True

    def _divide(self, n_bytes: int) -> None:
        """Make slots for blocks of n_bytes from a new segment."""
        segment, stride, known = self._segments.pop(), padded(n_bytes), self._classes[n_bytes]
        starts = range(0, len(segment.buffer) - n_bytes + 1, stride)
        first = len(known.slots)
        slots = [
            Slot(segment.buffer[at : at + n_bytes], segment.address + at, number)
            for number, at in enumerate(starts, first)
        ]
        known.slots += slots
        known.free += reversed(slots)

    def take(self, n_bytes: int, n: int, wait_s: float = 0.0) -> list[Slot]:
        """Up to n slots for blocks of n_bytes, with one reference each; the least recently used blocks make room.

        Fewer, or none, if all others are in use; `wait_s`: for the first of them. A caller that may wait also waits
        for memory that is being allocated, as long as that takes: a block without room would be lost.
        """
        until_s = time.monotonic() + wait_s
        with self._changed:
            while True:
                left_s = until_s - time.monotonic()
                lacks = self._n_free(n_bytes) < n
                grows = self._grows and self._is_short and not self._stopped
                if grows:
                    self._changed.notify_all()
                if wait_s > 0 and lacks and grows:
                    self._changed.wait()
                    continue
                taken = self._take(n_bytes, n)
                if taken or left_s <= 0 or self._stopped:
                    return taken
                self._changed.wait(left_s)

    def _n_free(self, n_bytes: int) -> int:
        """Slots for blocks of n_bytes that hold none, those of segments to be divided included."""
        unused = sum(len(segment.buffer) // padded(n_bytes) for segment in self._segments)
        return len(self._classes[n_bytes].free) + unused

    def _take(self, n_bytes: int, n: int) -> list[Slot]:
        known = self._classes[n_bytes]
        while len(known.free) < n and self._segments:
            self._divide(n_bytes)
        taken = [known.free.pop() for _ in range(min(n, len(known.free)))]
        taken += self._evict(known, n - len(taken))
        for slot in taken:
            slot.n_refs = 1
        return taken

    def _evict(self, known: SlotClass, n: int) -> list[Slot]:
        slots = known.evict(n)
        for slot in slots:
            assert slot.id is not None
            if self.evicted is not None:
                self.evicted.append(slot.id)
            del self._blocks[slot.id.tag][slot.id.key]
            self._forget(slot)
            self._stats.evicted += 1
        return slots

    def promise(self, n_bytes: int, n: int) -> None:
        """Evict blocks, so that there are slots for n more blocks of n_bytes, until `end_promise`."""
        with self._changed:
            known = self._classes[n_bytes]
            known.n_promised += n
            n_free = self._n_free(n_bytes) + max(0, self.capacity_bytes - self._allocated) // padded(n_bytes)
            known.free += self._evict(known, max(0, known.n_promised - n_free))

    def end_promise(self, n_bytes: int, n: int) -> None:
        """The blocks that were expected are here, or will not come."""
        with self._changed:
            self._classes[n_bytes].n_promised -= n

    def _forget(self, slot: Slot) -> None:
        if self.changes is not None and slot.id is not None:
            self.changes.removed((slot.id,))
        slot.id = slot.conversation = None
        slot.shared = False
        self._used -= len(slot.buffer)
        self._stats.blocks -= 1

    def hold(self, slots: Sequence[Slot]) -> None:
        """One more reference for each of the slots, which the caller holds."""
        with self._changed:
            for slot in slots:
                slot.n_refs += 1

    def drop(self, slots: Sequence[Slot]) -> None:
        """One reference less for each; without any, and without a block of the tier, it is free."""
        with self._changed:
            for slot in slots:
                assert slot.n_refs > 0, "a slot was dropped more often than held"
                slot.n_refs -= 1
                if slot.n_refs:
                    continue
                if slot.id is None:
                    self._release(slot)
                else:
                    self._classes[len(slot.buffer)].in_use.discard(slot.number)
            self._changed.notify_all()

    # --- blocks -----------------------------------------------------------------------------------------------------

    def put(self, ids: Sequence[BlockId], slots: Sequence[Slot], metas: Sequence[BlockMeta]) -> None:
        """The slots contain these blocks: hold them. Their references stay the caller's."""
        if not self.keeps:
            return
        now_s = time.monotonic()
        with self._changed:
            new: list[Slot] = []
            for block_id, slot, meta in zip(ids, slots, metas):
                blocks = self._blocks.setdefault(block_id.tag, {})
                if block_id.key in blocks or slot.id is not None:
                    continue
                blocks[block_id.key] = slot
                slot.id, slot.meta, slot.used_s, slot.conversation = block_id, meta, now_s, meta.conversation
                self._used += len(slot.buffer)
                self._stats.blocks += 1
                self._stats.written_bytes += len(slot.buffer)
                new.append(slot)
                if slot.n_refs:
                    self._classes[len(slot.buffer)].in_use.add(slot.number)
            self._add(new)
            if self.changes is not None and new:
                self.changes.stored([slot.id for slot in new if slot.id is not None])

    def _add(self, slots: Sequence[Slot]) -> None:
        for size, run in groupby(slots, key=lambda slot: len(slot.buffer)):
            self._classes[size].add(list(run))

    def find(self, ids: Sequence[BlockId]) -> list[Slot | None]:
        """The slots of the blocks, with one more reference each; None: not held."""
        now_s = time.monotonic()
        found: list[Slot | None] = []
        with self._changed:
            plain: list[Slot] = []
            for key, tag in ids:
                slot = self._blocks.get(tag, {}).get(key)
                if slot is not None:
                    if not slot.n_refs:
                        self._classes[len(slot.buffer)].in_use.add(slot.number)
                    slot.n_refs += 1
                    slot.used_s = now_s
                    if slot.conversation is None:
                        plain.append(slot)
                    self._stats.hits += 1
                    self._stats.read_bytes += len(slot.buffer)
                else:
                    self._stats.misses += 1
                found.append(slot)
            self._renew(plain)
        return found

    def _renew(self, slots: Sequence[Slot]) -> None:
        """Make them the last of their kind to be evicted."""
        for size, run in groupby(slots, key=lambda slot: len(slot.buffer)):
            members = list(run)
            self._classes[size].order.remove([slot.number for slot in members])
            self._classes[size].add(members)

    def holds(self, ids: Sequence[BlockId]) -> list[bool]:
        if not self.keeps or not ids:
            return [False] * len(ids)
        blocks, nothing = self._blocks, dict[bytes, Slot]()  # no lock: single lookups are atomic
        keys, tags = zip(*ids)
        if tags.count(tags[0]) == len(tags):
            return list(map(blocks.get(tags[0], nothing).__contains__, keys))
        return [key in blocks.get(tag, nothing) for key, tag in ids]

    def held(self) -> list[BlockId]:
        with self._changed:
            return [slot.id for slot in self._all() if slot.id is not None]

    def _all(self) -> Iterator[Slot]:
        return (slot for blocks in self._blocks.values() for slot in blocks.values())

    def look_up(self, ids: Sequence[BlockId]) -> None:
        """`holds` knows."""

    def read(self, ids: Sequence[BlockId], buffers: Sequence[memoryview]) -> list[bool]:
        slots = self.find(ids)
        for slot, buffer in zip(slots, buffers):
            if slot is not None:
                copy(buffer, slot.buffer)
        self.drop([slot for slot in slots if slot is not None])
        return [slot is not None for slot in slots]

    def write(self, ids: Sequence[BlockId], buffers: Sequence[memoryview], metas: Sequence[BlockMeta]) -> None:
        wait_s = WRITE_WAIT_S
        for block_id, buffer, meta in zip(ids, buffers, metas):
            slots = self.take(len(buffer), 1, wait_s) if self.keeps else []
            if not slots:
                self._stats.dropped += 1
                wait_s = 0.0  # nor is there room for the rest
                continue
            copy(slots[0].buffer, buffer)
            self.put([block_id], slots, [meta])
            self.drop(slots)

    def touch(self, ids: Sequence[BlockId], conversation: Conversation | None = None) -> None:
        now_s = time.monotonic()
        with self._changed:
            for each in self._classes.values():
                each.order.apply_changes()
            moved: list[Slot] = []
            for key, tag in ids:
                slot = self._blocks.get(tag, {}).get(key)
                if slot is None:
                    continue
                slot.used_s = now_s
                known = slot.conversation
                if known is None:
                    slot.conversation = conversation
                elif conversation is not None and conversation is not known:
                    slot.shared = True
                elif not slot.shared:
                    continue  # it stays with its conversation
                moved.append(slot)
            self._renew(moved)

    def retire(self, owner: bytes, session: bytes, first: int) -> None:
        """`Retention` tells it of conversations, and others are not known by session."""

    def follow(self, retention: Retention) -> None:
        for known in self._classes.values():
            known.order.follow(retention)

    def remove(self, ids: Sequence[BlockId]) -> None:
        with self._changed:
            for key, tag in ids:
                if (slot := self._blocks.get(tag, {}).get(key)) is not None:
                    self._remove(slot)

    evict = remove

    def purge(self, owner: bytes | None = None, session: bytes | None = None) -> int:
        with self._changed:
            found = [
                slot
                for slot in self._all()
                if owner in (None, slot.meta.owner) and session in (None, slot.meta.session)
            ]
            for slot in found:
                self._remove(slot)
        return len(found)

    def chains(self, owner: bytes, session: bytes | None) -> list[tuple[BlockId, BlockMeta]]:
        """The blocks of a session, or of all sessions of an owner, with those before them in their chains."""
        with self._changed:
            every = [(slot.id, slot.meta) for slot in self._all() if slot.id is not None]
        mine = {id_: meta for id_, meta in every if meta.owner == owner}
        found: dict[BlockId, BlockMeta] = {}
        for last, meta in mine.items():
            id_ = last if session in (None, meta.session) else BlockId(b"", b"")
            while id_ in mine and id_ not in found:
                found[id_] = mine[id_]
                id_ = BlockId(mine[id_].parent, id_.tag)
        return sorted(found.items(), key=lambda block: block[1].position)

    def _remove(self, slot: Slot) -> None:
        assert slot.id is not None
        known = self._classes[len(slot.buffer)]
        known.order.remove((slot.number,))
        known.in_use.discard(slot.number)
        del self._blocks[slot.id.tag][slot.id.key]
        self._forget(slot)
        slot.wipe = True
        if not slot.n_refs:
            self._release(slot)

    def _release(self, slot: Slot) -> None:
        if slot.wipe:  # nothing of a purged block stays
            np.frombuffer(slot.buffer, np.uint8)[:] = 0
            slot.wipe = False
        self._classes[len(slot.buffer)].free.append(slot)

    def stats(self) -> TierStats:
        with self._changed:
            self._stats.used_bytes = self._used
            firsts = [known.slots[at] for known in self._classes.values() if (at := known.order.peek()) is not None]
            self._stats.oldest_s = max((time.monotonic() - slot.used_s for slot in firsts), default=0.0)
            self._stats.capacity_bytes = self.capacity_bytes
            return msgspec.structs.replace(self._stats)

    def close(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()


def plain_segment(n_bytes: int) -> Segment:
    buffer = memoryview(private_pages(n_bytes).buffer)
    return Segment(buffer, address_of(buffer))


def address_of(buffer: memoryview) -> int:
    return int(np.frombuffer(buffer, np.uint8).ctypes.data)


def copy(target: memoryview, source: memoryview) -> None:
    """Copy without the interpreter's lock, which the step loop needs."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def padded(n_bytes: int) -> int:
    """Up to a whole number of pages, at least one: direct I/O needs aligned memory."""
    return max(1, -(-n_bytes // PAGE_BYTES)) * PAGE_BYTES
