"""Index of a block file's slots: in memory, and as one record per slot in an index file.

The index is a hint: what a slot holds is verified whenever it is read. But purging relies on it, so a record names
the owner of a slot's bytes until they are overwritten or wiped, also after the block was evicted. The records are read
at once at start, 96 bytes each: 240 MB for 40 million tokens.
"""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from itertools import groupby
from pathlib import Path

import numpy as np
import numpy.typing as npt

from emberline.kv.eviction_order import EvictionOrder
from emberline.kv.retention import Conversation, Retention
from emberline.kv.tiers.tier import BlockMeta
from emberline.protocol import block_hash

RECORD = np.dtype(
    [
        ("check", "<u8"),
        ("state", "u1"),
        ("verified", "u1"),  # 0: after a crash of the machine the slot's bytes may be others than the record says
        ("unused", "<u2"),
        ("position", "<u4"),
        ("key", "V16"),
        ("owner", "V16"),
        ("session", "V16"),
        ("parent", "V16"),
        ("priority", "<i4"),
        ("keep_s", "<f4"),
        ("saved_s", "<u4"),  # Unix time
        ("used_s", "<u4"),
    ]
)
_WORDS = RECORD.itemsize // 8
_FACTORS = np.array([0x9E3779B97F4A7C15 * (2 * i + 1) % 2**64 | 1 for i in range(1, _WORDS)], dtype=np.uint64)
_CHUNK = 4096  # records

Slots = Sequence[int]


class SlotState(IntEnum):
    FREE = 0  # never written, or wiped
    WRITING = 1  # may hold parts of two blocks
    VALID = 2
    DEAD = 3  # the block is not served any more, but its bytes are still there


