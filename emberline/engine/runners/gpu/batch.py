"""The rows of a plan in device order, the buffers that upload them, and prefixes that decode rows share."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from emberline.engine.core.plan import Masks, Row
from emberline.engine.core.rows import Ints
from emberline.engine.images.step_images import ImageRow
from emberline.engine.runners.gpu.prompt_scores import DeviceStepScores
from emberline.engine.runners.gpu.shapes import (
    BURST_TOKENS,
    CHUNK_ROWS,
    MAX_GRAPH_TOKENS,
    TILE,
    all_mixed_decode_rows,
    burst_tokens,
    mixed_decode_rows,
    mixed_tokens,
    table_width,
)
from emberline.engine.runners.gpu.slots import Slot, Slots
from emberline.engine.runners.gpu.stream import Upload
from emberline.engine.runners.prompt_scores import ScoredRow
from emberline.kernels.decode_inputs import (
    DRAFT_HEADER_ROWS,
    HEADER_ROWS,
    LAST_SAMPLED,
    MAX_ROW_TOKENS,
    NO_BLOCK,
    PADDING,
    DecodeInputs,
    SlotState,
)
from emberline.kernels.gpu.backend.workspace import PrefillChunk, StepShape
from emberline.models.decoder import StepInputs
from emberline.protocol.block_hash import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A prefix that several decode rows share: cascade attention reads it once."""

    row: int  # one that has it
    n_blocks: int
    rows: NDArray[np.bool_]  # which have it

    def saved_blocks(self) -> int:
        return (int(self.rows.sum()) - 1) * self.n_blocks


