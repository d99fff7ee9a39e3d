"""The inputs of a decode step, made on the device from its state by slot and a small packet. In plain PyTorch.

A packet is int32 [3 + 2 * groups, rows]:

    slot | position of the new token | its id, or FOLLOWS | each group's appended block, or NONE | each group's n_passed

A row that only fills the batch up has PADDING for a position.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from emberline.protocol.block_hash import BLOCK_TOKENS

LAST_SAMPLED = -1  # in place of a token id: the token that the slot drew last
PADDING = -1
NO_BLOCK = -1  # in place of a block: the row stays inside its last one
HEADER_ROWS = 3  # of a packet, before what each group has


@dataclass(slots=True)
class SlotState:
    """What the device keeps of every slot."""

    last_tokens: Tensor  # int32 [slots]
    tables: Tensor  # int32 [groups, slots, width]


@dataclass(slots=True)
class DecodeInputs:
    """Where a decode step's inputs go; its first rows are used."""

    slots: Tensor  # int32 [rows]; PADDING where a row is nobody's
    token_ids: Tensor  # int32 [rows]
    positions: Tensor  # int32 [rows]
    context_lens: Tensor  # int32 [rows]; 0 where a row is nobody's
    tables: Tensor  # int32 [groups, rows, width]; entries behind the context are stale


def prepare(packet: Tensor, state: SlotState, to: DecodeInputs) -> None:
    """Take the packet's changes into the state, and make the step's inputs."""
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
    """Remember what was drawn, for the rows that follow. An invalid token's row is discarded later: any id will do."""
    real = slots != PADDING
    state.last_tokens[slots[real].long()] = tokens[real].clamp(min=0)