class SlotIndex:
    """The slots of one layout. Not thread-safe except for `slots`, which the step loop reads."""

    def __init__(self, n_slots: int) -> None:
        self.records = np.zeros(n_slots, RECORD)
        self.slots: dict[bytes, int] = {}  # of valid blocks, by content key
        self.n_ready = 0  # leading slots whose space in the block file is allocated
        self.n_used = 0  # leading slots that were ever written
        self.evicted = 0  # blocks
        self._free: list[int] = []  # below n_used
        self.on_change: Callable[[bytes, bool], None] = lambda key, stored: None  # a block was stored, or is gone
        self.on_evict: Callable[[bytes], None] = lambda key: None  # a block is gone because another needed its slot
        self.order = EvictionOrder(n_slots, Retention(), by_age=True)  # of valid blocks
        self._of: dict[int, Conversation] = {}  # the conversation of a slot's block, where it is known
        self._shared: set[int] = set()  # slots whose block is part of several

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def n_free(self) -> int:
        """Slots that are written again before the file grows."""
        return len(self._free)

    def meta(self, slot: int) -> BlockMeta:
        record = self.records[slot]
        owner, session, parent = (_stripped(record[name].tobytes()) for name in ("owner", "session", "parent"))
        times = float(record["saved_s"]), float(record["used_s"])
        hints = int(record["priority"]), float(record["keep_s"])
        return BlockMeta(owner, session, int(record["position"]), parent, *hints, *times)

    def touch(self, keys: Iterable[bytes], conversation: Conversation | None = None) -> None:
        now_s = int(time.time())
        used_s, moved = self.records["used_s"], list[int]()
        self.order.apply_changes()
        for key in keys:
            if (slot := self.slots.get(key)) is None:
                continue
            used_s[slot] = now_s
            known = self._of.get(slot)
            if known is None:
                if conversation is not None:
                    self._of[slot] = conversation
            elif conversation is not None and conversation is not known:
                self._shared.add(slot)
            elif slot not in self._shared:
                continue  # it stays with its conversation
            moved.append(slot)
        self.order.remove(moved)
        self._add(moved)

    def _add(self, slots: Slots) -> None:
        """To the order: in that of their chain, by what they belong to."""
        of, shared = self._of, self._shared
        for (is_shared, _), run in groupby(slots, key=lambda slot: (slot in shared, id(of.get(slot)))):
            members = list(run)
            conversation = of.get(members[0])
            if is_shared:
                self.order.add_shared(members)
            elif conversation is None:
                self.order.add_plain(members)
            else:
                self.order.add(members, conversation)

    def _leave(self, slot: int) -> None:
        self._of.pop(slot, None)
        self._shared.discard(slot)

    def retire(self, owner: bytes, session: bytes, first: int) -> None:
        """Evict the session's blocks from this position on before all others."""
        records = self.records[: self.n_used]
        mine = (records["state"] == SlotState.VALID) & (records["position"] >= first)
        mine &= _equal(records, "session", session) & _equal(records, "owner", owner)
        found = np.flatnonzero(mine)
        records["used_s"][found] = 1
        slots = found[np.argsort(records["position"][found], kind="stable")].tolist()
        self.order.remove(slots)
        self.order.add_dead(slots)
        for slot in slots:
            self._leave(slot)

    def take(self, n: int) -> list[int]:
        """Up to n slots to write, ascending; the blocks that they held are evicted."""
        taken = [self._free.pop() for _ in range(min(n, len(self._free)))]
        n_fresh = max(0, min(n - len(taken), self.n_ready - self.n_used))
        taken += range(self.n_used, self.n_used + n_fresh)
        self.n_used += n_fresh
        return sorted(taken + self.evict(n - len(taken)))

    def begin(self, slots: Slots, keys: Sequence[bytes], metas: Sequence[BlockMeta]) -> None:
        """Record that these blocks are about to be written to these slots."""
        now_s = int(time.time())
        for slot, key, meta in zip(slots, keys, metas):
            saved_s, used_s = int(meta.saved_s or now_s), int(meta.used_s or now_s)
            hints = meta.priority, min(meta.keep_s, 1e9)
            names = (name.ljust(16, b"\0") for name in (meta.owner, meta.session, meta.parent))
            if meta.conversation is not None:
                self._of[slot] = meta.conversation
            self.records[slot] = (0, SlotState.WRITING, 1, 0, meta.position, key, *names, *hints, saved_s, used_s)

    def commit(self, slot: int) -> None:
        """Record that the slot's block is written."""
        self.records["state"][slot] = SlotState.VALID
        key = self.records["key"][slot].tobytes()
        self.slots[key] = slot
        self._add((slot,))
        self.on_change(key, True)

    def drop(self, keys: Iterable[bytes]) -> list[int]:
        """Serve these blocks no more. Returns the slots of those that were there, which may be written again."""
        dropped = {key: slot for key in keys if (slot := self.slots.pop(key, None)) is not None}
        slots = list(dropped.values())
        self.order.remove(slots)
        self._free += slots
        self._forget(dropped)
        return slots

    def _forget(self, gone: dict[bytes, int]) -> None:
        """Take note of blocks, with their slots, that are served no more and have left the order."""
        self.records["state"][list(gone.values())] = SlotState.DEAD
        for key, slot in gone.items():
            self._leave(slot)
            self.on_change(key, False)

    def abandon(self, slot: int) -> None:
        """A write failed: the slot may hold parts of two blocks until it is written or wiped."""
        self._leave(slot)
        self._free.insert(0, slot)  # the last to be tried again

    def belonging(self, owner: bytes | None, session: bytes | None) -> npt.NDArray[np.int64]:
        """Slots that may hold bytes of the owner or session, valid or not; without either, all that hold any."""
        records = self.records[: self.n_used]
        mine = records["state"] != SlotState.FREE
        uncertain = mine & ((records["state"] == SlotState.WRITING) | (records["verified"] == 0))
        for name, value in (("owner", owner), ("session", session)):
            if value is not None:
                mine &= _equal(records, name, value)
        return np.flatnonzero(mine | uncertain)

    def without_block(self) -> list[int]:
        """Slots whose content is not served."""
        return np.flatnonzero(self.records["state"][: self.n_used] != SlotState.VALID).tolist()

    def chains(self, owner: bytes, session: bytes | None) -> list[tuple[bytes, BlockMeta]]:
        """The valid blocks of a session, or of all of the owner's, and those before them in their chains."""
        found: dict[bytes, BlockMeta] = {}
        records = self.records[: self.n_used]
        mine = (records["state"] == SlotState.VALID) & _equal(records, "owner", owner)
        if session is not None:
            mine &= _equal(records, "session", session)
        for last in np.flatnonzero(mine).tolist():
            slot: int | None = last
            while slot is not None and (key := self.records["key"][slot].tobytes()) not in found:
                found[key] = self.meta(slot)
                slot = self.slots.get(found[key].parent)
        return sorted(found.items(), key=lambda block: block[1].position)

    def hide(self, slots: Iterable[int]) -> None:
        """Serve nothing of these slots any more; their bytes are still there."""
        mine = np.fromiter(slots, np.int64)
        valid = mine[self.records["state"][mine] == SlotState.VALID]
        self.drop(block_hash.split(self.records["key"][valid].tobytes()))

    def clear(self, slots: Slots) -> None:
        """The slots, which are hidden, are wiped."""
        self.records[list(slots)] = np.zeros((), RECORD)

    def oldest_s(self) -> float:
        """Unix time of the block that was not used for longest; 0: there is none."""
        valid = self.records["state"][: self.n_used] == SlotState.VALID
        return float(self.records["used_s"][: self.n_used][valid].min()) if valid.any() else 0.0

    def next_used_s(self) -> int:
        """Unix time at which the block that is evicted next was used; 0: there is none. Looks at this block alone."""
        slot = self.order.peek()
        return 0 if slot is None else int(self.records["used_s"][slot])

    def evict(self, most: int) -> list[int]:
        """Serve the blocks no more that are evicted first. Returns their slots, which are the caller's."""
        slots = self.order.take(min(most, len(self.slots)))
        keys = block_hash.split(self.records["key"][slots].tobytes())
        self._forget({key: self.slots.pop(key) for key in keys})
        for key in keys:
            self.on_evict(key)
        self.evicted += len(slots)
        return slots

    # --- the file --------------------------------------------------------------------------------------------------

    def load(self, path: Path, n_bytes_held: int, slot_bytes: int, trusted: bool) -> list[int]:
        """Read the records of a file; slots to wipe, which were being written when the process died.

        `trusted`: the file was written by a process that ended on this start of the machine, or ended orderly.
        """
        self.n_used = self.n_ready = min(len(self.records), -(-n_bytes_held // slot_bytes))
        records = self.records[: self.n_used]
        n = 0
        if path.exists():
            with path.open("rb") as file:
                n = file.readinto(records.view(np.uint8).data) // RECORD.itemsize
        intact = (_checks(records) == records["check"]) | (_words(records) == 0).all(axis=1)
        intact[n:] = False  # the index lacks slots that the block file has
        records[~intact] = np.zeros((), RECORD)
        records["state"][~intact] = SlotState.DEAD
        if not trusted:
            records["verified"] = 0
            records["state"][records["state"] == SlotState.FREE] = SlotState.DEAD
        valid = np.flatnonzero(records["state"] == SlotState.VALID)
        self.slots = dict(zip(block_hash.split(records["key"][valid].tobytes()), valid.tolist()))
        if len(self.slots) < len(valid):  # two records with one key: the later one stays
            records["state"][np.setdiff1d(valid, list(self.slots.values()))] = SlotState.DEAD
        self._order_loaded()
        free = np.isin(records["state"], (SlotState.FREE, SlotState.DEAD))
        self._free = np.flatnonzero(free)[::-1].tolist()  # ascending when popped: neighbours are written together
        torn = np.flatnonzero(records["state"] == SlotState.WRITING).tolist()
        self._free += torn
        return [int(slot) for slot in torn]

    def _order_loaded(self) -> None:
        """A run for each session, or for what was used together without one: those not used for longest first."""
        records = self.records[: self.n_used]
        slots = np.flatnonzero(records["state"] == SlotState.VALID)
        if not len(slots):
            return
        words, at = _words(records), RECORD.fields["session"][1] // 8  # type: ignore[index]
        session = words[slots, at] ^ (words[slots, at + 1] * _FACTORS[0])
        used_s = records["used_s"][slots].astype(np.uint64)
        name = np.where(session == 0, used_s, session)
        order = np.lexsort((records["position"][slots], name))
        slots, used_s, name = slots[order], used_s[order], name[order]
        starts = np.flatnonzero(np.append(True, name[1:] != name[:-1]))
        last_s = np.maximum.reduceat(used_s, starts).astype(np.float64)
        members = np.split(slots, starts[1:])
        to_monotonic_s = time.monotonic() - time.time()
        for run in np.argsort(last_s, kind="stable").tolist():
            self.order.add_plain(members[run].tolist(), used_s=float(last_s[run]) + to_monotonic_s)

    def store(self, descriptor: int, slots: Slots) -> None:
        """Write the records of these slots, ascending, to the index file."""
        for first, last in runs(slots):
            part = self.records[first : last + 1]
            part["check"] = _checks(part)
            os.pwrite(descriptor, part.tobytes(), first * RECORD.itemsize)


def runs(slots: Slots) -> list[tuple[int, int]]:
    """Ascending slots as ranges of neighbours, both ends included."""
    found: list[tuple[int, int]] = []
    for slot in slots:
        if found and found[-1][1] == slot - 1:
            found[-1] = found[-1][0], slot
        else:
            found.append((slot, slot))
    return found


def _checks(records: npt.NDArray[np.void]) -> npt.NDArray[np.uint64]:
    """Detects a record that was written in part or damaged; never 0."""
    checks = np.empty(len(records), np.uint64)
    for at in range(0, len(records), _CHUNK):  # what is in between stays in the processor's cache
        words = _words(records[at : at + _CHUNK])[:, 1:]
        mixed = words >> np.uint64(29)
        mixed ^= words
        mixed *= _FACTORS
        checks[at : at + _CHUNK] = mixed.sum(axis=1, dtype=np.uint64) | np.uint64(1)
    return checks


def _words(records: npt.NDArray[np.void]) -> npt.NDArray[np.uint64]:
    return np.ascontiguousarray(records).view(np.uint64).reshape(len(records), _WORDS)


def _stripped(value: bytes) -> bytes:
    return b"" if value == bytes(16) else value


def _equal(records: npt.NDArray[np.void], name: str, value: bytes) -> npt.NDArray[np.bool_]:
    """Compare a field of 16 bytes with this value, for all records. Compares pairs of integers, since comparing bytes
    is far slower."""
    words, at = _words(records), RECORD.fields[name][1] // 8  # type: ignore[index]
    low, high = np.frombuffer(value.ljust(16, b"\0"), np.uint64)
    found: npt.NDArray[np.bool_] = (words[:, at] == low) & (words[:, at + 1] == high)
    return found
