"""A plan's rows in the order the device wants, and the buffers that carry them there."""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from emberline.engine.gpu_slots import Slots
from emberline.engine.gpu_stream import Upload
from emberline.engine.plan import Row, StepPlan
from emberline.engine.shared_prefix import SharedPrefix
from emberline.kernels.gpu.step import Chunk, StepShape
from emberline.kernels.inputs import FOLLOWS, HEAD_ROWS, NONE, PADDING, DecodeInputs
from emberline.kv.budget import blocks_of
from emberline.models.step import StepInputs
from emberline.protocol.layout import BLOCK_TOKENS


@dataclass(slots=True)
class Batch:
    """Rows that decode one token first, then chunks of prompts. A drawing row's place among those that draw is kept."""

    decodes: list[Row] = field(default_factory=list)
    chunks: list[Row] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)  # of the rows that draw, in the plan's order
    order: list[int] = field(default_factory=list)  # their places among the step's draws
    logprobs: list[int | None] | None = None  # what each of them wants; None: nobody wants any
    masked: bool = False  # some draw waits for a grammar

    @property
    def n_draws(self) -> int:
        return len(self.order)

    @property
    def n_tokens(self) -> int:
        return len(self.decodes) + sum(row.end - row.start for row in self.chunks)

    @classmethod
    def of(cls, plan: StepPlan, slots: Slots) -> "Batch":
        batch = cls()
        for row in plan.rows:
            single = row.samples and row.end - row.start == 1
            (batch.decodes if single else batch.chunks).append(row)
        places = {id(row): n for n, row in enumerate(batch.decodes)}
        for row in batch.chunks:
            if row.samples:
                places[id(row)] = len(places)
        logprobs = []
        for row in plan.rows:
            if row.samples:
                slot = slots[row.slot]
                batch.slots.append(row.slot)
                batch.order.append(places[id(row)])
                batch.masked = batch.masked or slot.masked
                logprobs.append(slot.logprobs)
        if any(k is not None for k in logprobs):
            batch.logprobs = logprobs
        return batch


class DecodeBuffers:
    """The fixed places that captured decode steps read from and write to."""

    def __init__(self, max_rows: int, n_groups: int, width: int, device: torch.device) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self._n_groups = n_groups
        self._upload = Upload((HEAD_ROWS + 2 * n_groups) * max_rows, device)
        self._packet = zeros((HEAD_ROWS + 2 * n_groups) * max_rows)
        self._starts = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._samples = torch.arange(max_rows, device=device)
        self._sharing = Upload(max_rows + 2, device)
        self._shared = zeros(max_rows + 2)
        self.inputs = DecodeInputs(
            zeros(max_rows), zeros(max_rows), zeros(max_rows), zeros(max_rows), zeros(n_groups, max_rows, width)
        )

    def packet(self, n_rows: int) -> Tensor:
        return self._packet[: (HEAD_ROWS + 2 * self._n_groups) * n_rows].view(-1, n_rows)

    def send(self, rows: list[Row], n_rows: int) -> None:
        """Queue the packet of these rows, filled up to n_rows."""
        n, n_words = len(rows), (HEAD_ROWS + 2 * self._n_groups) * n_rows
        columns = self._upload.array()[:n_words].reshape(-1, n_rows)
        columns[0, :n] = [row.slot for row in rows]
        columns[1, :n] = [row.start for row in rows]
        columns[2, :n] = [token_of(row) for row in rows]
        columns[HEAD_ROWS:] = NONE
        columns[HEAD_ROWS + self._n_groups :, :n] = np.array([row.passed for row in rows], np.int32).T
        columns[1, n:], columns[0, n:], columns[2, n:] = PADDING, 0, 0
        for r, row in enumerate(rows):
            if row.blocks is not None:
                for g, blocks in enumerate(row.blocks):
                    columns[HEAD_ROWS + g, r] = blocks[0]
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


@dataclass(slots=True)
class MixedStep:
    inputs: StepInputs
    slots: Tensor  # int32 [draws]
    positions: Tensor  # int32 [draws], of the tokens to be drawn


class MixedBuffers:
    """Steps with chunks in them: made on the host, shipped in one copy."""

    def __init__(self, max_tokens: int, max_rows: int, width: int, device: torch.device) -> None:
        self._width = width
        self._upload = Upload(2 * max_tokens + 6 * max_rows + 1, device, depth=3)
        self._buffer = torch.zeros(2 * max_tokens + 6 * max_rows + 1, dtype=torch.int32, device=device)
        self._counting = np.arange(width * BLOCK_TOKENS + 1, dtype=np.int32)

    def send(self, batch: Batch, slots: Slots) -> MixedStep:
        n_rows, n_tokens, n_draws = len(batch.decodes) + len(batch.chunks), batch.n_tokens, batch.n_draws
        sizes = [n_tokens, n_tokens, n_rows + 1, n_rows, n_rows, n_draws, n_draws, n_draws]
        stops = np.cumsum(sizes).tolist()
        array = self._upload.array()
        parts = [array[stop - size : stop] for stop, size in zip(stops, sizes)]
        longest = self._fill(parts, batch)
        sent = self._upload.send(stops[-1], self._buffer)
        views = [sent[stop - size : stop] for stop, size in zip(stops, sizes)]
        token_ids, positions, starts, contexts, row_slots, samples, draw_slots, draw_positions = views
        state, d = slots.state, len(batch.decodes)
        if any(row.follows for row in batch.decodes):
            last = state.last_tokens.index_select(0, row_slots[:d])
            token_ids[:d] = torch.where(token_ids[:d] < 0, last, token_ids[:d])
        width = min(self._width, blocks_of(longest))
        tables = [table[:, :width].index_select(0, row_slots) for table in state.tables]
        inputs = StepInputs(token_ids, positions, starts, contexts, tables, samples.long(), self._shape(batch))
        return MixedStep(inputs, draw_slots, draw_positions)

    def _shape(self, batch: Batch) -> StepShape:
        first, chunks = len(batch.decodes), []
        for n, row in enumerate(batch.chunks, first):
            chunks.append(Chunk(n, first, row.end - row.start, row.end))
            first += row.end - row.start
        return StepShape(len(batch.decodes), max(chunk.n for chunk in chunks), chunks=chunks)

    def _fill(self, parts: list[NDArray[np.int32]], batch: Batch) -> int:
        token_ids, positions, starts, contexts, row_slots, samples, draw_slots, draw_positions = parts
        d = drawn = len(batch.decodes)
        begins = np.array([row.start for row in batch.decodes], np.int32)
        token_ids[:d] = [token_of(row) for row in batch.decodes]
        positions[:d], contexts[:d], draw_positions[:d] = begins, begins + 1, begins + 1
        row_slots[:d] = draw_slots[:d] = [row.slot for row in batch.decodes]
        starts[: d + 1], samples[:d] = self._counting[: d + 1], self._counting[:d]
        n, longest = d, int(begins.max(initial=-1)) + 1
        for r, row in enumerate(batch.chunks, d):
            end = row.end
            stop = n + end - row.start
            token_ids[n:stop] = np.frombuffer(row.token_ids, "<u4")
            positions[n:stop] = self._counting[row.start : end]
            starts[r + 1], contexts[r], row_slots[r] = stop, end, row.slot
            if row.samples:
                samples[drawn], draw_slots[drawn], draw_positions[drawn] = stop - 1, row.slot, end
                drawn += 1
            n, longest = stop, max(longest, end)
        return longest


def token_of(row: Row) -> int:
    """The one new token of a row, where the host knows it."""
    return FOLLOWS if row.follows else int.from_bytes(row.token_ids, "little")
