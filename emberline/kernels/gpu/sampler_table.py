"""Sampling parameters of every sequence slot on the device: written when a sequence takes the slot, read every step.

A launch reads the parameters of slot s from row s of each tensor, so that a captured CUDA graph serves any sequences.
The host keeps a copy and uploads changes asynchronously, in stream order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from emberline.kernels.sampling import SamplerRow, sample

FIELDS = 16  # of a slot's state
(TEMPERATURE, TOP_P, MIN_P, REPETITION, FREQUENCY, PRESENCE) = range(6)  # floats
(TOP_K, LOGPROBS, HAS_PENALTIES, N_EDITS, MASK, SEED) = range(6, 12)  # integers; the seed takes two fields
GUIDED = 13  # whether the slot has a grammar
MAX_TOP = 20  # log-probabilities in addition to the sampled token's
MAX_EDITS = 2048  # biased and banned tokens per slot
IN_PROMPT = 1 << 14  # flag in a slot's token counts; the bits below count how often the token was sampled
CANDIDATES = 8192  # capacity of the candidate list; beyond it filters need passes over the whole vocabulary
MAX_LISTED_K = 256  # up to this top_k, candidates are bounded by the maximum of each SPAN of tokens
MAX_RANKED = 1024  # candidates under such a top_k
CHUNK = 4096  # tokens per program
SPAN = 256
# Per chunk: 0 maximum logit, 1 its id, 2 maximum with noise, 3 its id, 4 raw maximum, 5 raw exp sum, 6 scaled logit of
# the maximum with noise, 7 scaled exp sum, 8 count and 9 mass of the tokens that rank before the unfiltered sample.
CHUNK_STATS = 16
SPARE_ROWS = 64  # padding rows of a launch beyond the number of slots


@dataclass(slots=True)
class SampledBatch:
    """Output buffers of `sampler.sample_batch`. Padding rows are not written."""

    token_ids: Tensor  # int32 [rows]; -1: the logits were NaN or infinite
    logprob: Tensor  # float32 [rows], where requested
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
        self._masked: list[int] = []  # slots with a grammar mask in the next launch
        self._changed = False
        self.state = self._zeros(n_slots, FIELDS, dtype=torch.int32)
        self.edit_ids = self._zeros(n_slots, MAX_EDITS, dtype=torch.int32)
        self.edit_values = self._zeros(n_slots, MAX_EDITS, dtype=torch.float32)
        self.masks = self._zeros(max(n_slots, self.max_rows), -(-vocab // 32), dtype=torch.int32)
        self.counts = self._zeros(n_slots, vocab, dtype=torch.int16)
        # Scratch of a launch: per row and chunk, then per row.
        self.chunk_stats = self._zeros(self.max_rows, self.chunks, CHUNK_STATS, dtype=torch.float32)
        self.span_max = self._zeros(self.max_rows, self.chunks, CHUNK // SPAN, dtype=torch.float32)
        self.n_listed = self._zeros(self.max_rows, dtype=torch.int32)
        self.chunk_tops = self._zeros(self.max_rows, self.chunks, MAX_TOP, 2, dtype=torch.float32)
        self.candidate_ids = self._zeros(self.max_rows, CANDIDATES, dtype=torch.int32)
        self.candidates = self._zeros(self.max_rows, CANDIDATES, dtype=torch.float32)

    @staticmethod
    def bytes(n_slots: int, vocab: int, max_rows: int | None = None) -> int:
        """Device memory of a table."""
        per_slot = FIELDS + 2 * MAX_EDITS
        per_row = -(-vocab // CHUNK) * (CHUNK_STATS + CHUNK // SPAN + 2 * MAX_TOP) + 2 * CANDIDATES + 1
        per_row += -(-vocab // 32)
        return n_slots * (4 * per_slot + 2 * vocab) + (max_rows or n_slots + SPARE_ROWS) * 4 * per_row

    def _zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def _send(self, to: Tensor, numbers: NDArray[Any]) -> None:
        """Copy asynchronously: torch keeps the pinned buffer alive until the copy is done."""
        source = torch.from_numpy(np.ascontiguousarray(numbers))
        to.copy_(source if self.device.type == "cpu" else source.pin_memory(), non_blocking=True)

    # --- updates by the runner ----------------------------------------------------------------------------------------

    def set(self, slot: int, row: SamplerRow) -> None:
        """Assign the slot to a new sequence. Later bans and masks are set by `ban` and `allow`."""
        self._rows[slot] = row
        self._bans[slot] = row.banned
        host = self._host[slot]
        floats = host.view(np.float32)
        floats[TEMPERATURE : PRESENCE + 1] = (
            row.temperature, row.top_p, row.min_p, row.repetition_penalty, row.frequency_penalty, row.presence_penalty
        )  # fmt: skip
        host[TOP_K] = min(row.top_k, 2**31 - 1)
        host[LOGPROBS] = -1 if row.logprobs is None else row.logprobs
        host[HAS_PENALTIES] = row.has_penalties
        host[MASK] = 0
        host[GUIDED] = row.guided
        host[SEED : SEED + 2] = np.array([row.seed], np.uint64).view(np.int32)
        if row.has_penalties:
            self._send(self.counts[slot], _token_counts(row, self.vocab))
        self._edit(slot)

    def ban(self, slot: int, ids: tuple[int, ...]) -> None:
        if ids != self._bans[slot]:
            self._bans[slot] = ids
            self._edit(slot)

    def allow(self, slots: Sequence[int], bits: NDArray[np.uint32]) -> None:
        """Restrict the next launch only: slot slots[i] samples a token whose bit is set in bits[i]. The masks of
        several draws of a slot follow each other."""
        n, words = len(slots), self.masks.shape[1]
        numbers = np.zeros((n, words), np.uint32)
        numbers[:, : bits.shape[1]] = bits[:, :words]
        self._send(self.masks[:n], numbers.view(np.int32))
        self._clear_masks()
        for index in range(n - 1, -1, -1):  # the first of a slot's masks stays
            self._host[slots[index], MASK] = index + 1
        self._masked = list(slots)
        self._changed = True

    def upload(self) -> None:
        """Upload changes before a launch; no work if there are none. Masks last for one launch."""
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
        assert n + len(bans) <= MAX_EDITS, "too many biased and banned tokens for a slot"
        if n or bans:
            ids, values = np.zeros(MAX_EDITS, np.int32), np.full(MAX_EDITS, -np.inf, np.float32)
            ids[:n], values[:n] = list(bias), list(bias.values())
            ids[n : n + len(bans)] = bans
            self._send(self.edit_ids[slot], ids)
            self._send(self.edit_values[slot], values)
        self._host[slot, N_EDITS] = n + len(bans)
        self._changed = True

    # --- reference ----------------------------------------------------------------------------------------------------

    def row(self, slot: int, position: int) -> SamplerRow:
        """The slot's parameters for the reference sampler, read back from the device."""
        state = self.state[slot].cpu().numpy()
        row, counts = self._rows[slot], self.counts[slot].cpu().numpy()
        sampled = counts & (IN_PROMPT - 1)
        mask = int(state[MASK])
        return SamplerRow(
            row.temperature, row.top_k, row.top_p, row.min_p, row.repetition_penalty, row.frequency_penalty,
            row.presence_penalty, row.logit_bias, row.seed, position,
            prompt_ids=np.nonzero(counts & IN_PROMPT)[0].astype(np.uint32),
            output_ids=np.repeat(np.arange(self.vocab), sampled).astype(np.uint32),
            banned=self._bans[slot], logprobs=row.logprobs,
            allowed=self.masks[mask - 1].cpu().numpy().view(np.uint32) if mask else None, guided=bool(state[GUIDED]),
        )  # fmt: skip


def _token_counts(row: SamplerRow, vocab: int) -> NDArray[np.int16]:
    counts = np.zeros(vocab, np.int16)
    if row.output_ids is not None:
        sampled = np.bincount(row.output_ids.astype(np.int64), minlength=vocab)
        counts += np.minimum(sampled, IN_PROMPT - 1).astype(np.int16)
    if row.prompt_ids is not None:
        counts[row.prompt_ids] |= IN_PROMPT
    return counts


def sample_reference(
    logits: Tensor, table: SamplerTable, slots: Tensor, positions: Tensor, out: SampledBatch, guided: bool = False
) -> None:
    """The reference of `sampler.sample_batch`: the CPU sampler, row by row."""
    for r, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        if slot < 0:
            continue
        row = table.row(slot, position)
        if row.guided != guided:
            continue
        sampled = sample(logits[r : r + 1].float().clone(), [row])[0]
        out.token_ids[r] = sampled.token_id
        out.logprob[r] = sampled.logprob or 0.0
        for index, (token_id, logprob) in enumerate(sampled.top):
            out.top_ids[r, index], out.top_logprobs[r, index] = token_id, logprob
        if row.has_penalties and sampled.token_id >= 0:
            table.counts[slot, sampled.token_id] += 1
