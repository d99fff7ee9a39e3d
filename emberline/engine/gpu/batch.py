"""A plan's rows in the order the device wants, and the buffers that carry them there."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from emberline.engine.gpu.shapes import (
    CHUNK_ROWS,
    MAX_CAPTURED_TOKENS,
    TILE,
    all_rows_beside_chunks,
    rows_beside_chunks,
    table_width,
    tokens,
)
from emberline.engine.gpu.slots import Slots
from emberline.engine.gpu.stream import Upload
from emberline.engine.scheduler.plan import Row, StepPlan
from emberline.engine.scheduler.shared_prefix import SharedPrefix
from emberline.kernels.decode_inputs import HEADER_ROWS, LAST_SAMPLED, NO_BLOCK, PADDING, DecodeInputs, SlotState
from emberline.kernels.gpu.workspace import PrefillChunk, StepShape
from emberline.models.decoder import StepInputs
from emberline.protocol.block_hash import BLOCK_TOKENS

ALIGNED = 4  # int32 numbers


@dataclass(slots=True)
class Batch:
    """Rows that decode one token first, then chunks of prompts. A drawing row's place among those that draw is kept."""

    decodes: list[Row] = field(default_factory=list)
    chunks: list[Row] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)  # of the rows that draw, in the plan's order
    order: list[int] = field(default_factory=list)  # their places among the step's draws, if nothing is filled up
    logprobs: list[int | None] | None = None  # what each of them wants; None: nobody wants any
    masked: bool = False  # some draw waits for a grammar

    @property
    def n_draws(self) -> int:
        return len(self.order)

    def places(self, n_decodes: int) -> list[int]:
        """`order`, with the decoding rows filled up to so many."""
        d = len(self.decodes)
        return self.order if n_decodes == d else [n if n < d else n - d + n_decodes for n in self.order]

    @property
    def n_tokens(self) -> int:
        return len(self.decodes) + sum(row.end - row.start for row in self.chunks)

    @classmethod
    def of(cls, plan: StepPlan, slots: Slots) -> "Batch":
        batch = cls()
        drawing = [row for row in plan.rows if row.samples]
        batch.decodes = [row for row in drawing if row.follows or row.end - row.start == 1]
        if len(batch.decodes) == len(plan.rows):
            batch.order = list(range(len(drawing)))
        else:
            decodes = {id(row) for row in batch.decodes}
            batch.chunks = [row for row in plan.rows if id(row) not in decodes]
            ordered = [*batch.decodes, *(row for row in batch.chunks if row.samples)]
            places = {id(row): n for n, row in enumerate(ordered)}
            batch.order = [places[id(row)] for row in drawing]
        batch.slots = [row.slot for row in drawing]
        known = slots.of(drawing)
        batch.masked = True in [slot.masked for slot in known]
        logprobs = [slot.logprobs for slot in known]
        batch.logprobs = logprobs if logprobs.count(None) < len(logprobs) else None
        return batch


