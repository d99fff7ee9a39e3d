"""Running sequences as arrays by slot: what a step plans and takes in for all of them at once.

A row of `Rows.cells` is one property of all slots. Code for one sequence reads and writes single cells through the
sequence's own properties, code for all of them whole rows; both are the same memory.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from emberline.protocol.block_hash import BLOCK_TOKENS

Ints = NDArray[np.int32]
Places = NDArray[np.intp]

# Rows of `Rows.cells`. The first five are those of `plan.Columns`.
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
PASSED = 13  # from here on, for each KV group: leading blocks that have left the window


class Rows:
    """Progress of the running sequences. Sequences without a slot share the last cell of each row, which stays 0."""

    def __init__(self, n_slots: int, n_groups: int) -> None:
        self.cells = np.zeros((PASSED + n_groups, n_slots + 1), np.int64)  # the numbers of steps outgrow 32 bits
        self.cells[ADMISSION] = -1
        self.by_slot = list(self.cells)  # for whole rows, which are found sooner in a list
        self.views = [row.data for row in self.cells]  # for single cells, which a view reads in half the time

    def clear(self, slot: int) -> None:
        """Forget the sequence of a slot: what steps in flight sample for it is ignored."""
        self.cells[:, slot] = 0
        self.views[ADMISSION][slot] = -1

    def take_in(
        self, columns: Ints, ids: Ints, unusual: NDArray[np.bool_] | None
    ) -> tuple[list[int], Places, Ints, Ints]:
        """Take in the draws of planned columns, one each. unusual: those that are left to the caller in any case.

        Returns the places of those that are left to the caller; of the others the slots, the drawn ids and how many
        tokens of them are computed.
        """
        known_by, sampling_by = self.by_slot[N_KNOWN], self.by_slot[N_SAMPLING]
        slots = columns[SLOT]
        n_known = known_by[slots] + 1
        odd = (
            (self.by_slot[ADMISSION][slots] != columns[ADMISSION]) | (n_known >= self.by_slot[MOST][slots]) | (ids < 0)
        )
        odd |= self.by_slot[FLAGS][slots] != 0
        if unusual is not None:
            odd |= unusual
        n_done, left = columns[N_COMPUTED] + 1, list[int]()
        if np.count_nonzero(odd):
            left, usual = np.flatnonzero(odd).tolist(), ~odd
            slots, ids, n_known, n_done = slots[usual], ids[usual], n_known[usual], n_done[usual]
        known_by[slots] = n_known
        sampling_by[slots] -= 1
        self.by_slot[LAST][slots] = ids
        self.by_slot[N_DONE][slots] = n_done
        return left, slots, ids, n_done


class Decodes:
    """The running sequences by rank, as a step finds them: those that are `plain` are planned all at once."""

    def __init__(self, rows: Rows, order: Places, unusual: int) -> None:
        """order: slots by rank; unusual: flags of sequences that are not plain."""
        self._rows, self._order = rows, order
        self._cells = cells = rows.cells.take(order, 1)
        ahead = cells[N_KNOWN] + cells[N_SAMPLING]
        self.n_dues = ahead - cells[N_COMPUTED]
        odd = (self.n_dues ^ 1) | (cells[FLAGS] & unusual) | cells[N_DRAFTING]
        self.plain = (odd == 0) & (ahead < cells[MOST])
        self.n_before: Sequence[int] = ()  # plain sequences before each
        self.all_plain = False
        self._grown: list[tuple[int | list[int], list[int] | list[list[int]]]] = []  # columns, new blocks by group

    def settle(self) -> list[int]:
        """Decide which sequences are plain. Returns the places of all others that have something to compute, and of
        those whose block tables change with the next token."""
        plain, to_look_at = self.plain, self._cells[N_COMPUTED] >= self._cells[ROOM]
        self.all_plain = np.count_nonzero(plain) == len(plain)
        if self.all_plain:
            self.n_before = range(len(plain))
        else:
            self.n_before = (plain.cumsum() - plain).tolist()
            to_look_at = np.where(plain, to_look_at, self.n_dues > 0)
        places: list[int] = to_look_at.nonzero()[0].tolist() if np.count_nonzero(to_look_at) else []
        return places

    def all_grown(self, places: list[int], blocks: list[list[int]]) -> None:
        """Take note of one more block of each of these plain sequences, given by group. All sequences are plain."""
        self._grown.append((places, blocks))
        self._rows.by_slot[ROOM][self._order[places]] += BLOCK_TOKENS

    def grown(self, place: int, blocks: list[list[int]]) -> None:
        """Take note of what a plain sequence's block table has gained."""
        if blocks:
            self._grown.append((self.n_before[place], [block for (block,) in blocks]))
        self._cells[PASSED:, place] = self._rows.cells[PASSED:, self._order[place]]

    def take(self, step: int) -> Ints:
        """Plan a token of each plain sequence. Returns the cells of `plan.Columns`."""
        cells, slots = self._cells, self._order
        if not self.all_plain:
            cells, slots = cells[:, self.plain], slots[self.plain]
        n_groups = len(cells) - PASSED
        planned = np.empty((5 + 2 * n_groups, len(slots)), np.int32)
        planned[:5], planned[5 : 5 + n_groups], planned[5 + n_groups :] = cells[:5], -1, cells[PASSED:]
        np.putmask(planned[LAST], cells[N_SAMPLING] > 0, -1)
        for column, blocks in self._grown:
            planned[5 : 5 + n_groups, column] = blocks
        own = self._rows.by_slot
        own[N_COMPUTED][slots] += 1
        own[N_SAMPLING][slots] += 1
        own[PLANNED][slots] = step
        return planned
