# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""`emberline.kernels.decode_inputs` in Triton: two small launches, before and after a decode step."""

import triton
import triton.language as tl
from torch import Tensor

from emberline.kernels.decode_inputs import (
    DRAFT_HEADER_ROWS,
    HEADER_ROWS,
    MAX_DRAFTS,
    MAX_ROW_TOKENS,
    DecodeInputs,
    SlotState,
)
from emberline.kernels.gpu.launch import launch_options
from emberline.kernels.gpu.sampler_table import SamplerTable

_MAX_PADDING = 64  # padding rows of a batch
_ENTRIES = 1024  # block table entries copied by one program


@triton.jit(do_not_specialize=["rows", "n_tokens"])
def _prepare(
    packet, drafts, last_tokens, last_positions, last_drafts, tables, slots_out, token_ids, positions, draw_positions,
    starts, offsets, context_lens, step_tables, rows, n_tokens, table_group, step_group, width,
    HEADER: tl.constexpr, GROUPS: tl.constexpr, ENTRIES: tl.constexpr, MAX_TOKENS: tl.constexpr,
    MAX_DRAFTS: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0), tl.program_id(1)
    slot = tl.load(packet + row)
    bound = tl.load(packet + rows + row)  # the last possible position
    real = bound >= 0
    token = tl.load(packet + 2 * rows + row)
    n_drafts, n = 0, 1
    if MAX_TOKENS > 1:
        n_drafts = tl.load(packet + 3 * rows + row)
        first = tl.load(packet + 4 * rows + row)
        n = tl.load(packet + 4 * rows + row + 1, mask=row + 1 < rows, other=n_tokens) - first
    if chunk == 0:
        position = tl.maximum(tl.where((token < 0) & real, tl.load(last_positions + slot), bound), 0)
        token = tl.where(token < 0, tl.load(last_tokens + slot), token)
        if MAX_TOKENS > 1:
            i = tl.arange(0, MAX_TOKENS)
            at = first + i
            mask = i < n
            draft = tl.load(drafts + at, mask=(i > 0) & mask, other=0)
            exists = real & (i <= n_drafts)
            kept = tl.load(last_drafts + slot * MAX_DRAFTS + i - 1, mask=(i > 0) & (i <= MAX_DRAFTS), other=0)
            draft = tl.where(draft < 0, kept, draft)  # LAST_DRAFTED
            tl.store(slots_out + at, tl.where(exists, slot, -1), mask=mask)
            tl.store(token_ids + at, tl.where(exists, tl.where(i == 0, token, draft), 0), mask=mask)
            tl.store(positions + at, position + i, mask=mask)
            tl.store(draw_positions + at, position + i + 1, mask=mask)
            tl.store(offsets + at, i, mask=mask)
            tl.store(starts + row, first)
            if row == rows - 1:
                tl.store(starts + rows, n_tokens)
        else:
            tl.store(slots_out + row, tl.where(real, slot, -1))
            tl.store(token_ids + row, tl.where(real, token, 0))
            tl.store(positions + row, position)
        tl.store(context_lens + row, tl.where(real, position + n, 0))
        if bound < 0:  # a padding row's KV goes to the null block, not where the row's last sequence had its own
            for g in tl.static_range(GROUPS):
                tl.store(step_tables + g * step_group + row * width, 0)
    last_entry = (tl.maximum(bound, 0) + n_drafts) // 16
    end_entry = (tl.maximum(bound, 0) + n - 1) // 16  # of padding tokens, in the null block
    if real & (chunk * ENTRIES <= end_entry):
        j = chunk * ENTRIES + tl.arange(0, ENTRIES)
        mask = j <= last_entry
        for g in tl.static_range(GROUPS):
            block = tl.load(packet + (HEADER + g) * rows + row)
            n_passed = tl.load(packet + (HEADER + GROUPS + g) * rows + row)
            slot_table = tables + g * table_group + slot * width
            appended = j == tl.where(block >= 0, last_entry, -1)
            cleared = j == n_passed - 1
            entries = tl.load(slot_table + j, mask=mask, other=0)
            entries = tl.where(cleared, 0, tl.where(appended, block, entries))
            tl.store(step_tables + g * step_group + row * width + j, entries, mask=j <= end_entry)
            tl.store(slot_table + j, entries, mask=mask & (appended | cleared))