class DecodeBuffers:
    """The fixed places that captured decode steps read from and write to."""

    def __init__(self, max_rows: int, n_groups: int, width: int, device: torch.device) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self._n_groups = n_groups
        self._upload = Upload((HEADER_ROWS + 2 * n_groups) * max_rows, device)
        self._packet = zeros((HEADER_ROWS + 2 * n_groups) * max_rows)
        self._starts = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._samples = torch.arange(max_rows, device=device)
        self._sharing = Upload(max_rows + 2, device)
        self._shared = zeros(max_rows + 2)
        self.inputs = DecodeInputs(
            zeros(max_rows), zeros(max_rows), zeros(max_rows), zeros(max_rows), zeros(n_groups, max_rows, width)
        )

    def packet(self, n_rows: int) -> Tensor:
        return self._packet[: (HEADER_ROWS + 2 * self._n_groups) * n_rows].view(-1, n_rows)

    def send(self, rows: list[Row], n_rows: int) -> None:
        """Queue the packet of these rows, filled up to n_rows."""
        n, n_words = len(rows), (HEADER_ROWS + 2 * self._n_groups) * n_rows
        columns = self._upload.array()[:n_words].reshape(-1, n_rows)
        columns[0, :n] = [row.slot for row in rows]
        columns[1, :n] = [row.start for row in rows]
        columns[2, :n] = [LAST_SAMPLED if row.follows else token_of(row) for row in rows]
        columns[HEADER_ROWS:] = NO_BLOCK
        grown = [(r, row.blocks) for r, row in enumerate(rows) if row.blocks is not None]
        for g in range(self._n_groups):
            columns[HEADER_ROWS + self._n_groups + g, :n] = [row.passed[g] for row in rows]
            if grown:
                columns[HEADER_ROWS + g, [r for r, _ in grown]] = [blocks[g][0] for _, blocks in grown]
        columns[1, n:], columns[0, n:], columns[2, n:] = PADDING, 0, 0
        self._upload.send(n_words, self._packet)

    def send_shared(self, shared: SharedPrefix) -> None:
        array, n = self._sharing.array(), len(shared.rows)
        array[2:] = 0
        array[:2] = shared.row, shared.n_blocks * BLOCK_TOKENS
        array[2 : 2 + n] = shared.rows * (shared.n_blocks * BLOCK_TOKENS)
        self._sharing.send(len(array), self._shared)

    def shared(self, n_rows: int) -> tuple[Tensor, Tensor]:
        return self._shared[:2], self._shared[2 : 2 + n_rows]

    def step(self, n_rows: int, cascade: bool) -> StepInputs:
        shared, shares = self.shared(n_rows) if cascade else (None, None)
        to = self.inputs
        return StepInputs(
            token_ids=to.token_ids[:n_rows],
            positions=to.positions[:n_rows],
            query_starts=self._starts[: n_rows + 1],
            context_lens=to.context_lens[:n_rows],
            block_tables=[table[:n_rows] for table in to.tables],
            sample_tokens=self._samples[:n_rows],
            shape=StepShape(n_rows, shared=shared, shares=shares),
        )


