# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""`emberline.kernels.decode_inputs` in Triton: two small launches, before and after a decode step."""

import triton
import triton.language as tl
from torch import Tensor

from emberline.kernels.decode_inputs import DecodeInputs, SlotState

_MAX_PADDING = 64  # padding rows of a batch
_ENTRIES = 1024  # block table entries copied by one program


@triton.jit(do_not_specialize=["rows"])
def _prepare(
    packet, last_tokens, tables, slots_out, token_ids, positions, context_lens, step_tables, rows,
    table_group, step_group, width, GROUPS: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0), tl.program_id(1)
    slot = tl.load(packet + row)
    position = tl.load(packet + rows + row)
    real = position >= 0
    if chunk == 0:
        token = tl.load(packet + 2 * rows + row)
        token = tl.where(token < 0, tl.load(last_tokens + slot), token)
        tl.store(slots_out + row, tl.where(real, slot, -1))
        tl.store(token_ids + row, tl.where(real, token, 0))
        tl.store(positions + row, tl.maximum(position, 0))
        tl.store(context_lens + row, position + 1)
        if position < 0:  # a padding row's KV goes to the null block, not where the row's last sequence had its own
            for g in tl.static_range(GROUPS):
                tl.store(step_tables + g * step_group + row * width, 0)
    last_entry = tl.maximum(position, 0) // 16
    if real & (chunk * ENTRIES <= last_entry):
        j = chunk * ENTRIES + tl.arange(0, ENTRIES)
        mask = j <= last_entry
        for g in tl.static_range(GROUPS):
            block = tl.load(packet + (3 + g) * rows + row)
            n_passed = tl.load(packet + (3 + GROUPS + g) * rows + row)
            slot_table = tables + g * table_group + slot * width
            appended = j == tl.where(block >= 0, last_entry, -1)
            cleared = j == n_passed - 1
            entries = tl.load(slot_table + j, mask=mask, other=0)
            entries = tl.where(cleared, 0, tl.where(appended, block, entries))
            tl.store(step_tables + g * step_group + row * width + j, entries, mask=mask)
            tl.store(slot_table + j, entries, mask=mask & (appended | cleared))


@triton.jit(do_not_specialize=["rows"])
def _keep(tokens, slots, last_tokens, rows, SIZE: tl.constexpr):
    r = tl.arange(0, SIZE)
    slot = tl.load(slots + r, mask=r < rows, other=-1)
    token = tl.load(tokens + r, mask=slot >= 0, other=0)
    tl.store(last_tokens + slot, tl.maximum(token, 0), mask=slot >= 0)


def prepare(packet: Tensor, state: SlotState, to: DecodeInputs) -> None:
    groups, _, width = state.tables.shape
    rows = packet.shape[1]
    _prepare[(rows, triton.cdiv(width, _ENTRIES))](
        packet, state.last_tokens, state.tables, to.slots, to.token_ids, to.positions, to.context_lens, to.tables, rows,
        state.tables.stride(0), to.tables.stride(0), width, GROUPS=groups, ENTRIES=_ENTRIES,
    )  # fmt: skip


def keep(tokens: Tensor, slots: Tensor, state: SlotState) -> None:
    size = triton.next_power_of_2(
        len(state.last_tokens) + _MAX_PADDING
    )  # one size for all batches: it is compiled per size
    _keep[(1,)](tokens, slots, state.last_tokens, len(tokens), SIZE=size)
