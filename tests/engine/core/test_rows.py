"""Running sequences as arrays: tokens wait in `Rows` for their sequence."""

import numpy as np
import pytest

from emberline.engine.core.rows import Cell, Rows
from emberline.protocol.token_ids import pack

SLOT, N_PROMPT, ROOM = 1, 5, 32


@pytest.fixture
def rows():
    rows = Rows(n_slots=2, n_groups=1)
    if rows.library is None:
        pytest.skip("without a C compiler each sequence is planned by itself")
    rows.cells[[Cell.ADMISSION, Cell.SLOT, Cell.MOST, Cell.ROOM], SLOT] = 0, SLOT, 1000, 1000
    rows.cells[[Cell.N_KNOWN, Cell.N_KEPT, Cell.N_COMPUTED], SLOT] = N_PROMPT, N_PROMPT, N_PROMPT - 1
    return rows


def left_of_step(rows, step, token_id):
    """Plan and take in a token. Returns the places that are left to the caller."""
    rows.find(np.array([SLOT]), 0)
    rows.settle()
    _, (left, _) = rows.take_in(rows.plan(step), [token_id], None, 0)
    return left


def test_a_sequence_takes_its_tokens_when_it_wants_them(rows):
    for step, token_id in enumerate((7, 8, 9)):
        assert left_of_step(rows, step, token_id) == []
    assert (rows.take_recent(SLOT), rows.take_recent(SLOT)) == (pack([7, 8, 9]), b"")
    left_of_step(rows, 3, 6)
    assert rows.take_recent(SLOT) == pack([6])


def test_a_sequence_that_lacks_too_many_tokens_is_left_to_the_caller(rows):
    tokens = list(range(100, 100 + ROOM))
    assert [left_of_step(rows, step, token_id) for step, token_id in enumerate(tokens)] == [[]] * ROOM
    assert left_of_step(rows, ROOM, 1) == [0]
    assert rows.take_recent(SLOT) == pack(tokens)


def test_tokens_to_compute_before_the_next_are_sampled(rows):
    unsampled = 128
    assert rows.n_prefill(unsampled) == 0, "one token that decodes"
    rows.cells[Cell.N_COMPUTED, SLOT] = 1
    assert rows.n_prefill(unsampled) == N_PROMPT - 2
    rows.cells[Cell.FLAGS, SLOT] = unsampled
    assert rows.n_prefill(unsampled) == N_PROMPT - 1
    rows.library = None
    assert rows.n_prefill(unsampled) == N_PROMPT - 1
