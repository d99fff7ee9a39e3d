"""Per-slot state of the GPU runner: on the host, on the device, and the changes still to be uploaded."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from emberline.engine.core.plan import Admission, Masks, Row, n_accepted
from emberline.engine.core.rows import Ints
from emberline.engine.images.step_images import ImageRows, SlotImages
from emberline.engine.runners.cpu.runner import sampler_row
from emberline.engine.runners.gpu.stream import Upload
from emberline.engine.runners.prompt_scores import ScoredPrompt
from emberline.kernels.decode_inputs import MAX_DRAFTS, NO_BLOCK, SlotState
from emberline.kernels.sampling import SamplerRow
from emberline.kv.block_pool import NULL_BLOCK, blocks_of
from emberline.protocol.block_hash import BLOCK_TOKENS
from emberline.protocol.token_ids import pack

_CHANGES = 1 << 15  # table entries per upload


class SlotSampler(Protocol):
    """Sampling parameters by slot, on the device. `upload` queues the changes since the last one."""

    def set(self, slot: int, row: SamplerRow) -> None: ...
    def ban(self, slot: int, ids: tuple[int, ...]) -> None: ...
    def allow(self, slots: list[int], bits: NDArray[np.uint32]) -> None: ...
    def upload(self) -> None: ...


@dataclass(slots=True)
class Slot:
    n_prompt: int
    masked: bool  # each draw has a mask of what may be sampled
    logprobs: int | None
    sampler: SamplerRow
    ids: bytearray | None  # prompt and output as far as the host knows them, kept only for penalties
    banned: tuple[int, ...] = ()
    n_told: int = 0  # rows whose tokens the host gave
    scored: ScoredPrompt | None = None  # None: its prompt is not scored
    images: SlotImages | None = None  # None: its prompt has none
    uncounted: bool = False  # the device lacks tokens of its rows that did not sample


Penalized = list[tuple[Row, Slot, int]]  # rows, their slots, and how often the host gave tokens of these


class Slots:
    """Block tables are kept twice: on the host for inspection, on the device for kernels."""

    def __init__(
        self,
        n_slots: int,
        n_groups: int,
        width: int,
        sampler: Any,
        device: torch.device,
        images: ImageRows | None = None,
    ) -> None:
        """images: None if no request has any."""
        self.tables = np.zeros((n_groups, n_slots + 1, width), np.int32)
        self.state = SlotState(
            torch.zeros(n_slots + 1, dtype=torch.int32, device=device),
            torch.zeros(n_groups, n_slots + 1, width, dtype=torch.int32, device=device),
            torch.zeros(n_slots + 1, dtype=torch.int32, device=device),
            torch.zeros(n_slots + 1, dtype=torch.int32, device=device),
            torch.zeros(n_slots + 1, MAX_DRAFTS, dtype=torch.int32, device=device),
        )
        self._images = images
        mrope = images is not None and images.mrope
        # What is added to the positions of tokens after each prompt; None: the model has no M-RoPE.
        self.rope_deltas = torch.zeros(n_slots + 1, dtype=torch.int32, device=device) if mrope else None
        self.spare = n_slots  # for padding: its table has null blocks only
        self.n_admitted = 0
        self.sampler: SlotSampler = sampler
        self._slots: dict[int, Slot] = {}
        self._unusual = np.ones(n_slots + 1, np.bool_)  # nothing runs there, or more is to be done than decoding
        self._passed = np.zeros((n_groups, n_slots + 1), np.int32)  # leading table entries that were cleared
        self._changed: list[NDArray[np.int32]] = []  # indices into the flat tables
        self._upload = Upload(2 * _CHANGES, device)
        self._changes = torch.zeros(2 * _CHANGES, dtype=torch.int32, device=device)

    def of(self, rows: Sequence[Row]) -> list[Slot]:
        slots = self._slots
        return [slots[row.slot] for row in rows]

    def passed(self, rows: Sequence[Row]) -> list[list[int]]:
        """For each row and group: leading table entries that were cleared."""
        found: list[list[int]] = self._passed[:, [row.slot for row in rows]].T.tolist()
        return found

    def admit(self, admission: Admission) -> None:
        request, row = admission.request, sampler_row(admission)
        images = None if self._images is None else self._images.of(request)
        if self.rope_deltas is not None:
            self.rope_deltas[admission.slot] = 0 if images is None else images.rope_delta
        self.sampler.set(admission.slot, row)
        self._slots[admission.slot] = Slot(
            n_prompt=len(request.prompt_ids) // 4,
            masked=request.masked,
            logprobs=request.sampling.logprobs,
            sampler=row,
            ids=None if row.prompt_ids is None else bytearray(request.prompt_ids + admission.output_ids),
            scored=ScoredPrompt.of(request),
            images=images,
        )
        self._passed[:, admission.slot] = 0
        unusual = request.masked or request.sampling.logprobs is not None or row.prompt_ids is not None
        self._unusual[admission.slot] = unusual
        for g, blocks in enumerate(admission.blocks):
            self.tables[g, admission.slot, : len(blocks)] = blocks
            self._mark_changed(g, admission.slot, 0, len(blocks))
        self.n_admitted += 1

    def forget(self, rows: Sequence[Row]) -> None:
        """A step with these rows failed before the device knew their tables: nothing runs in their slots, which would
        write to the blocks of others, until they are admitted again."""
        for row in rows:
            self._slots.pop(row.slot, None)
            self._unusual[row.slot] = True

    def grow(self, row: Row, blocks: list[list[int]], *, upload: bool) -> None:
        """Append to a row's block table; upload it too, unless the step's packet contains it."""
        first = blocks_of(row.stop) - len(blocks[0])
        for g, added in enumerate(blocks):
            if len(added) == 1:  # decoding: many rows gain one block in the same step, and a slice takes much longer
                self.tables[g, row.slot, first] = added[0]
            else:
                self.tables[g, row.slot, first : first + len(added)] = added
            if upload:
                self._mark_changed(g, row.slot, first, first + len(added))

    def only_decode(self, slots: Ints) -> bool:
        """True if rows of these slots that decode need nothing else: no probabilities, penalties or grammar."""
        return not np.count_nonzero(self._unusual[slots])  # in a third of the time of `any`

    def take(self, packet: Ints, *, upload: bool) -> None:
        """Take in the packet of rows that decode; upload what is new in their tables, unless the step reads the
        packet."""
        slots, n_groups = packet[0], len(self.tables)
        blocks, passed = packet[3 : 3 + n_groups], packet[3 + n_groups :]
        (grown,) = (blocks[0] != NO_BLOCK).nonzero()
        if len(grown):
            places = packet[1, grown] // BLOCK_TOKENS
            self.tables[:, slots[grown], places] = blocks[:, grown]
            for slot, place in zip(slots[grown].tolist(), places.tolist()) if upload else ():
                for g in range(n_groups):
                    self._mark_changed(g, slot, place, place + 1)
        if not np.count_nonzero(passed):  # nor did any earlier
            return
        for r in np.flatnonzero((passed != self._passed[:, slots]).any(0)).tolist():
            self.leave_window(int(slots[r]), passed[:, r].tolist(), upload=upload)

    def leave_window(self, slot: int, passed: Sequence[int], *, upload: bool) -> None:
        """Clear the table entries that left the attention windows of a slot's row."""
        for g, (old, new) in enumerate(zip(self._passed[:, slot].tolist(), passed)):
            if old == new:
                continue
            self.tables[g, slot, old:new] = NULL_BLOCK
            if upload or new - old > 1:
                self._mark_changed(g, slot, old, new)
            self._passed[g, slot] = new

    def recount(self, row: Row, slot: Slot) -> None:
        """The device counts the tokens it samples; forced tokens must be uploaded."""
        if slot.ids is None or row.follows:
            return
        slot.n_told += 1
        del slot.ids[4 * row.start :]  # drafts that were accepted stay
        slot.ids += row.token_ids + row.draft_ids
        slot.uncounted |= row.start >= slot.n_prompt and (len(row.token_ids) > 4 or not row.samples)
        if row.samples and slot.uncounted:
            slot.uncounted = False
            slot.sampler.output_ids = np.frombuffer(bytes(slot.ids[4 * slot.n_prompt :]), "<u4")
            slot.banned = ()
            self.sampler.set(row.slot, slot.sampler)

    def ban(self, row: Row, slot: Slot) -> None:
        if row.banned != slot.banned:
            slot.banned = row.banned
            self.sampler.ban(row.slot, row.banned)

    def allow(self, slots: list[int], masks: Masks | None) -> None:
        """Set the masks of the slots that have a grammar, for this step."""
        if masks is not None:
            self.sampler.allow([slots[index] for index in masks.rows], masks.bits)

    def upload(self) -> None:
        """Queue the upload of all changes."""
        self.sampler.upload()
        if not self._changed:
            return
        indices = np.concatenate(self._changed)
        self._changed.clear()
        values = self.tables.reshape(-1)[indices]  # current values: an index noted twice gets one value
        for first in range(0, len(indices), _CHANGES):
            some = indices[first : first + _CHANGES]
            array, n = self._upload.array(), len(some)
            array[:n], array[n : 2 * n] = some, values[first : first + n]
            sent = self._upload.send(2 * n, self._changes)
            self.state.tables.view(-1).index_put_((sent[:n].long(),), sent[n:])

    def _mark_changed(self, group: int, slot: int, start: int, stop: int) -> None:
        if start < stop:
            _, n_slots, width = self.tables.shape
            first = (group * n_slots + slot) * width
            self._changed.append(np.arange(first + start, first + stop, dtype=np.int32))


def keep_tokens(penalized: Penalized, drawn_of_all: Sequence[int]) -> None:
    """Keep the drawn tokens of rows with penalties, unless the host has given other ones meanwhile."""
    draws = iter(drawn_of_all)
    for row, slot, n_told in penalized:
        drawn = list(islice(draws, 1 + row.n_drafts))
        if slot.ids is not None and slot.n_told == n_told and drawn[0] >= 0:
            at = len(slot.ids) if row.n_ahead else 4 * row.end  # then the host knows the rows before it
            slot.ids[at:] = pack(drawn[: 1 + n_accepted(drawn, row.draft_ids)])
