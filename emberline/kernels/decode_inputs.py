"""The inputs of a decode step, computed on the device from its per-slot state and a small packet. Plain PyTorch.

A packet is int32 [3 + 2 * groups, rows]:

    slot | position of the new token | its id or LAST_SAMPLED | per group: new block or NO_BLOCK | per group: n_passed

`n_passed` is the number of leading blocks that have left the group's sliding window; the last of them is cleared in the
block table. Rows that pad the batch have PADDING for a position.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from emberline.protocol.block_hash import BLOCK_TOKENS

LAST_SAMPLED = -1  # in place of a token id: the token that the slot sampled last
PADDING = -1
NO_BLOCK = -1  # in place of a block: the new token fits the row's last block
HEADER_ROWS = 3  # of a packet, before the rows per KV group


@dataclass(slots=True)
class SlotState:
    """Device state of every sequence slot."""

    last_tokens: Tensor  # int32 [slots]
    tables: Tensor  # int32 [groups, slots, width], block tables


@dataclass(slots=True)
class DecodeInputs:
    """Output buffers of `prepare`; a step uses their first rows."""

    slots: Tensor  # int32 [rows]; PADDING for a padding row
    token_ids: Tensor  # int32 [rows]
    positions: Tensor  # int32 [rows]
    context_lens: Tensor  # int32 [rows]; 0 for a padding row
    tables: Tensor  # int32 [groups, rows, width]; entries beyond the context are stale


def prepare(packet: Tensor, state: SlotState, to: DecodeInputs) -> None:
    """Apply the packet's changes to the state, and compute the step's inputs."""
    rows, groups = packet.shape[1], state.tables.shape[0]
    real = packet[1] != PADDING
    to.slots[:rows] = torch.where(real, packet[0], PADDING)
    to.positions[:rows] = packet[1].clamp(min=0)
    to.context_lens[:rows] = packet[1] + 1
    slots, tokens = packet[0].long(), packet[2]
    to.token_ids[:rows] = torch.where(real, torch.where(tokens == LAST_SAMPLED, state.last_tokens[slots], tokens), 0)
    for g in range(groups):
        blocks, passed, table = packet[HEADER_ROWS + g], packet[HEADER_ROWS + groups + g], state.tables[g]
        appends, passes = real & (blocks != NO_BLOCK), real & (passed > 0)
        table[slots[appends], packet[1, appends].long() // BLOCK_TOKENS] = blocks[appends]
        table[slots[passes], passed[passes].long() - 1] = 0
        to.tables[g, :rows] = torch.where(real[:, None], table[slots], 0)


def keep(tokens: Tensor, slots: Tensor, state: SlotState) -> None:
    """Store the sampled tokens for rows that use LAST_SAMPLED in the next step.

    A row with an invalid token is discarded later, so it may store any valid id.
    """
    real = slots != PADDING
    state.last_tokens[slots[real].long()] = tokens[real].clamp(min=0)
