"""The inputs of a decode step, computed on the device from its per-slot state and a small packet. Plain PyTorch.

A packet is int32 [3 + 2 * groups, rows]:

    slot | position of the new token | its id or LAST_SAMPLED | per group: new block or NO_BLOCK | per group: n_passed

`n_passed` is the number of leading blocks that have left the group's sliding window; the last of them is cleared in the
block table. Rows that pad the batch have PADDING for a position. With LAST_SAMPLED the device knows the position, and
the packet's is the last one possible.

A packet of a step that verifies drafts, of q tokens per row, has q rows more after the third: the number of the row's
drafts, then its drafts, padded to q - 1; LAST_DRAFTED stands for the one that a chain of drafts has left in the slot.
`accept` compares them with what was drawn.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from emberline.protocol.block_hash import BLOCK_TOKENS

LAST_SAMPLED = -1  # in place of a token id: the token that the slot sampled last
LAST_DRAFTED = -1  # in place of a draft
MAX_DRAFTS = 8  # that a slot keeps
PADDING = -1
NO_BLOCK = -1  # in place of a block: the new token fits the row's last block
HEADER_ROWS = 3  # of a packet, before the rows per KV group


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
    """Output buffers of `prepare`; a step uses their first rows. Those by token have q entries for each row."""

    slots: Tensor  # int32 [tokens]; PADDING for padding
    token_ids: Tensor  # int32 [tokens]
    positions: Tensor  # int32 [tokens]
    context_lens: Tensor  # int32 [rows], q included; 0 for a padding row
    tables: Tensor  # int32 [groups, rows, width]; entries beyond the context are stale
    draw_positions: Tensor  # int32 [tokens], of what is drawn after each; of steps that verify drafts


def header_rows(n_tokens: int) -> int:
    """Of a packet with n_tokens per row, before the rows per KV group."""
    return HEADER_ROWS if n_tokens == 1 else HEADER_ROWS + n_tokens


def prepare(packet: Tensor, state: SlotState, to: DecodeInputs, n_tokens: int = 1) -> None:
    """Apply the packet's changes to the state, and compute the step's inputs, of n_tokens per row."""
    rows, groups, header = packet.shape[1], state.tables.shape[0], header_rows(n_tokens)
    real, slots, follows = packet[1] != PADDING, packet[0].long(), packet[2] == LAST_SAMPLED
    n_drafts = packet[3] if n_tokens > 1 else torch.zeros_like(packet[0])
    first = torch.where(real, torch.where(follows, state.positions[slots], packet[1]), 0)
    own = torch.where(follows, state.last_tokens[slots], packet[2])
    drafts = [
        torch.where(packet[3 + i] == LAST_DRAFTED, state.drafts[slots, min(i, MAX_DRAFTS) - 1], packet[3 + i])
        for i in range(1, n_tokens)
    ]
    tokens = torch.stack([own, *drafts], 1)
    index = torch.arange(n_tokens, dtype=torch.int32, device=packet.device)
    exists, n = real[:, None] & (index <= n_drafts[:, None]), rows * n_tokens
    to.slots[:n] = torch.where(exists, packet[0][:, None], PADDING).view(-1)
    to.token_ids[:n] = torch.where(exists, tokens, 0).view(-1)
    to.positions[:n] = (first[:, None] + index).view(-1)
    to.draw_positions[:n] = to.positions[:n] + 1
    to.context_lens[:rows] = torch.where(real, first + n_tokens, 0)
    last_entry = (packet[1] + n_drafts) // BLOCK_TOKENS
    entries = torch.arange(state.tables.shape[2], device=packet.device)
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


def accept(draws: Tensor, inputs: DecodeInputs, state: SlotState, n_rows: int, n_tokens: int) -> list[list[int]]:
    """What `keep` does, for a step that verifies drafts; the draws of each row that count.

    Draws count as long as the draw before is the draft; an invalid one ends them. See `speculation.verification`. Those
    that do not count are made invalid: the host may not know the drafts.
    """
    counted: list[list[int]] = []
    for row in range(n_rows):
        at = slice(row * n_tokens, (row + 1) * n_tokens)
        slots, drafts = inputs.slots[at].tolist(), inputs.token_ids[at].tolist()[1:]
        drawn = [draw for draw, slot in zip(draws[at].tolist(), slots) if slot != PADDING]
        n = 0
        while n + 1 < len(drawn) and drawn[n] == drafts[n] and drawn[n + 1] >= 0:
            n += 1
        counted.append(drawn[: n + 1])
        if drawn:
            state.last_tokens[slots[0]] = max(0, drawn[n])
            state.positions[slots[0]] = int(inputs.positions[row * n_tokens]) + 1 + n
            state.n_accepted[slots[0]] = n
            draws[at.start + n + 1 : at.stop] = -1
    return counted