class MixedShape(NamedTuple):
    """How a step with chunks is laid out: all that a captured one depends on.

    Rows that decode come first, in places of which the last may be nobody's and then have no token; chunks follow.
    """

    n_decodes: int  # places
    n_tokens: int
    n_chunks: int  # rows behind them
    padded: bool  # chunks and tokens are filled up too: the last row is nobody's and has the tokens that are left over

    @property
    def n_rows(self) -> int:
        return self.n_decodes + self.n_chunks

    @property
    def places(self) -> list[slice]:
        """Of token ids, positions, query starts, context lengths, slots; and of the draws' tokens, slots, positions.

        Each begins at a whole 16 bytes: Triton compiles kernels anew for pointers that do not.
        """
        found, first = [], 0
        for size in (self.n_tokens, self.n_tokens, self.n_rows + 1, *[self.n_rows] * 5):
            found.append(slice(first, first + size))
            first += -(-size // ALIGNED) * ALIGNED
        return found

    @classmethod
    def exact(cls, batch: Batch) -> "MixedShape":
        return cls(len(batch.decodes), batch.n_tokens, len(batch.chunks), False)

    @classmethod
    def of(cls, batch: Batch, max_rows: int) -> "MixedShape":
        """A shape that many batches share, so that it is worth capturing; the batch's own where it is large or odd."""
        n_tokens = tokens(batch.n_tokens)
        if len(batch.chunks) >= CHUNK_ROWS or n_tokens > MAX_CAPTURED_TOKENS:
            return cls.exact(batch)
        return cls(rows_beside_chunks(len(batch.decodes), max_rows), n_tokens, CHUNK_ROWS, True)

    @classmethod
    def all_padded(cls, max_rows: int) -> list["MixedShape"]:
        """Those that `of` has in common."""
        found, fewest = [], 0  # a place is taken from the size below on
        for places in all_rows_beside_chunks(max_rows):
            sizes = range(TILE, MAX_CAPTURED_TOKENS + 1, TILE)
            found += [cls(places, n_tokens, CHUNK_ROWS, True) for n_tokens in sizes if n_tokens > fewest]
            fewest = places
        return found


class Draws(NamedTuple):
    """Who draws."""

    slots: Tensor  # int32 [rows]; PADDING where a row does not
    positions: Tensor  # int32 [rows], of the tokens to be drawn


class MixedBuffers:
    """Steps with chunks in them: made on the host, shipped in one copy."""

    def __init__(self, max_tokens: int, max_rows: int, width: int, device: torch.device) -> None:
        n_words = 2 * max(max_tokens, MAX_CAPTURED_TOKENS) + 6 * (max_rows + CHUNK_ROWS) + 1 + 8 * ALIGNED
        self._width = width
        self._upload = Upload(n_words, device)
        self._buffer = torch.zeros(n_words, dtype=torch.int32, device=device)
        self._counting = np.arange(max(width * BLOCK_TOKENS, n_words) + 1, dtype=np.int32)

    def send(self, batch: Batch, shape: MixedShape, spare_slot: int) -> int:
        """Queue the copy; the longest context."""
        array, places = self._upload.array(), shape.places
        longest = self._fill([array[place] for place in places], batch, shape, spare_slot)
        self._upload.send(places[-1].stop, self._buffer)
        return longest

    def inputs(
        self,
        shape: MixedShape,
        state: SlotState,
        batch: Batch | None,
        longest: int = 0,
        shared: tuple[Tensor, Tensor] | None = None,
    ) -> StepInputs:
        """From what was sent. A captured step knows no batch, and nothing but its shape."""
        views = [self._buffer[place] for place in shape.places[:6]]
        token_ids, positions, starts, contexts, row_slots, samples = views
        d = min(shape.n_decodes, shape.n_tokens)
        if d:  # a chunk's tokens in their places are never negative
            last = state.last_tokens.index_select(0, row_slots[:d])
            token_ids[:d] = torch.where(token_ids[:d] < 0, last, token_ids[:d])
        width = self._width if batch is None else min(self._width, table_width(longest))
        tables = [table[:, :width].index_select(0, row_slots) for table in state.tables]
        chunks = None if batch is None else _chunks(batch)
        longest_query = shape.n_tokens if chunks is None else max(chunk.n for chunk in chunks)
        prefix, shares = shared or (None, None)
        step_shape = StepShape(shape.n_decodes, longest_query, prefix, shares, chunks)
        n_draws = shape.n_rows if batch is None else batch.n_draws
        return StepInputs(token_ids, positions, starts, contexts, tables, samples[:n_draws].long(), step_shape)

    def draws(self, shape: MixedShape, batch: Batch | None) -> Draws:
        slots, positions = (self._buffer[place] for place in shape.places[-2:])
        n_draws = shape.n_rows if batch is None else batch.n_draws
        return Draws(slots[:n_draws], positions[:n_draws])

    def _fill(self, parts: list[NDArray[np.int32]], batch: Batch, shape: MixedShape, spare_slot: int) -> int:
        token_ids, positions, starts, contexts, row_slots, samples, draw_slots, draw_positions = parts
        d, places = len(batch.decodes), shape.n_decodes
        contexts[d:] = samples[d:] = draw_positions[d:] = 0
        row_slots[d:], draw_slots[d:] = spare_slot, PADDING
        begins = np.array([row.start for row in batch.decodes], np.int32)
        token_ids[:d] = [token_of(row) for row in batch.decodes]
        positions[:d], contexts[:d], draw_positions[:d] = begins, begins + 1, begins + 1
        row_slots[:d] = draw_slots[:d] = [row.slot for row in batch.decodes]
        starts[:d], starts[d : places + 1], samples[:d] = self._counting[:d], d, self._counting[:d]
        n, drawn, longest = d, places, int(begins.max(initial=-1)) + 1
        for r, row in enumerate(batch.chunks, places):
            end = row.end
            stop = n + end - row.start
            token_ids[n:stop] = np.frombuffer(row.token_ids, "<u4")
            positions[n:stop] = self._counting[row.start : end]
            starts[r + 1], contexts[r], row_slots[r] = stop, end, row.slot
            if row.samples:
                samples[drawn], draw_slots[drawn], draw_positions[drawn] = stop - 1, row.slot, end
                drawn += 1
            n, longest = stop, max(longest, end)
        if shape.padded:
            starts[places + len(batch.chunks) + 1 :] = n
            starts[-1], contexts[-1] = shape.n_tokens, shape.n_tokens - n
            token_ids[n:], positions[n:] = 0, self._counting[: shape.n_tokens - n]
        return longest


def _chunks(batch: Batch) -> list[PrefillChunk]:
    first, chunks = len(batch.decodes), []
    for n, row in enumerate(batch.chunks, first):
        chunks.append(PrefillChunk(n, first, row.end - row.start, row.end))
        first += row.end - row.start
    return chunks


def token_of(row: Row) -> int:
    """The one new token of a row, where the host knows it."""
    return LAST_SAMPLED if row.follows else int.from_bytes(row.token_ids, "little")
