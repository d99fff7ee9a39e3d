"""Runs a draft model behind the steps of a CPU runner: keeps its KV cache, and drafts for the rows that sample.

A draft model needs the tokens alone. So where nothing is to be drafted it may lag behind: it computes a block's entries
when the block is complete, which is before the cache can know it, in one pass that reads its weights once. Entries of
drafts that were accepted are those of the sequence, and are not computed again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from emberline.engine.core.plan import Row, Sampled, StepPlan, known_tokens
from emberline.kernels.sampling import SamplerRow, sample
from emberline.kv.block_pool import blocks_of
from emberline.models.decoder import StepInputs
from emberline.models.draft_model import DraftModel
from emberline.protocol.block_hash import BLOCK_TOKENS
from emberline.protocol.token_ids import pack


@dataclass(slots=True)
class _Slot:
    """The last tokens of a sequence. All tokens before them have entries."""

    admission: int  # serial number of the admission whose entries these are
    start: int  # position of the first of `ids`
    ids: list[int] = field(default_factory=list)  # tokens of the sequence, and drafts behind them
    n_done: int = 0  # leading ones that have entries

    @property
    def end(self) -> int:
        return self.start + len(self.ids)

    def take(self, start: int, tokens: list[int]) -> None:
        """Replace the sequence's tokens from position `start` on. The last token is always computed, since the tokens
        after it are to be drafted."""
        kept, before = start - self.start, self.ids[start - self.start :]
        n_same = next((n for n, (a, b) in enumerate(zip(before, tokens)) if a != b), min(len(before), len(tokens)))
        self.ids[kept:] = tokens
        self.n_done = min(self.n_done, kept + n_same, len(self.ids) - 1)

    def forget(self, n_known: int, limit: int) -> None:
        """All have entries now, those from position `limit` on in scratch. Drop what the next row will not have: it
        begins with the last of the tokens that are known, or behind it."""
        self.n_done = min(len(self.ids), limit - self.start)
        n = min(self.n_done, n_known - 1)
        del self.ids[:n]
        self.start, self.n_done = self.start + n, self.n_done - n


@dataclass(slots=True)
class _Part:
    """A row whose missing entries are computed."""

    row: Row
    slot: _Slot
    sampler: SamplerRow | None  # of its first draw; None: nothing is drafted behind it
    drafts: list[int] = field(default_factory=list)

    def draw(self) -> SamplerRow:
        """With the noise and the parameters of the draw that will verify the next draft, so that they agree."""
        assert self.sampler is not None
        slot, output_ids = self.slot, self.sampler.output_ids
        if output_ids is not None:  # penalties count what came after
            later = slot.ids[self.row.end - slot.start :]
            output_ids = np.concatenate([output_ids, np.array(later, np.uint32)])
        return replace(self.sampler, position=slot.end, output_ids=output_ids, allowed=None, logprobs=None)


class DraftModelRunner:
    """Each slot has a block of scratch behind the pools' blocks, which no cache knows of: drafts, and the last token
    drawn, may lie behind the blocks of their sequence. Entries there are computed again."""

    taps: tuple[int, ...] = ()

    def __init__(self, model: DraftModel, pools: Sequence[Tensor], max_running: int) -> None:
        """pools: of the model's KV groups; the last `max_running` blocks of each are scratch."""
        self._model, self._pools = model, list(pools)
        self._scratch = [len(pool) - max_running for pool in pools]
        self._slots: list[_Slot | None] = [None] * max_running

    def draft(
        self,
        plan: StepPlan,
        states: list[Tensor],
        tables: Sequence[NDArray[np.int32]],
        sampled: Sequence[Sampled],
        samplers: Sequence[SamplerRow],
    ) -> list[bytes]:
        """Take in a step's tokens; what may follow the last token drawn, for each row that samples.

        `tables`: block tables of the model's groups, by slot.
        """
        parts: list[_Part] = []
        drafting: list[_Part | None] = []  # for each row that samples
        draw = 0
        for row in plan.rows:
            draws = sampled[draw : draw + 1 + row.n_drafts] if row.samples else ()
            is_valid = bool(draws) and draws[0].token_id >= 0
            sampler = samplers[draw] if is_valid and plan.depth else None
            draw += len(draws)
            slot = self._slot(row)
            slot.take(row.start, known_tokens(row, draws if is_valid else ()))
            part = _Part(row, slot, sampler)
            if sampler is not None or self._is_due(slot):
                parts.append(part)
            if row.samples:
                drafting.append(part if sampler is not None else None)
        if parts:
            self._compute(parts, plan.depth, [table[[part.row.slot for part in parts]] for table in tables])
        if not plan.depth:
            return []
        return [b"" if part is None or min(part.drafts) < 0 else pack(part.drafts) for part in drafting]

    def _slot(self, row: Row) -> _Slot:
        slot = self._slots[row.slot]
        if slot is None or slot.admission != row.admission or not slot.start <= row.start <= slot.end:
            slot = self._slots[row.slot] = _Slot(row.admission, row.start)
        return slot

    def _is_due(self, slot: _Slot) -> bool:
        n_done = slot.start + slot.n_done
        if self._model.has_windows:  # blocks leave the window with the sequence's own position
            return slot.end > n_done
        return slot.end // BLOCK_TOKENS > n_done // BLOCK_TOKENS

    def _compute(self, parts: list[_Part], depth: int, tables: list[NDArray[np.int32]]) -> None:
        """The missing entries of all parts, and then the drafts, a token of all at a time."""
        widened = [self._widened(parts, table, first) for table, first in zip(tables, self._scratch)]
        n_known = [len(part.slot.ids) for part in parts]
        chains = [n for n, part in enumerate(parts) if part.sampler is not None]
        logits = self._extend(parts, widened)
        rows = [table[chains] for table in widened]
        drafting = [parts[n] for n in chains]
        for n in range(depth if drafting else 0):
            if n:
                logits = self._extend(drafting, rows)
            for part, drawn in zip(drafting, sample(logits, [part.draw() for part in drafting])):
                part.drafts.append(drawn.token_id)
                if n + 1 < depth:
                    part.slot.ids.append(max(drawn.token_id, 0))
        for part, known in zip(parts, n_known):
            part.slot.forget(known, BLOCK_TOKENS * blocks_of(part.row.stop))

    def _widened(self, parts: list[_Part], table: NDArray[np.int32], first: int) -> NDArray[np.int32]:
        """With the scratch block behind each row's own blocks."""
        wide = np.zeros((len(parts), table.shape[1] + 1), np.int32)
        wide[:, :-1] = table
        for r, part in enumerate(parts):
            wide[r, blocks_of(part.row.stop)] = first + part.row.slot
        return wide

    def _extend(self, parts: list[_Part], tables: list[NDArray[np.int32]]) -> Tensor:
        """Entries for all tokens of the parts that have none; logits behind the last one of those that draft."""
        ids: list[int] = []
        positions: list[NDArray[np.int32]] = []
        starts, last = [0], []
        for part in parts:
            slot = part.slot
            ids += slot.ids[slot.n_done :]
            positions.append(np.arange(slot.start + slot.n_done, slot.end, dtype=np.int32))
            slot.n_done = len(slot.ids)
            starts.append(len(ids))
            if part.sampler is not None:
                last.append(len(ids) - 1)
        ends = [part.slot.end for part in parts]
        width = blocks_of(max(ends))
        step = StepInputs(
            token_ids=torch.tensor(ids, dtype=torch.int32),
            positions=torch.from_numpy(np.concatenate(positions)),
            query_starts=torch.tensor(starts, dtype=torch.int32),
            context_lens=torch.tensor(ends, dtype=torch.int32),
            block_tables=[torch.from_numpy(np.ascontiguousarray(table[:, :width])) for table in tables],
            sample_tokens=torch.tensor(last, dtype=torch.int64),
        )
        return self._model.forward(step, self._pools)
