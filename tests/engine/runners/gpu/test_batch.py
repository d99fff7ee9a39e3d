"""The rows of a plan in device order, and prefixes that decode rows share."""

import random
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from emberline.engine.core.plan import BLOCKS, LAST_SAMPLED, NO_BLOCK, Columns, Row, StepPlan
from emberline.engine.runners.gpu.batch import MixedShape, StepBatch, find_shared_prefix
from emberline.engine.runners.gpu.shapes import (
    BURST_TOKENS,
    CHUNK_ROWS,
    MAX_GRAPH_TOKENS,
    all_mixed_decode_rows,
    table_width,
)
from emberline.engine.runners.gpu.slots import Slot
from emberline.kernels.decode_inputs import HEADER_ROWS
from emberline.kernels.sampling import SamplerRow
from emberline.protocol.block_hash import BLOCK_TOKENS

N_GROUPS = 2


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


def random_plan(rng):
    """Plain rows as columns, between them rows with drafts or several tokens; then chunks of prompts."""
    slots = iter(rng.sample(range(40), 40))
    n_columns, others, before = rng.choice([0, 1, 5]), [], []
    cells = np.zeros((BLOCKS + 2 * N_GROUPS, n_columns), np.int32)
    for column in cells.T:
        grown = [rng.randrange(9), 3] if rng.random() < 0.3 else [NO_BLOCK] * N_GROUPS
        token = rng.choice([LAST_SAMPLED, rng.randrange(50)])
        column[:] = [rng.randrange(99), 0, next(slots), rng.randrange(200), token, *grown, rng.randrange(3), 0]
    kinds = [rng.choice(["decode", "drafts", "tokens"]) for _ in range(rng.randrange(4))]
    for kind in [*kinds, *["chunk"] * rng.randrange(3)]:
        n_tokens = {"tokens": 3, "chunk": rng.randrange(1, 40)}.get(kind, 1)
        samples, blocks = kind != "chunk" or rng.random() < 0.5, [[5], [6]] if rng.random() < 0.4 else None
        row = Row(len(others), next(slots), rng.randrange(200), bytes(4 * n_tokens), blocks, [0, 1], samples)
        if kind == "drafts":
            row.draft_ids = bytes(4 * rng.randrange(1, 4))
        others.append(row)
        before.append(n_columns if kind == "chunk" else rng.randrange(max(before, default=0), n_columns + 1))
    return StepPlan(others=others, columns=Columns(cells), before=before)


def batch_of(packet, others, before, wants):
    """wants: slots that want probabilities and have a grammar."""
    slots = [Slot(4, row.slot in wants, 2 if row.slot in wants else None, SamplerRow(), None) for row in others]
    return StepBatch.of(packet, others, before, slots, N_GROUPS)


def test_a_batch_does_not_depend_on_which_rows_are_columns():
    rng, n_drafts, n_mixed = random.Random(3), 0, 0
    for _ in range(200):
        plan = random_plan(rng)
        rows, wants = plan.rows, {row.slot for row in plan.others if rng.random() < 0.3}
        found = batch_of(plan.columns.packet, plan.others, plan.before, wants)
        wanted = batch_of(plan.columns.packet[:, :0], rows, [0] * len(rows), wants)
        assert found.slots == [row.slot for row in rows if row.samples]
        for each in (found, wanted):
            if each.drafts:
                n_drafts += 1
                each.leave_out_drafts()
        assert np.array_equal(found.packet, wanted.packet)
        assert replace(found, packet=None) == replace(wanted, packet=None)
        n_mixed += bool(found.chunks) and len(plan.columns) > 1
    assert min(n_drafts, n_mixed) > 30


def test_a_burst_beside_decodes_has_a_captured_shape():
    def shape(n_decodes, n_tokens, n_chunks=3, largest=MAX_GRAPH_TOKENS, token_budget=8192):
        sizes = [n_tokens // n_chunks] * (n_chunks - 1)
        sizes.append(n_tokens - sum(sizes))
        chunks = [Row(n, n, 0, bytes(4 * size), None, [0], True) for n, size in enumerate(sizes)]
        packet = np.zeros((HEADER_ROWS + 2, n_decodes), np.int32)
        return MixedShape.of(StepBatch(packet=packet, chunks=chunks), 256, largest, token_budget)

    captured = MixedShape.all_padded(256, MAX_GRAPH_TOKENS, 8192)
    assert [each for each in captured if each.n_tokens == BURST_TOKENS] == [
        (n_decodes, BURST_TOKENS, CHUNK_ROWS, True) for n_decodes in all_mixed_decode_rows(256)
    ]
    for n_decodes, n_tokens in ((1, BURST_TOKENS - 1), (256, 1792), (40, 1000)):
        assert shape(n_decodes, n_tokens) in captured
        assert shape(n_decodes, n_tokens).n_tokens == BURST_TOKENS
    assert not shape(0, BURST_TOKENS).padded, "nobody waits for it"
    assert not shape(8, BURST_TOKENS).padded, "one tile more"
    assert not shape(8, 1500, largest=256).padded, "of a model whose chunks are never captured"
    assert max(each.n_tokens for each in MixedShape.all_padded(256, MAX_GRAPH_TOKENS, 1024)) == MAX_GRAPH_TOKENS
    assert not shape(8, 1500, token_budget=1536).padded, "more tokens than there is memory for"


def test_tables_hold_the_padding_of_every_captured_step():
    """The padding of a step is a row of its spare tokens, whose KV it writes where its table says."""
    captured = MixedShape.all_padded(256, MAX_GRAPH_TOKENS, 8192)
    assert table_width(512) * BLOCK_TOKENS >= max(shape.n_tokens for shape in captured)
