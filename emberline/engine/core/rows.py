"""Running sequences as arrays by slot: what a step plans and takes in for all of them at once.

A row of `Rows.cells` is one property of all slots. Code for one sequence reads and writes single cells through the
sequence's own properties. Code for all of them is C (`kernels/cpu/rows.h`) and works on the same memory: at any number
of rows a call takes a microsecond or two. On a host that could not compile it every sequence is planned by itself.
"""

import ctypes
from array import array
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emberline.kernels.native_library import host_library
from emberline.protocol.block_hash import BLOCK_TOKENS

Ints = NDArray[np.int32]
Places = NDArray[np.intp]


class Cell:
    """Properties of running sequences: rows of `Rows.cells`, as rows.h has them. `plan.Columns` has the first five."""

    NUMBER = 0  # sequence number
    ADMISSION = 1  # serial number of the stay in the slot; -1: the slot is free
    SLOT = 2
    N_COMPUTED = 3  # tokens whose KV is in the table, or will be when the planned steps are done
    LAST = 4  # id of the newest token
    N_KNOWN = 5  # tokens of prompt and output
    N_SAMPLING = 6  # tokens that steps in flight sample, at least
    N_DRAFTING = 7  # drafts of rows in flight, with which more is sampled
    N_DONE = 8  # tokens that absorbed steps have computed; full blocks of them can be published
    MOST = 9  # tokens that prompt and output may have
    ROOM = 10  # first position whose token changes the block table
    FLAGS = 11  # bits of `sequence.Flag`
    PLANNED = 12  # number of the last plan with a row of the sequence
    N_KEPT = 13  # of N_KNOWN, tokens that the sequence has itself; the others are in `Rows`
    PASSED = 14  # from here on, for each KV group: leading blocks that have left the window


# Of a slot: room for tokens (u32 LE) that its sequence lacks. The sequence takes them with every block that is full.
_RECENT_BYTES = 32 * 4


class _Table(ctypes.Structure):
    """`row_table` in rows.h."""

    _fields_ = [
        ("cells", ctypes.c_void_p),
        ("n_slots", ctypes.c_int64),
        ("n_groups", ctypes.c_int64),
        ("plain", ctypes.c_void_p),
        ("n_dues", ctypes.c_void_p),
        ("found", ctypes.c_void_p * 2),
        ("recent", ctypes.c_void_p),
    ]


@cache
def _native() -> Any:
    """The functions of rows.h. Returns None if this host could not compile them."""
    if (lib := host_library()) is None:
        return None
    at, n = ctypes.c_void_p, ctypes.c_int64
    lib.em_rows_find.argtypes, lib.em_rows_find.restype = [at, at, n, n], n
    lib.em_rows_prefill.argtypes, lib.em_rows_prefill.restype = [at, n], n
    lib.em_rows_look.argtypes, lib.em_rows_look.restype = [at, at, n], n
    lib.em_rows_plan.argtypes, lib.em_rows_plan.restype = [at, at, n, n, n, at], None
    lib.em_rows_take.argtypes, lib.em_rows_take.restype = [at, at, n, at, ctypes.c_char_p, n], n
    return lib


def _address(columns: Ints) -> int:
    """Address of an array that is not empty. (NumPy's own property takes several times as long.)"""
    return ctypes.addressof(ctypes.c_char.from_buffer(columns.data))