@triton.jit(do_not_specialize=["rows"])
def _keep(tokens, slots, positions, last_tokens, last_positions, rows, SIZE: tl.constexpr):
    r = tl.arange(0, SIZE)
    slot = tl.load(slots + r, mask=r < rows, other=-1)
    token = tl.load(tokens + r, mask=slot >= 0, other=0)
    tl.store(last_tokens + slot, tl.maximum(token, 0), mask=slot >= 0)
    tl.store(last_positions + slot, tl.load(positions + r, mask=slot >= 0, other=0), mask=slot >= 0)


@triton.jit
def _accept(
    draws, starts, slots, token_ids, positions, states, counts, last_tokens, last_positions, n_accepted, vocab,
    FIELDS: tl.constexpr, MAX_TOKENS: tl.constexpr, GUIDED: tl.constexpr,
):  # fmt: skip
    first = tl.load(starts + tl.program_id(0))
    n_tokens = tl.load(starts + tl.program_id(0) + 1) - first
    slot = tl.load(slots + first, mask=n_tokens > 0, other=-1)
    state = states + tl.maximum(slot, 0) * FIELDS
    if (slot >= 0) & ((tl.load(state + 13) != 0) == GUIDED):
        i = tl.arange(0, MAX_TOKENS)
        has_next = i + 1 < n_tokens
        has_next = has_next & (tl.load(slots + first + 1 + i, mask=has_next, other=-1) >= 0)
        draw = tl.load(draws + first + i, mask=i < n_tokens, other=0)
        following = tl.load(draws + first + 1 + i, mask=has_next, other=-1)
        draft = tl.load(token_ids + first + 1 + i, mask=has_next, other=-1)
        n = tl.min(tl.where(has_next & (draw == draft) & (following >= 0), MAX_TOKENS, i), 0)
        tl.store(last_tokens + slot, tl.maximum(tl.sum(tl.where(i == n, draw, 0), 0), 0))
        tl.store(last_positions + slot, tl.load(positions + first) + 1 + n)
        tl.store(n_accepted + slot, n)
        if tl.load(state + 8) != 0:  # penalties
            for j in range(n + 1):
                token = tl.sum(tl.where(i == j, draw, 0), 0)
                if token >= 0:
                    count = counts + slot.to(tl.int64) * vocab + token
                    old_count = tl.load(count)
                    tl.store(count, tl.where((old_count & 16383) == 16383, old_count, old_count + 1))
                    tl.debug_barrier()  # the next token may be the same
        tl.debug_barrier()  # all draws are read
        tl.store(draws + first + i, -1, mask=(i > n) & (i < n_tokens))  # they do not count


def prepare(packet: Tensor, state: SlotState, to: DecodeInputs, drafts: Tensor | None = None) -> None:
    groups, _, width = state.tables.shape
    rows, plain = packet.shape[1], drafts is None
    _prepare[(rows, triton.cdiv(width, _ENTRIES))](
        packet, packet if drafts is None else drafts, state.last_tokens, state.positions, state.drafts, state.tables,
        to.slots, to.token_ids, to.positions, to.draw_positions, to.starts, to.offsets, to.context_lens, to.tables,
        rows, rows if drafts is None else len(drafts), state.tables.stride(0), to.tables.stride(0), width,
        HEADER=HEADER_ROWS if plain else DRAFT_HEADER_ROWS, GROUPS=groups, ENTRIES=_ENTRIES,
        MAX_TOKENS=1 if plain else MAX_ROW_TOKENS, MAX_DRAFTS=MAX_DRAFTS,
    )  # fmt: skip


def keep(tokens: Tensor, slots: Tensor, positions: Tensor, state: SlotState) -> None:
    size = triton.next_power_of_2(
        len(state.last_tokens) + _MAX_PADDING
    )  # one size for all batches: it is compiled per size
    _keep[(1,)](tokens, slots, positions, state.last_tokens, state.positions, len(tokens), SIZE=size)


def accept(
    draws: Tensor, inputs: DecodeInputs, table: SamplerTable, state: SlotState, n_rows: int, guided: bool = False
) -> None:
    """`kernels.decode_inputs.accept` for the slots with a grammar, or for those without; also counts for penalties."""
    _accept[(n_rows,)](
        draws, inputs.starts, inputs.slots, inputs.token_ids, inputs.positions, table.state, table.counts,
        state.last_tokens, state.positions, state.n_accepted, table.vocab, FIELDS=table.state.shape[1],
        MAX_TOKENS=MAX_ROW_TOKENS, GUIDED=guided, **launch_options(False, num_warps=1),
    )  # fmt: skip
