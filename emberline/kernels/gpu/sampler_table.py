"""How each slot's tokens are chosen, kept on the device: written when a sequence takes the slot, read by every draw.

A draw reads slot `s` from row s of each tensor, so a captured graph serves whoever sits in the slots. The host keeps
the same numbers and sends what changed, in the stream's order and without waiting.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from emberline.kernels.sampling import SamplerRow, sample

FIELDS = 16
(TEMPERATURE, TOP_P, MIN_P, REPETITION, FREQUENCY, PRESENCE) = range(6)  # of a slot's state: floats
(TOP_K, LOGPROBS, PENALISED, N_EDITS, MASK, SEED) = range(6, 12)  # integers; a seed takes two fields
MAX_TOP = 20  # log-probabilities beside the chosen token's
MAX_EDITS = 2048  # biased and banned tokens of one slot
IN_PROMPT = 1 << 14  # in a slot's counts; below it, how often the token was drawn
CANDIDATES = 8192  # tokens that a filter can tell apart without passes over the whole vocabulary
MAX_LISTED_K = 256  # up to this top_k, candidates are found by the highest logit of each SPAN of tokens
RANKED = 1024  # of them under such a top_k
CHUNK = 4096  # tokens one program looks at
SPAN = 256
FOUND = 16  # numbers that a draw keeps of each chunk
SPARE_ROWS = 64  # a draw may have more rows than there are slots: padding


@dataclass(slots=True)
class SampledBatch:
    """What a draw writes. Rows of slot -1 are left alone."""

    token_ids: Tensor  # int32 [rows]; -1: the logits were not numbers
    logprob: Tensor  # float32 [rows], where asked for
    top_ids: Tensor  # int32 [rows, MAX_TOP]
    top_logprobs: Tensor  # float32 [rows, MAX_TOP]

    @classmethod
    def empty(cls, rows: int, device: str | torch.device) -> "SampledBatch":
        return cls(
            torch.zeros(rows, dtype=torch.int32, device=device),
            torch.zeros(rows, dtype=torch.float32, device=device),
            torch.zeros(rows, MAX_TOP, dtype=torch.int32, device=device),
            torch.zeros(rows, MAX_TOP, dtype=torch.float32, device=device),
        )


class SamplerTable:
    def __init__(self, n_slots: int, vocab: int, device: str | torch.device, max_rows: int | None = None) -> None:
        self.n_slots, self.vocab, self.device = n_slots, vocab, torch.device(device)
        self.max_rows = max_rows or n_slots + SPARE_ROWS
        self.chunks = -(-vocab // CHUNK)
        self._host = np.zeros((n_slots, FIELDS), np.int32)
        self._rows: list[SamplerRow] = [SamplerRow() for _ in range(n_slots)]
        self._bans: list[tuple[int, ...]] = [()] * n_slots
        self._masked: list[int] = []  # slots that the next draw binds to a mask
        self._changed = False
        self.state = self._zeros(n_slots, FIELDS, dtype=torch.int32)
        self.edit_ids = self._zeros(n_slots, MAX_EDITS, dtype=torch.int32)
        self.edit_values = self._zeros(n_slots, MAX_EDITS, dtype=torch.float32)
        self.masks = self._zeros(n_slots, -(-vocab // 32), dtype=torch.int32)
        self.counts = self._zeros(n_slots, vocab, dtype=torch.int16)
        # Scratch of a draw: per row and chunk, then per row.
        self.found = self._zeros(self.max_rows, self.chunks, FOUND, dtype=torch.float32)
        self.spans = self._zeros(self.max_rows, self.chunks, CHUNK // SPAN, dtype=torch.float32)
        self.listed = self._zeros(self.max_rows, dtype=torch.int32)
        self.tops = self._zeros(self.max_rows, self.chunks, MAX_TOP, 2, dtype=torch.float32)
        self.candidate_ids = self._zeros(self.max_rows, CANDIDATES, dtype=torch.int32)
        self.candidates = self._zeros(self.max_rows, CANDIDATES, dtype=torch.float32)

    @staticmethod
    def bytes(n_slots: int, vocab: int) -> int:
        """What it will take on the device."""
        per_slot = FIELDS + 2 * MAX_EDITS + -(-vocab // 32)
        per_row = -(-vocab // CHUNK) * (FOUND + CHUNK // SPAN + 2 * MAX_TOP) + 2 * CANDIDATES + 1
        return n_slots * (4 * per_slot + 2 * vocab) + (n_slots + SPARE_ROWS) * 4 * per_row

    def _zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def _send(self, to: Tensor, numbers: NDArray[Any]) -> None:
        """Without waiting: torch keeps a pinned buffer until the copy from it is done."""
        source = torch.from_numpy(np.ascontiguousarray(numbers))
        to.copy_(source if self.device.type == "cpu" else source.pin_memory(), non_blocking=True)

    # --- what the runner says -------------------------------------------------------------------------------------

    def set(self, slot: int, row: SamplerRow) -> None:
        """A sequence takes the slot. Its bans and mask, if any, come apart."""
        self._rows[slot] = row
        self._bans[slot] = row.banned
        host = self._host[slot]
        floats = host.view(np.float32)
        floats[TEMPERATURE : PRESENCE + 1] = (
            row.temperature, row.top_p, row.min_p, row.repetition_penalty, row.frequency_penalty, row.presence_penalty
        )  # fmt: skip
        host[TOP_K] = min(row.top_k, 2**31 - 1)
        host[LOGPROBS] = -1 if row.logprobs is None else row.logprobs
        host[PENALISED] = row.penalised
        host[MASK] = 0
        host[SEED : SEED + 2] = np.array([row.seed], np.uint64).view(np.int32)
        if row.penalised:
            self._send(self.counts[slot], _counts(row, self.vocab))
        self._edit(slot)

    def ban(self, slot: int, ids: tuple[int, ...]) -> None:
        if ids != self._bans[slot]:
            self._bans[slot] = ids
            self._edit(slot)

    def allow(self, slots: Sequence[int], bits: NDArray[np.uint32]) -> None:
        """For the next draw only: slot slots[i] draws a token whose bit is set in bits[i]."""
        n, words = len(slots), self.masks.shape[1]
        numbers = np.zeros((n, words), np.uint32)
        numbers[:, : bits.shape[1]] = bits[:, :words]
        self._send(self.masks[:n], numbers.view(np.int32))
        self._clear_masks()
        for place, slot in enumerate(slots):
            self._host[slot, MASK] = place + 1
        self._masked = list(slots)
        self._changed = True

    def upload(self) -> None:
        """Before a draw. Free when nothing changed; masks last for one draw."""
        if self._changed:
            self._send(self.state, self._host.copy())
        self._changed = bool(self._masked)
        self._clear_masks()

    def _clear_masks(self) -> None:
        for slot in self._masked:
            self._host[slot, MASK] = 0
        self._masked = []

    def _edit(self, slot: int) -> None:
        bias = self._rows[slot].logit_bias
        n, bans = len(bias), self._bans[slot]
        assert n + len(bans) <= MAX_EDITS, "more biased and banned tokens than a slot holds"
        if n or bans:
            ids, values = np.zeros(MAX_EDITS, np.int32), np.full(MAX_EDITS, -np.inf, np.float32)
            ids[:n], values[:n] = list(bias), list(bias.values())
            ids[n : n + len(bans)] = bans
            self._send(self.edit_ids[slot], ids)
            self._send(self.edit_values[slot], values)
        self._host[slot, N_EDITS] = n + len(bans)
        self._changed = True

    # --- the meaning --------------------------------------------------------------------------------------------------

    def row(self, slot: int, position: int) -> SamplerRow:
        """The slot as the plain sampler wants it, read back from the device."""
        state = self.state[slot].cpu().numpy()
        row, counts = self._rows[slot], self.counts[slot].cpu().numpy()
        drawn = counts & (IN_PROMPT - 1)
        mask = int(state[MASK])
        return SamplerRow(
            row.temperature, row.top_k, row.top_p, row.min_p, row.repetition_penalty, row.frequency_penalty,
            row.presence_penalty, row.logit_bias, row.seed, position,
            prompt_ids=np.nonzero(counts & IN_PROMPT)[0].astype(np.uint32),
            output_ids=np.repeat(np.arange(self.vocab), drawn).astype(np.uint32),
            banned=self._bans[slot], logprobs=row.logprobs,
            allowed=self.masks[mask - 1].cpu().numpy().view(np.uint32) if mask else None,
        )  # fmt: skip


def _counts(row: SamplerRow, vocab: int) -> NDArray[np.int16]:
    counts = np.zeros(vocab, np.int16)
    if row.output_ids is not None:
        drawn = np.bincount(row.output_ids.astype(np.int64), minlength=vocab)
        counts += np.minimum(drawn, IN_PROMPT - 1).astype(np.int16)
    if row.prompt_ids is not None:
        counts[row.prompt_ids] |= IN_PROMPT
    return counts


def sample_reference(logits: Tensor, table: SamplerTable, slots: Tensor, positions: Tensor, out: SampledBatch) -> None:
    """What `sampling.draw` means, through the plain sampler, row by row."""
    for r, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        if slot < 0:
            continue
        row = table.row(slot, position)
        drawn = sample(logits[r : r + 1].float().clone(), [row])[0]
        out.token_ids[r] = drawn.token_id
        out.logprob[r] = drawn.logprob or 0.0
        for place, (token_id, logprob) in enumerate(drawn.top):
            out.top_ids[r, place], out.top_logprobs[r, place] = token_id, logprob
        if row.penalised and drawn.token_id >= 0:
            table.counts[slot, drawn.token_id] += 1
