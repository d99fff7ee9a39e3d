import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from emberline.engine.runners.gpu.batch import find_shared_prefix


def rows_of(*rows, width=12):
    tables = np.zeros((len(rows), width), np.int32)
    for r, blocks in enumerate(rows):
        tables[r, : len(blocks)] = blocks
    return tables, np.array([max(0, len(blocks) - 1) for blocks in rows], np.int32)


def test_the_shared_prefix_that_saves_most_reads_is_found():
    system = [5, 6, 7, 8]
    found = find_shared_prefix(*rows_of(*([*system, 10 + n, 40 + n] for n in range(6)), [90, 91, 92], [5, 6, 93, 94]))
    assert (found.n_blocks, found.rows.tolist()) == (4, [True] * 6 + [False] * 2)
    assert found.saved_blocks() == 20
    found = find_shared_prefix(*rows_of([5, 6, 7, 8, 9], [5, 6, 7, 8, 10], *([5, 6, 7, 20 + n, 0] for n in range(8))))
    assert found.n_blocks == 3
    assert found.rows.all()


def test_a_partial_block_is_not_shared():
    assert find_shared_prefix(*rows_of([5], [5])) is None
    found = find_shared_prefix(*rows_of([5, 6], [5, 6]))
    assert found is None or found.n_blocks == 1


@given(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=12), min_size=1, max_size=8))
def test_found_prefixes_are_really_shared(rows):
    tables, n_full = rows_of(*rows)
    found = find_shared_prefix(tables, n_full)
    if found is None:
        return
    assert found.rows[found.row]
    prefix = tables[found.row, : found.n_blocks]
    for r in np.flatnonzero(found.rows):
        assert n_full[r] >= found.n_blocks
        assert (tables[r, : found.n_blocks] == prefix).all()
