# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""`emberline.kernels.draft_chain` in Triton: small launches around a draft head's layer, all of them capturable."""

import triton
import triton.language as tl
from torch import Tensor

from emberline.kernels.decode_inputs import SlotState
from emberline.kernels.draft_chain import CarriedStates, ChainInputs
from emberline.kernels.gpu.launch import launch_options, next_power_of_two
from emberline.kernels.gpu.sampler import _noise
from emberline.kernels.gpu.sampler_table import SamplerTable

_ENTRIES = 1024  # block table entries copied by one program
_IDS = 4096  # of the draft vocabulary, read at a time


@triton.jit
def _carry(
    hidden, starts, slots, positions, kept, kept_positions, out, width, DRAFTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    first, stop = tl.load(starts + row), tl.load(starts + row + 1)
    if stop > first:
        slot = tl.load(slots + (first if DRAFTS else row))
        col = tl.arange(0, BLOCK)
        mask = col < width
        own = kept + tl.maximum(slot, 0).to(tl.int64) * width + col
        before = tl.load(positions + first) - 1
        known = (slot >= 0) & (tl.load(kept_positions + tl.maximum(slot, 0)) == before)
        value = tl.where(known, tl.load(own, mask=mask, other=0.0), 0.0)
        tl.store(out + first.to(tl.int64) * width + col, value, mask=mask)
        if (slot >= 0) & (not DRAFTS):
            tl.debug_barrier()  # all have read
            last = (stop - 1).to(tl.int64)
            tl.store(own, tl.load(hidden + last * width + col, mask=mask, other=0.0), mask=mask)
            tl.store(kept_positions + slot, tl.load(positions + last))


@triton.jit
def _keep_accepted(
    hidden, starts, slots, positions, n_accepted, kept, kept_positions, width, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    first = tl.load(starts + row)
    slot = tl.load(slots + first, mask=tl.load(starts + row + 1) > first, other=-1)
    if slot >= 0:
        at = first + tl.load(n_accepted + slot)
        col = tl.arange(0, BLOCK)
        mask = col < width
        value = tl.load(hidden + at.to(tl.int64) * width + col, mask=mask, other=0.0)
        tl.store(kept + slot.to(tl.int64) * width + col, value, mask=mask)
        tl.store(kept_positions + slot, tl.load(positions + at))


@triton.jit(do_not_specialize=["first_scratch"])
def _begin_chain(
    slots, last_tokens, last_positions, table, kept, kept_positions, token_ids, positions, context_lens, tables, hidden,
    first_scratch, width, table_width, BLOCK: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    real = slot >= 0
    own = tl.maximum(slot, 0)
    at = tl.where(real, tl.load(last_positions + own), 0)
    if chunk == 0:
        tl.store(token_ids + row, tl.where(real, tl.load(last_tokens + own), 0))
        tl.store(positions + row, at)
        tl.store(context_lens + row, tl.where(real, at + 1, 0))
        col = tl.arange(0, BLOCK)
        mask = col < width
        known = real & (tl.load(kept_positions + own) == at - 1)
        value = tl.load(kept + own.to(tl.int64) * width + col, mask=mask, other=0.0)
        tl.store(hidden + row.to(tl.int64) * width + col, tl.where(known, value, 0.0), mask=mask)
    n_own = (at + 15) // 16
    if chunk * ENTRIES <= n_own:
        j = chunk * ENTRIES + tl.arange(0, ENTRIES)
        entry = tl.load(table + own.to(tl.int64) * table_width + j, mask=j < n_own, other=0)
        entry = tl.where(j == n_own, tl.where(real, first_scratch + slot, 0), entry)
        tl.store(tables + row.to(tl.int64) * table_width + j, entry, mask=(j <= n_own) & (j < table_width))


@triton.jit(do_not_specialize=["step"])
def _draw_drafts(
    logits, slots, states, target_ids, drafts, chain_drafts, token_ids, positions, context_lens, step, vocab,
    FIELDS: tl.constexpr, DEPTH: tl.constexpr, IDS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    if slot >= 0:
        state = states + slot * FIELDS
        context = tl.load(context_lens + row)
        temperature = tl.load(state).to(tl.float32, bitcast=True)
        drawn = (temperature > 0) & (tl.load(state + 6) != 1)
        inverse = tl.where(drawn, tl.math.div_rn(1.0, tl.where(drawn, temperature, 1.0)), 1.0)
        best = float("-inf")
        best_id = -1
        n_invalid = 0
        for start in range(0, vocab, IDS):
            i = start + tl.arange(0, IDS)
            mask = i < vocab
            x = tl.load(logits + row.to(tl.int64) * vocab + i, mask=mask, other=float("-inf"))
            n_invalid += tl.sum((x != x).to(tl.int32), 0)
            ids = tl.load(target_ids + i, mask=mask, other=0)
            x = x * inverse
            if drawn:
                x += _noise(state, context, ids)
            x = tl.where(mask, x, float("-inf"))
            highest = tl.max(x, 0)
            its_id = tl.min(tl.where(x == highest, ids, 2147483647), 0)
            better = (highest > best) | ((highest == best) & (its_id < best_id))
            best_id = tl.where(better, its_id, best_id)
            best = tl.where(better, highest, best)
        valid = (n_invalid == 0) & (best > float("-inf")) & (best < float("inf"))
        token = tl.where(valid, best_id, -1)
        tl.store(chain_drafts + row * DEPTH + step, token)
        token = tl.maximum(token, 0)
        tl.store(drafts + slot * DEPTH + step, token)
        tl.store(token_ids + row, token)
        tl.store(positions + row, context)
        tl.store(context_lens + row, context + 1)


def carry(
    hidden: Tensor, starts: Tensor, slots: Tensor, positions: Tensor, carried: CarriedStates, out: Tensor, drafts: bool
) -> None:
    width = hidden.shape[1]
    out[1:].copy_(hidden[:-1])
    _carry[(len(starts) - 1,)](
        hidden, starts, slots, positions, carried.hidden, carried.positions, out, width, DRAFTS=drafts,
        BLOCK=next_power_of_two(width), **launch_options(False, num_warps=4),
    )  # fmt: skip


def keep_accepted(
    hidden: Tensor, starts: Tensor, slots: Tensor, positions: Tensor, n_accepted: Tensor, carried: CarriedStates
) -> None:
    width = hidden.shape[1]
    _keep_accepted[(len(starts) - 1,)](
        hidden, starts, slots, positions, n_accepted, carried.hidden, carried.positions, width,
        BLOCK=next_power_of_two(width), **launch_options(False, num_warps=4),
    )  # fmt: skip


def begin_chain(state: SlotState, carried: CarriedStates, group: int, first_scratch: int, to: ChainInputs) -> None:
    rows, table_width = to.tables.shape
    width = to.hidden.shape[1]
    assert state.tables.shape[2] == table_width
    _begin_chain[(rows, triton.cdiv(table_width, _ENTRIES))](
        to.slots, state.last_tokens, state.positions, state.tables[group], carried.hidden, carried.positions,
        to.token_ids, to.positions, to.context_lens, to.tables, to.hidden, first_scratch, width, table_width,
        BLOCK=next_power_of_two(width), ENTRIES=_ENTRIES, **launch_options(False, num_warps=4),
    )  # fmt: skip


def draw_drafts(
    logits: Tensor, table: SamplerTable, target_ids: Tensor, step: int, drafts: Tensor, to: ChainInputs
) -> None:
    rows, vocab = logits.shape
    _draw_drafts[(rows,)](
        logits, to.slots, table.state, target_ids, drafts, to.drafts, to.token_ids, to.positions, to.context_lens, step,
        vocab, FIELDS=table.state.shape[1], DEPTH=drafts.shape[1], IDS=min(_IDS, next_power_of_two(vocab)),
        **launch_options(False, num_warps=8),
    )  # fmt: skip
