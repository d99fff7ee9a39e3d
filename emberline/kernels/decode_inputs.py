"""The inputs of a decode step, computed on the device from its per-slot state and a small packet. Plain PyTorch.

A packet is int32 [3 + 2 * groups, rows]:

    slot | position of the new token | its id or LAST_SAMPLED | per group: new block or NO_BLOCK | per group: n_passed

`n_passed` is the number of leading blocks that have left the group's sliding window; the last of them is cleared in the
block table. Rows that pad the batch have PADDING for a position. With LAST_SAMPLED the device knows the position, and
the packet's is the last one possible.

A packet of a step that verifies drafts has two rows more after the third: the number of the row's drafts, and the first
of its tokens among those of the step. With it come the drafts, by token; LAST_DRAFTED stands for the one that a chain
of drafts has left in the slot. A row may have more tokens than drafts, which pad the step. `accept` compares the drafts
with what was drawn.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from emberline.protocol.block_hash import BLOCK_TOKENS

LAST_SAMPLED = -1  # in place of a token id: the token that the slot sampled last
LAST_DRAFTED = -1  # in place of a draft
MAX_DRAFTS = 8  # that a slot keeps
MAX_ROW_TOKENS = 16  # of a row, drafts included
PADDING = -1
NO_BLOCK = -1  # in place of a block: the new token fits the row's last block
HEADER_ROWS = 3  # of a packet, before the rows per KV group
DRAFT_HEADER_ROWS = 5  # the same where drafts are verified


@dataclass(slots=True)
class SlotState:
    """Device state of every sequence slot."""

    last_tokens: Tensor  # int32 [slots]
    tables: Tensor  # int32 [groups, slots, width], block tables
    positions: Tensor  # int32 [slots], of the last tokens
    n_accepted: Tensor  # int32 [slots], drafts of the slot's last row that had any
    drafts: Tensor  # int32 [slots, MAX_DRAFTS], what a draft head has proposed to follow the last tokens


@dataclass(slots=True)
class DecodeInputs:
    """Output buffers of `prepare`; a step uses their first entries."""

    slots: Tensor  # int32 [tokens]; PADDING for padding
    token_ids: Tensor  # int32 [tokens]
    positions: Tensor  # int32 [tokens]
    context_lens: Tensor  # int32 [rows], all tokens of the row included; 0 for a padding row
    tables: Tensor  # int32 [groups, rows, width]; entries beyond the context are stale
    # Of steps that verify drafts:
    draw_positions: Tensor  # int32 [tokens], of what is drawn after each
    starts: Tensor  # int32 [rows + 1]: row r has tokens starts[r] : starts[r + 1]
    offsets: Tensor  # int32 [tokens], of each in its row


def prepare(packet: Tensor, state: SlotState, to: DecodeInputs, drafts: Tensor | None = None) -> None:
    """Apply the packet's changes to the state, and compute the step's inputs. drafts: int32 [tokens]."""
    rows, groups, device = packet.shape[1], state.tables.shape[0], packet.device
    real, slots, follows = packet[1] != PADDING, packet[0].long(), packet[2] == LAST_SAMPLED
    first = torch.where(real, torch.where(follows, state.positions[slots], packet[1]), 0)
    own = torch.where(follows, state.last_tokens[slots], packet[2])
    if drafts is None:
        header, n_drafts, lengths = HEADER_ROWS, torch.zeros_like(packet[0]), torch.ones_like(packet[0])
        to.slots[:rows] = torch.where(real, packet[0], PADDING)
        to.token_ids[:rows] = torch.where(real, own, 0)
        to.positions[:rows] = first
    else:
        header, n_drafts, n = DRAFT_HEADER_ROWS, packet[3], len(drafts)
        starts = torch.cat([packet[4], torch.tensor([n], dtype=torch.int32, device=device)])
        lengths = starts.diff()
        row = torch.repeat_interleave(torch.arange(rows, device=device), lengths)
        offset = torch.arange(n, dtype=torch.int32, device=device) - starts[row]
        kept = state.drafts[slots[row], offset.clamp(1, MAX_DRAFTS).long() - 1]
        ids = torch.where(offset == 0, own[row], torch.where(drafts == LAST_DRAFTED, kept, drafts))
        exists = real[row] & (offset <= n_drafts[row])
        to.slots[:n] = torch.where(exists, packet[0][row], PADDING)
        to.token_ids[:n] = torch.where(exists, ids, 0)
        to.positions[:n] = first[row] + offset
        to.draw_positions[:n] = to.positions[:n] + 1
        to.starts[: rows + 1], to.offsets[:n] = starts, offset
    to.context_lens[:rows] = torch.where(real, first + lengths, 0)
    last_entry = (packet[1] + n_drafts) // BLOCK_TOKENS
    entries = torch.arange(state.tables.shape[2], device=device)
    for g in range(groups):
        blocks, passed, table = packet[header + g], packet[header + groups + g], state.tables[g]
        appends, passes = real & (blocks != NO_BLOCK), real & (passed > 0)
        table[slots[appends], last_entry[appends].long()] = blocks[appends]
        table[slots[passes], passed[passes].long() - 1] = 0
        known = real[:, None] & (entries <= last_entry[:, None])  # padding tokens reach beyond: to the null block
        to.tables[g, :rows] = torch.where(known, table[slots], 0)


def keep(tokens: Tensor, slots: Tensor, positions: Tensor, state: SlotState) -> None:
    """Store the sampled tokens and their positions for rows that use LAST_SAMPLED in the next step.

    A row with an invalid token is discarded later, so it may store any valid id.
    """
    real = slots != PADDING
    state.last_tokens[slots[real].long()] = tokens[real].clamp(min=0)
    state.positions[slots[real].long()] = positions[real]


def accept(draws: Tensor, inputs: DecodeInputs, state: SlotState, n_rows: int) -> list[list[int]]:
    """Do what `keep` does, for a step that verifies drafts. Returns the draws of each row that count.

    Draws count as long as the draw before is the draft; an invalid one ends them. See `core.plan.n_accepted`. Those
    that do not count are made invalid: the host may not know the drafts.
    """
    counted: list[list[int]] = []
    for first, stop in pairwise(inputs.starts[: n_rows + 1].tolist()):
        slots, drafts = inputs.slots[first:stop].tolist(), inputs.token_ids[first:stop].tolist()[1:]
        drawn = [draw for draw, slot in zip(draws[first:stop].tolist(), slots) if slot != PADDING]
        n = 0
        while n + 1 < len(drawn) and drawn[n] == drafts[n] and drawn[n + 1] >= 0:
            n += 1
        counted.append(drawn[: n + 1])
        if drawn:
            state.last_tokens[slots[0]] = max(0, drawn[n])
            state.positions[slots[0]] = int(inputs.positions[first]) + 1 + n
            state.n_accepted[slots[0]] = n
            draws[first + n + 1 : stop] = -1
    return counted