def find_shared_prefix(tables: NDArray[np.int32], n_full: NDArray[np.int32]) -> SharedPrefix | None:
    """The prefix that saves the most reads. tables: [rows, width]; n_full: blocks before the last one of each row."""
    full = np.flatnonzero(n_full > 0)
    if len(full) < 2:
        return None
    firsts, counts = np.unique(tables[full, 0], return_counts=True)
    most = int(counts.argmax())
    if counts[most] < 2:
        return None
    members = full[tables[full, 0] == firsts[most]]
    found = [_best_prefix_of(tables, n_full, members, int(row)) for row in {members[0], members[len(members) // 2]}]
    return max(found, key=SharedPrefix.saved_blocks)


def _best_prefix_of(
    tables: NDArray[np.int32], n_full: NDArray[np.int32], members: NDArray[np.intp], row: int
) -> SharedPrefix:
    """The best prefix of one row: the longer it is, the fewer rows share it."""
    width = int(n_full[row])
    same = tables[members, :width] == tables[row, :width]
    lengths = np.where(same.all(1), width, same.argmin(1))
    lengths = np.minimum(lengths, n_full[members])
    longest_first = np.sort(lengths)[::-1]
    n_blocks = int(longest_first[(np.arange(len(members)) * longest_first).argmax()])
    rows = np.zeros(len(tables), np.bool_)
    rows[members[lengths >= n_blocks]] = True
    return SharedPrefix(row, n_blocks, rows)


ALIGNED = 4  # int32 numbers
_LAST_SAMPLED = LAST_SAMPLED.to_bytes(4, "little", signed=True)
_OWN = bytes(4)  # among drafts, in the place of a row's own token
_NO_PACKET = np.zeros((HEADER_ROWS, 0), np.int32)


def packet_of(rows: Sequence[Row], n_groups: int) -> Ints:
    """The packet of rows that have one token of their own."""
    packet = np.empty((HEADER_ROWS + 2 * n_groups, len(rows)), np.int32)
    blocks = packet[HEADER_ROWS : HEADER_ROWS + n_groups]
    packet[0], packet[1], blocks[:] = [row.slot for row in rows], [row.start for row in rows], NO_BLOCK
    packet[2] = np.frombuffer(b"".join([row.token_ids or _LAST_SAMPLED for row in rows]), np.int32)
    packet[HEADER_ROWS + n_groups :] = np.array([row.passed for row in rows], np.int32).reshape(-1, n_groups).T
    for r, row in enumerate(rows):
        if row.blocks is not None:
            blocks[:, r] = [new[0] for new in row.blocks]
    return packet


@dataclass(slots=True)
class StepBatch:
    """Decode rows first, then prefill chunks. Keeps where each sampling row of the plan went."""

    packet: Ints = field(default_factory=lambda: _NO_PACKET)  # decode rows
    drafts: list[bytes] = field(default_factory=list)  # u32 LE; for each decode row, or empty if no row has any
    chunks: list[Row] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)  # of the rows that sample, in the order of the plan
    order: Sequence[int] = field(default_factory=list)  # their indices among the samples of the step, without padding
    logprobs: list[int | None] | None = None  # what each of them wants; None: none wants any
    masked: bool = False  # some row has a grammar, and waits for its mask
    scores: DeviceStepScores | None = None  # what it scores
    has_images: bool = False  # some chunk has: how long the step takes says nothing about others
    left_out: list[int] | None = None  # drafts of each sampling row, where the step does not verify them

    @property
    def n_samples(self) -> int:
        """Number of rows that sample."""
        return len(self.order)

    @property
    def n_decodes(self) -> int:
        """Number of decode rows."""
        return len(self.packet[0])

    def sample_indices(self, n_decodes: int) -> Sequence[int]:
        """Return `order` with the decode rows padded to n_decodes."""
        d = self.n_decodes
        return (
            self.order if n_decodes == d or not self.chunks else [n if n < d else n - d + n_decodes for n in self.order]
        )

    def verify(self, starts: Sequence[int]) -> None:
        """All its rows decode: from here on slots, order and logprobs are those of draws. starts: of rows' tokens."""
        n_draws = [1 + (len(ids) >> 2) for ids in self.drafts]
        self.order = [at for first, n in zip(starts, n_draws) for at in range(first, first + n)]
        self.slots = [slot for slot, n in zip(self.slots, n_draws) for _ in range(n)]
        if self.logprobs is not None:
            self.logprobs = [wanted for wanted, n in zip(self.logprobs, n_draws) for _ in range(n)]

    def leave_out_drafts(self) -> None:
        """Draw once for each of the plan's rows."""
        self.left_out = [len(self.drafts[n]) >> 2 if n < self.n_decodes else 0 for n in self.order]
        # Blocks for drafts are uploaded with the table: a packet has only that of the row's own token.
        n_groups = (len(self.packet) - HEADER_ROWS) // 2
        self.packet[HEADER_ROWS : HEADER_ROWS + n_groups, [len(ids) > 0 for ids in self.drafts]] = NO_BLOCK
        self.drafts = []

    def own_masks(self, masks: Masks) -> Masks:
        """Masks of the draws that the step makes, by their indices among these."""
        if self.left_out is None:
            return masks
        firsts = accumulate((1 + n for n in self.left_out[:-1]), initial=0)  # of each row's draws
        index = {first: n for n, first in enumerate(firsts)}
        kept = [(n, place) for n, place in enumerate(masks.rows) if place in index]
        return Masks([index[place] for _, place in kept], masks.bits[[n for n, _ in kept]])

    def with_images(self, slots: Slots) -> list[ImageRow]:
        """Return the chunks that images concern."""
        starts = accumulate((row.end - row.start for row in self.chunks), initial=self.n_decodes)
        return [
            ImageRow(row.start, row.end, first, slot.images)
            for row, first, slot in zip(self.chunks, starts, slots.of(self.chunks))
            if slot.images is not None and slot.images.concern(row.start)
        ]

    def score(self, slots: Slots, device: torch.device, at_once: int) -> None:
        """Score the tokens of its chunks for which the plan asks that."""
        starts = accumulate((row.end - row.start for row in self.chunks), initial=self.n_decodes)
        rows = [
            ScoredRow(row, first, slot.scored)
            for row, first, slot in zip(self.chunks, starts, slots.of(self.chunks))
            if row.n_scored and slot.scored is not None
        ]
        self.scores = DeviceStepScores(rows, device, at_once)

    @property
    def n_tokens(self) -> int:
        """Number of tokens without drafts."""
        return self.n_decodes + sum(row.end - row.start for row in self.chunks)

    @classmethod
    def of_columns(cls, packet: Ints) -> "StepBatch":
        """A batch of rows that only decode: none wants probabilities or has a grammar."""
        return cls(packet, slots=packet[0].tolist(), order=range(packet.shape[1]))

    @classmethod
    def of(
        cls, packet: Ints, others: Sequence[Row], before: Sequence[int], slots: Sequence[Slot], n_groups: int
    ) -> "StepBatch":
        """A batch of a plan's rows: the packet of those that only decode, others, how many of the former come before
        each of these, and their slots."""
        batch, decodes, places = cls(), list[Row](), list[int]()  # other rows that decode, and their places
        sampling = list[tuple[int, Row]]()  # chunks that sample, and how many rows that sample come before each
        for row, n_before in zip(others, before):
            if row.samples and (row.follows or len(row.token_ids) == 4):
                places.append(n_before + len(decodes))
                decodes.append(row)
                continue
            batch.chunks.append(row)
            if row.samples:
                sampling.append((n_before + len(decodes) + len(sampling), row))
        if not packet.shape[1]:
            packet = packet_of(decodes, n_groups)
        elif decodes:
            at = [place - n for n, place in enumerate(places)]
            packet = np.insert(packet, at, packet_of(decodes, n_groups), axis=1)
        batch.packet, batch.slots, batch.order = packet, packet[0].tolist(), list(range(packet.shape[1]))
        for n, (place, row) in enumerate(sampling, batch.n_decodes):
            batch.slots.insert(place, row.slot)
            batch.order.insert(place, n)
        if any(row.draft_ids for row in decodes):
            batch.drafts = [b""] * batch.n_decodes
            for place, row in zip(places, decodes):
                batch.drafts[place] = row.draft_ids
        batch.masked = any(slot.masked and row.samples for row, slot in zip(others, slots))
        wanted = {row.slot: slot.logprobs for row, slot in zip(others, slots) if slot.logprobs is not None}
        if wanted:
            batch.logprobs = list(map(wanted.get, batch.slots))
        return batch


class VerifyShape(NamedTuple):
    """The layout of a step that verifies drafts: the key of its CUDA graph."""

    n_rows: int
    n_tokens: int  # of all rows: their own, drafts, and padding

    def starts(self, drafts: Sequence[bytes]) -> list[int]:
        """The first token of each row, given the drafts of each (u32 LE). The last rows have the tokens that pad the
        step, none too many of them."""
        lengths = [1 + (len(ids) >> 2) for ids in drafts] + [0] * (self.n_rows - len(drafts))
        left, r = self.n_tokens - sum(lengths), self.n_rows
        while left:
            r -= 1
            more = min(left, MAX_ROW_TOKENS - lengths[r])
            lengths[r] += more
            left -= more
        return list(accumulate(lengths[:-1], initial=0))


class DecodeBuffers:
    """The fixed buffers that captured decode steps read and write."""

    def __init__(
        self, max_rows: int, n_groups: int, width: int, device: torch.device, verified: Sequence[VerifyShape] = ()
    ) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self._n_groups = n_groups
        n_tokens = max([max_rows, *(n for _, n in verified)])
        n_words = self._n_words = (DRAFT_HEADER_ROWS + 2 * n_groups) * max_rows + n_tokens
        self._upload = Upload(n_words, device)
        self._packet = zeros(n_words)
        self._starts = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._samples = torch.arange(n_tokens, device=device)
        self._sharing = Upload(max_rows + 2, device)
        self._shared = zeros(max_rows + 2)
        self.inputs = DecodeInputs(
            zeros(n_tokens),
            zeros(n_tokens),
            zeros(n_tokens),
            zeros(max_rows),
            zeros(n_groups, max_rows, width),
            zeros(n_tokens),
            zeros(max_rows + 1),
            zeros(n_tokens),
        )

    def _words(self, n_rows: int, drafts: bool) -> int:
        return ((DRAFT_HEADER_ROWS if drafts else HEADER_ROWS) + 2 * self._n_groups) * n_rows

    def packet(self, n_rows: int, drafts: bool = False) -> Tensor:
        return self._packet[: self._words(n_rows, drafts)].view(-1, n_rows)

    def drafts(self, shape: VerifyShape) -> Tensor:
        """By token; behind the packet."""
        return self._packet[self._words(shape.n_rows, True) :][: shape.n_tokens]

    def send(
        self, packet: Ints, n_rows: int, n_tokens: int = 0, starts: Sequence[int] = (), drafts: Sequence[bytes] = ()
    ) -> None:
        """Queue the packet of decode rows, padded to n_rows. starts, drafts: of each row of a step that verifies
        drafts, padded to n_tokens."""
        n, header = packet.shape[1], DRAFT_HEADER_ROWS if n_tokens else HEADER_ROWS
        n_words = self._words(n_rows, n_tokens > 0)
        array = self._upload.array()
        words = array[:n_words].reshape(-1, n_rows)
        if n < n_rows:
            words[:, n:], words[0, n:], words[2, n:] = PADDING, 0, 0
        if n and not n_tokens:
            words[:, :n] = packet
        elif n:
            words[:HEADER_ROWS, :n], words[header:, :n] = packet[:HEADER_ROWS], packet[HEADER_ROWS:]
        if n_tokens:
            words[3], words[3, :n], words[4] = 0, [len(ids) >> 2 for ids in drafts], starts
            ends = [*starts[1:], n_tokens]
            by_row = [(_OWN + ids).ljust(4 * (end - at), b"\0") for ids, at, end in zip(drafts, starts, ends)]
            array[n_words : n_words + n_tokens] = np.frombuffer(b"".join(by_row).ljust(4 * n_tokens, b"\0"), np.int32)
        self._upload.send(self._n_words, self._packet)  # all of it, which is little

    def send_shared(self, shared: SharedPrefix) -> None:
        array, n = self._sharing.array(), len(shared.rows)
        array[2:] = 0
        array[:2] = shared.row, shared.n_blocks * BLOCK_TOKENS
        array[2 : 2 + n] = shared.rows * (shared.n_blocks * BLOCK_TOKENS)
        self._sharing.send(len(array), self._shared)

    def shared(self, n_rows: int) -> tuple[Tensor, Tensor]:
        return self._shared[:2], self._shared[2 : 2 + n_rows]

    def step(self, n_rows: int, cascade: bool = False, n_tokens: int = 0) -> StepInputs:
        """n_tokens: of all rows, of a step that verifies drafts."""
        shared, shares = self.shared(n_rows) if cascade else (None, None)
        to, n = self.inputs, n_tokens or n_rows
        return StepInputs(
            token_ids=to.token_ids[:n],
            positions=to.positions[:n],
            query_starts=(to.starts if n_tokens else self._starts)[: n_rows + 1],
            context_lens=to.context_lens[:n_rows],
            block_tables=[table[:n_rows] for table in to.tables],
            sample_tokens=self._samples[:n],
            shape=StepShape(n_rows, shared_prefix=shared, prefix_lens=shares, drafts=n_tokens > 0),
        )


class MixedShape(NamedTuple):
    """The layout of a step with chunks: the key of its CUDA graph.

    Decode rows come first, the last of them perhaps padding without a token; chunks follow.
    """

    n_decodes: int  # rows, padding included
    n_tokens: int
    n_chunks: int  # rows after them
    padded: bool  # chunks and tokens are padded too: the last row is padding and has the remaining tokens

    @property
    def n_rows(self) -> int:
        return self.n_decodes + self.n_chunks

    @property
    def slices(self) -> list[slice]:
        """Slices of: token ids, positions, query starts, context lengths, slots; the samples' tokens, slots, positions.

        Each is aligned to 16 bytes: Triton recompiles kernels for other pointers.
        """
        found, first = [], 0
        for size in (self.n_tokens, self.n_tokens, self.n_rows + 1, *[self.n_rows] * 5):
            found.append(slice(first, first + size))
            first += -(-size // ALIGNED) * ALIGNED
        return found

    @classmethod
    def exact(cls, batch: StepBatch) -> "MixedShape":
        return cls(batch.n_decodes, batch.n_tokens, len(batch.chunks), False)

    @classmethod
    def of(
        cls, batch: StepBatch, max_rows: int, largest: int = MAX_GRAPH_TOKENS, token_budget: int = BURST_TOKENS
    ) -> "MixedShape":
        """A shape that many batches share, worth capturing; the exact one for large or unusual batches."""
        n_tokens = mixed_tokens(batch.n_tokens)
        if burst := burst_tokens(batch.n_decodes, batch.n_tokens, largest, token_budget):
            n_tokens = largest = burst
        if len(batch.chunks) >= CHUNK_ROWS or n_tokens > largest:
            return cls.exact(batch)
        return cls(mixed_decode_rows(batch.n_decodes, max_rows), n_tokens, CHUNK_ROWS, True)

    @classmethod
    def all_padded(
        cls, max_rows: int, largest: int = MAX_GRAPH_TOKENS, token_budget: int = MAX_GRAPH_TOKENS
    ) -> list["MixedShape"]:
        """All shapes that `of` shares, of steps with a token budget."""
        found, fewest = [], 0  # a size is used for more rows than the next smaller one has
        for n_decodes in all_mixed_decode_rows(max_rows):
            sizes = range(TILE, largest + 1, TILE)
            found += [cls(n_decodes, n_tokens, CHUNK_ROWS, True) for n_tokens in sizes if n_tokens > fewest]
            fewest = n_decodes
        if burst_tokens(1, BURST_TOKENS, largest, token_budget):
            found += [cls(n_decodes, BURST_TOKENS, CHUNK_ROWS, True) for n_decodes in all_mixed_decode_rows(max_rows)]
        return found


class SampledRows(NamedTuple):
    """The rows that sample."""

    slots: Tensor  # int32 [rows]; PADDING where a row does not sample
    positions: Tensor  # int32 [rows], of the tokens to be sampled


class MixedBuffers:
    """Inputs of steps with chunks: assembled on the host, uploaded in one copy."""

    def __init__(self, max_tokens: int, max_rows: int, width: int, device: torch.device) -> None:
        n_words = 2 * max(max_tokens, MAX_GRAPH_TOKENS) + 6 * (max_rows + CHUNK_ROWS) + 1 + 8 * ALIGNED
        self._width = width
        self._upload = Upload(n_words, device)
        self._buffer = torch.zeros(n_words, dtype=torch.int32, device=device)
        self._counting = np.arange(max(width * BLOCK_TOKENS, n_words) + 1, dtype=np.int32)

    def send(self, batch: StepBatch, shape: MixedShape, spare_slot: int) -> int:
        """Queue the upload; returns the longest context."""
        array, slices = self._upload.array(), shape.slices
        longest = self._fill([array[each] for each in slices], batch, shape, spare_slot)
        self._upload.send(slices[-1].stop, self._buffer)
        return longest

    def inputs(
        self,
        shape: MixedShape,
        state: SlotState,
        batch: StepBatch | None,
        longest: int = 0,
        shared: tuple[Tensor, Tensor] | None = None,
    ) -> StepInputs:
        """Views of what was sent. A captured step has no batch: it depends on its shape alone."""
        views = [self._buffer[each] for each in shape.slices[:6]]
        token_ids, positions, starts, contexts, row_slots, samples = views
        d = min(shape.n_decodes, shape.n_tokens)
        if d:  # token ids of chunks are never negative
            last = state.last_tokens.index_select(0, row_slots[:d])
            token_ids[:d] = torch.where(token_ids[:d] < 0, last, token_ids[:d])
        width = self._width if batch is None else min(self._width, table_width(longest))
        tables = [table[:, :width].index_select(0, row_slots) for table in state.tables]
        chunks = None if batch is None else _chunks(batch)
        longest_query = shape.n_tokens if chunks is None else max(chunk.n for chunk in chunks)
        prefix, shares = shared or (None, None)
        step_shape = StepShape(shape.n_decodes, longest_query, prefix, shares, chunks)
        n_samples = shape.n_rows if batch is None else batch.n_samples
        return StepInputs(token_ids, positions, starts, contexts, tables, samples[:n_samples].long(), step_shape)

    def row_slots(self, shape: MixedShape) -> Tensor:
        return self._buffer[shape.slices[4]]

    def sampled_rows(self, shape: MixedShape, batch: StepBatch | None) -> SampledRows:
        slots, positions = (self._buffer[each] for each in shape.slices[-2:])
        n_samples = shape.n_rows if batch is None else batch.n_samples
        return SampledRows(slots[:n_samples], positions[:n_samples])

    def _fill(self, parts: list[NDArray[np.int32]], batch: StepBatch, shape: MixedShape, spare_slot: int) -> int:
        token_ids, positions, starts, contexts, row_slots, samples, sample_slots, sample_positions = parts
        d, n_decodes = batch.n_decodes, shape.n_decodes
        contexts[d:] = samples[d:] = sample_positions[d:] = 0
        row_slots[d:], sample_slots[d:] = spare_slot, PADDING
        begins = batch.packet[1]
        token_ids[:d] = batch.packet[2]
        positions[:d], contexts[:d], sample_positions[:d] = begins, begins + 1, begins + 1
        row_slots[:d] = sample_slots[:d] = batch.packet[0]
        starts[:d], starts[d : n_decodes + 1], samples[:d] = self._counting[:d], d, self._counting[:d]
        n, sampled, longest = d, n_decodes, int(begins.max(initial=-1)) + 1
        for r, row in enumerate(batch.chunks, n_decodes):
            end = row.end
            stop = n + end - row.start
            token_ids[n:stop] = np.frombuffer(row.token_ids, "<u4")
            positions[n:stop] = self._counting[row.start : end]
            starts[r + 1], contexts[r], row_slots[r] = stop, end, row.slot
            if row.samples:
                samples[sampled], sample_slots[sampled], sample_positions[sampled] = stop - 1, row.slot, end
                sampled += 1
            n, longest = stop, max(longest, end)
        if shape.padded:
            starts[n_decodes + len(batch.chunks) + 1 :] = n
            starts[-1], contexts[-1] = shape.n_tokens, shape.n_tokens - n
            token_ids[n:], positions[n:] = 0, self._counting[: shape.n_tokens - n]
        return longest


def _chunks(batch: StepBatch) -> list[PrefillChunk]:
    first, chunks = batch.n_decodes, []
    for n, row in enumerate(batch.chunks, first):
        chunks.append(PrefillChunk(n, first, row.end - row.start, row.end))
        first += row.end - row.start
    return chunks
