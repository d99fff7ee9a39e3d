"""Which decode rows begin with the same blocks: what many share can be read once for all of them."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MIN_SAVED_BYTES = 1 << 30  # reads spared in a step, below which the extra launches cost more: measured on an H200


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    row: int  # one that has it
    n_blocks: int
    rows: NDArray[np.bool_]  # which have it

    def saved_blocks(self) -> int:
        return (int(self.rows.sum()) - 1) * self.n_blocks


def find(tables: NDArray[np.int32], n_full: NDArray[np.int32]) -> SharedPrefix | None:
    """The prefix that spares the most reads. tables: [rows, width]; n_full: blocks before each row's last."""
    full = np.flatnonzero(n_full > 0)
    if len(full) < 2:
        return None
    firsts, counts = np.unique(tables[full, 0], return_counts=True)
    most = int(counts.argmax())
    if counts[most] < 2:
        return None
    members = full[tables[full, 0] == firsts[most]]
    found = [_around(tables, n_full, members, int(row)) for row in {members[0], members[len(members) // 2]}]
    return max(found, key=SharedPrefix.saved_blocks)


def _around(tables: NDArray[np.int32], n_full: NDArray[np.int32], members: NDArray[np.intp], row: int) -> SharedPrefix:
    """The best prefix of one row: the longer it is, the fewer share it."""
    width = int(n_full[row])
    same = tables[members, :width] == tables[row, :width]
    lengths = np.where(same.all(1), width, same.argmin(1))
    lengths = np.minimum(lengths, n_full[members])
    longest_first = np.sort(lengths)[::-1]
    n_blocks = int(longest_first[(np.arange(len(members)) * longest_first).argmax()])
    rows = np.zeros(len(tables), np.bool_)
    rows[members[lengths >= n_blocks]] = True
    return SharedPrefix(row, n_blocks, rows)
