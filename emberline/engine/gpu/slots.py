"""What a GPU runner knows of the sequence in each slot, here and on the device, and what it must still tell there."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from emberline.engine.gpu.stream import Upload
from emberline.engine.scheduler.plan import Admission, Masks, Row
from emberline.kernels.decode_inputs import SlotState
from emberline.kernels.sampling import SamplerRow
from emberline.kv.block_pool import NULL_BLOCK, blocks_of

_CHANGES = 1 << 15  # table entries told at once


class SamplerTable(Protocol):
    """Sampling parameters by slot, on the device. `upload` queues what was set since the last one."""

    def set(self, slot: int, row: SamplerRow) -> None: ...
    def ban(self, slot: int, ids: tuple[int, ...]) -> None: ...
    def allow(self, slots: list[int], bits: NDArray[np.uint32]) -> None: ...
    def upload(self) -> None: ...


@dataclass(slots=True)
class Slot:
    n_prompt: int
    masked: bool  # a grammar decides what it may draw
    logprobs: int | None
    passed: list[int]
    sampler: SamplerRow
    ids: bytearray | None  # prompt and output as far as the host was told, kept where a penalty looks back at them
    banned: tuple[int, ...] = ()


class Slots:
    """Tables are kept twice: here to be looked at, there to be read by kernels."""

    def __init__(self, n_slots: int, n_groups: int, width: int, sampler: Any, device: torch.device) -> None:
        self.tables = np.zeros((n_groups, n_slots + 1, width), np.int32)
        self.state = SlotState(
            torch.zeros(n_slots + 1, dtype=torch.int32, device=device),
            torch.zeros(n_groups, n_slots + 1, width, dtype=torch.int32, device=device),
        )
        self.spare = n_slots  # nobody's: its table holds null blocks alone
        self.n_admitted = 0
        self.sampler: SamplerTable = sampler
        self._slots: dict[int, Slot] = {}
        self._changed: list[NDArray[np.int32]] = []  # places in the flat tables
        self._upload = Upload(2 * _CHANGES, device)
        self._changes = torch.zeros(2 * _CHANGES, dtype=torch.int32, device=device)

    def of(self, rows: Sequence[Row]) -> list[Slot]:
        slots = self._slots
        return [slots[row.slot] for row in rows]

    def admit(self, admission: Admission) -> None:
        request, sampling = admission.request, admission.request.sampling
        looks_back = sampling.repetition_penalty != 1 or sampling.frequency_penalty or sampling.presence_penalty
        row = SamplerRow(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            frequency_penalty=sampling.frequency_penalty,
            presence_penalty=sampling.presence_penalty,
            logit_bias=sampling.logit_bias,
            seed=admission.seed,
            prompt_ids=np.frombuffer(request.prompt_ids, "<u4") if looks_back else None,
            output_ids=np.frombuffer(admission.output_ids, "<u4") if looks_back else None,
            logprobs=sampling.logprobs,
        )
        self.sampler.set(admission.slot, row)
        self._slots[admission.slot] = Slot(
            n_prompt=len(request.prompt_ids) // 4,
            masked=bool(request.grammar),
            logprobs=sampling.logprobs,
            passed=[0] * len(self.tables),
            sampler=row,
            ids=bytearray(request.prompt_ids + admission.output_ids) if looks_back else None,
        )
        for g, blocks in enumerate(admission.blocks):
            self.tables[g, admission.slot, : len(blocks)] = blocks
            self._note(g, admission.slot, 0, len(blocks))
        self.n_admitted += 1

    def grow(self, row: Row, blocks: list[list[int]], *, tell: bool) -> None:
        """Append to a row's table; tell the device too, unless the step's packet does."""
        first = blocks_of(row.start)
        for g, added in enumerate(blocks):
            if len(added) == 1:  # of a stream: many have one in the same step, and a slice takes much longer
                self.tables[g, row.slot, first] = added[0]
            else:
                self.tables[g, row.slot, first : first + len(added)] = added
            if tell:
                self._note(g, row.slot, first, first + len(added))

    def leave(self, row: Row, slot: Slot, *, tell: bool) -> None:
        """Take in what has fallen out of a row's windows."""
        for g, (old, new) in enumerate(zip(slot.passed, row.passed)):
            self.tables[g, row.slot, old:new] = NULL_BLOCK
            if tell or new - old > 1:
                self._note(g, row.slot, old, new)
        slot.passed = row.passed

    def recount(self, row: Row, slot: Slot) -> None:
        """The device counts what it draws; tokens that were put into a reply it must be told of."""
        if slot.ids is None or row.follows:
            return
        del slot.ids[4 * row.start :]
        slot.ids += row.token_ids
        if row.samples and row.start >= slot.n_prompt and len(row.token_ids) > 4:
            slot.sampler.output_ids = np.frombuffer(bytes(slot.ids[4 * slot.n_prompt :]), "<u4")
            slot.banned = ()
            self.sampler.set(row.slot, slot.sampler)

    def ban(self, row: Row, slot: Slot) -> None:
        if row.banned != slot.banned:
            slot.banned = row.banned
            self.sampler.ban(row.slot, row.banned)

    def allow(self, slots: list[int], masks: Masks | None) -> None:
        """What the grammars' slots may draw in this step."""
        if masks is not None:
            self.sampler.allow([slots[place] for place in masks.rows], masks.bits)

    def ship(self) -> None:
        """Queue everything that changed."""
        self.sampler.upload()
        if not self._changed:
            return
        places = np.concatenate(self._changed)
        self._changed.clear()
        values = self.tables.reshape(-1)[places]  # of now: a place noted twice gets one value
        for first in range(0, len(places), _CHANGES):
            some = places[first : first + _CHANGES]
            array, n = self._upload.array(), len(some)
            array[:n], array[n : 2 * n] = some, values[first : first + n]
            sent = self._upload.send(2 * n, self._changes)
            self.state.tables.view(-1).index_put_((sent[:n].long(),), sent[n:])

    def _note(self, group: int, slot: int, start: int, stop: int) -> None:
        if start < stop:
            _, n_slots, width = self.tables.shape
            first = (group * n_slots + slot) * width
            self._changed.append(np.arange(first + start, first + stop, dtype=np.int32))