class Rows:
    """Progress of the running sequences. Sequences without a slot share the last cell of each row, which stays 0.

    A step finds the sequences, by rank, of which nothing but one token is to be planned: they are `plain`. The planner
    may decide to plan some of these one by one; all others are planned at once.
    """

    def __init__(self, n_slots: int, n_groups: int) -> None:
        self.cells = np.zeros((Cell.PASSED + n_groups, n_slots + 1), np.int64)  # the numbers of steps outgrow 32 bits
        self.cells[Cell.ADMISSION] = -1
        self.by_slot = list(self.cells)  # for whole rows, which are found sooner in a list
        self.views = [row.data for row in self.cells]  # for single cells, which a view reads in half the time
        self._known, self._kept = self.views[Cell.N_KNOWN], self.views[Cell.N_KEPT]
        self.n_slots, self.n_groups = n_slots, n_groups
        # Of the step being planned, by rank:
        self.slots, self._slots_at = np.zeros(0, np.intp), 0
        self._plain, self._n_dues = np.zeros(n_slots, np.bool_), np.zeros(n_slots, np.int64)
        self.plain, self.n_dues = self._plain[:0], self._n_dues[:0]  # plain ones; tokens that each has to compute
        self.flags = 0  # that any running sequence has, since the plan
        self.common_flags = 0  # that all have, as far as it is known
        self.n_plain = 0
        self._grown: list[tuple[int | list[int], list[int] | list[list[int]]]] = []  # columns, new blocks by group
        self._found = np.zeros((2, n_slots), np.int64)
        self._recent = bytearray((n_slots + 1) * _RECENT_BYTES)
        recent = np.frombuffer(self._recent, np.uint8)
        addresses = [each.ctypes.data for each in (self.cells, self._plain, self._n_dues, *self._found, recent)]
        self._table = _Table(addresses[0], n_slots + 1, n_groups, *addresses[1:3], tuple(addresses[3:5]), addresses[5])
        self.address = ctypes.addressof(self._table)
        self.library = _native()  # None: no sequence is ever plain

    def clear(self, slot: int) -> None:
        """Forget the sequence of a slot: what steps in flight sample for it is ignored."""
        self.cells[:, slot] = 0
        self.views[Cell.ADMISSION][slot] = -1

    def take_recent(self, slot: int) -> bytearray:
        """Return the tokens (u32 LE) that the sequence of a slot lacks, which it has from now on."""
        n_known, n_kept, first = self._known[slot], self._kept[slot], slot * _RECENT_BYTES
        self._kept[slot] = n_known
        return self._recent[first : first + 4 * (n_known - n_kept)]

    def find(self, slots: Places, unusual: int) -> None:
        """Find the plain ones of the running sequences, whose slots are given by rank. unusual: flags of others."""
        n, self._grown = len(slots), []
        if slots is not self.slots:
            self.slots, self._slots_at = slots, slots.ctypes.data
            self.plain, self.n_dues = self._plain[:n], self._n_dues[:n]
        if self.library is None:
            self.n_dues[:] = self.ranked(Cell.N_KNOWN) + self.ranked(Cell.N_SAMPLING) - self.ranked(Cell.N_COMPUTED)
            self.flags = int(np.bitwise_or.reduce(self.ranked(Cell.FLAGS)))
        else:
            found = self.library.em_rows_find(self.address, self._slots_at, n, unusual)
            self.flags, self.common_flags, self.n_plain = found & 0xFFFF, found >> 16 & 0xFFFF, found >> 32

    def n_prefill(self, unsampled: int) -> int:
        """Tokens that running sequences have to compute before their next ones are sampled. unsampled: flag of those
        after whose last token nothing is sampled."""
        if self.library is not None:
            return int(self.library.em_rows_prefill(self.address, unsampled))
        by_slot = self.by_slot  # free slots have zeros
        n_dues = by_slot[Cell.N_KNOWN] + by_slot[Cell.N_SAMPLING] - by_slot[Cell.N_COMPUTED]
        return int(np.maximum(n_dues - (by_slot[Cell.FLAGS] & unsampled == 0), 0).sum())

    def ranked(self, row: int) -> NDArray[np.int64]:
        """A row of `cells` for the running sequences, by rank."""
        found: NDArray[np.int64] = self.by_slot[row][self.slots]
        return found

    def settle(self) -> list[tuple[int, int]]:
        """Find the sequences that are not plain and have something to compute, and those whose block tables change
        with the next token. Returns their places, and how many plain sequences are before each."""
        if self.library is None:
            return [(place, 0) for place in np.flatnonzero(self.n_dues).tolist()]
        found = self.library.em_rows_look(self.address, self._slots_at, len(self.slots))
        n, self.n_plain = found & 0xFFFFFFFF, found >> 32
        return list(zip(*self._found[:, :n].tolist())) if n else []

    def all_grown(self, places: list[int], blocks: list[list[int]]) -> None:
        """Take note of one more block of each of these plain sequences, given by group. All sequences are plain."""
        self._grown.append((places, blocks))
        self.by_slot[Cell.ROOM][self.slots[places]] += BLOCK_TOKENS

    def grown(self, column: int, blocks: list[list[int]]) -> None:
        """Take note of what the block table of a plain sequence has gained; column: plain sequences before it."""
        if blocks:
            self._grown.append((column, [block for (block,) in blocks]))

    def plan(self, step: int) -> Ints:
        """Plan a token of each plain sequence. Returns the cells of `plan.Columns`."""
        columns = np.empty((Cell.LAST + 1 + 2 * self.n_groups, self.n_plain), np.int32)
        if self.n_plain:
            n, to = len(self.slots), _address(columns)
            self.library.em_rows_plan(self.address, self._slots_at, n, self.n_plain, step, to)
            for column, blocks in self._grown:
                columns[Cell.LAST + 1 : Cell.LAST + 1 + self.n_groups, column] = blocks
        return columns

    def take_in(
        self, columns: Ints, ids: list[int], stops: bytes | None, unusual: int
    ) -> tuple[bytes, list[list[int]]]:
        """Take in the draws of planned columns, one each. stops: a byte for each, 1: it is some stop token.

        Returns the ids (u32 LE) and places: first of the columns that are left to the caller, then of those whose last
        block is full. Left are sequences that have one of the flags `unusual`, are at their end, lack too many tokens
        or have left their slots, and draws that are invalid or in `stops`.
        """
        drawn = array("i", ids)
        assert len(drawn) == columns.shape[1], "each of these rows draws once"
        at = _address(columns), len(drawn), drawn.buffer_info()[0]
        n = self.library.em_rows_take(self.address, *at, stops, unusual)
        return drawn.tobytes(), [self._found[0, : n & 0xFFFFFFFF].tolist(), self._found[1, : n >> 32].tolist()]
