"""State and computation of a draft head around its layer, on the device. Plain PyTorch.

A head's KV entry at position p is made of the token at p and of the target's hidden state at p - 1. So the hidden state
of each slot's last computed token is carried from step to step: for the entry of the first token of its next row, and
for the entry of the token drawn last, from which a chain of drafts begins.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from emberline.kernels.decode_inputs import PADDING, SlotState
from emberline.kernels.sampling import SamplerRow, sample
from emberline.protocol.block_hash import BLOCK_TOKENS

NOT_KNOWN = -2  # in place of a position: no hidden state is carried


@dataclass(slots=True)
class CarriedStates:
    """By slot, the spare one included."""

    hidden: Tensor  # [slots, hidden], of the last computed token
    positions: Tensor  # int32 [slots], of that token; NOT_KNOWN


@dataclass(slots=True)
class ChainInputs:
    """Buffers of a chain; it uses their first rows. A row that pads the batch has a context of 0."""

    slots: Tensor  # int32 [rows]; PADDING for padding
    token_ids: Tensor  # int32 [rows]
    positions: Tensor  # int32 [rows]
    context_lens: Tensor  # int32 [rows]
    tables: Tensor  # int32 [rows, width]
    hidden: Tensor  # [rows, hidden]
    drafts: Tensor  # int32 [rows, MAX_DRAFTS]; negative: the head gave invalid numbers


def carry(
    hidden: Tensor, starts: Tensor, slots: Tensor, positions: Tensor, carried: CarriedStates, out: Tensor, drafts: bool
) -> None:
    """out: the hidden state before each token, zeros where it is not known. Keeps that of each row's last token.

    Row r has tokens starts[r] : starts[r + 1]. slots: by row. With drafts they are by token, and nothing is kept:
    `keep_accepted` does that once it is known which tokens count.
    """
    out[1:] = hidden[:-1]
    bounds = starts.tolist()
    for r, (first, stop) in enumerate(pairwise(bounds)):
        if first == stop:
            continue
        slot = int(slots[first if drafts else r])
        known = slot >= 0 and int(carried.positions[slot]) == int(positions[first]) - 1
        out[first] = carried.hidden[slot] if known else 0
        if slot >= 0 and not drafts:
            carried.hidden[slot], carried.positions[slot] = hidden[stop - 1], positions[stop - 1]


def keep_accepted(
    hidden: Tensor, starts: Tensor, slots: Tensor, positions: Tensor, n_accepted: Tensor, carried: CarriedStates
) -> None:
    """Keep the hidden state of each row's last accepted token. `slots` is by token, `n_accepted` by slot."""
    for first, stop in pairwise(starts.tolist()):
        slot = int(slots[first]) if first < stop else PADDING
        if slot >= 0:
            at = first + int(n_accepted[slot])
            carried.hidden[slot], carried.positions[slot] = hidden[at], positions[at]


def begin_chain(state: SlotState, carried: CarriedStates, group: int, first_scratch: int, to: ChainInputs) -> None:
    """The entry of the token drawn last in each slot of to.slots.

    The chain's own entries may lie behind the slot's blocks: there its table has a block of the pool's scratch, one per
    slot. All of them are made again once their tokens were accepted.
    """
    for r, slot in enumerate(to.slots.tolist()):
        to.token_ids[r] = to.positions[r] = to.context_lens[r] = 0
        if slot == PADDING:
            to.tables[r, 0] = 0
            continue
        at = int(state.positions[slot])
        known = int(carried.positions[slot]) == at - 1
        to.hidden[r] = carried.hidden[slot] if known else 0
        to.token_ids[r], to.positions[r], to.context_lens[r] = state.last_tokens[slot], at, at + 1
        n_own = (at + BLOCK_TOKENS - 1) // BLOCK_TOKENS  # blocks that hold the tokens before it
        to.tables[r, :n_own] = state.tables[group, slot, :n_own]
        to.tables[r, n_own] = first_scratch + slot


def draw_drafts(
    logits: Tensor, sampler_row: Callable[[int], SamplerRow], target_ids: Tensor, vocab: int, step: int,
    drafts: Tensor, to: ChainInputs,
) -> None:  # fmt: skip
    """The chain's next token: drawn with the temperature and the noise of the draw that will verify it.

    logits: [rows, draft vocabulary], whose token ids are `target_ids`. drafts: int32 [slots, MAX_DRAFTS]; so many reach
    one block beyond the slot's own at the most.
    """
    for r, slot in enumerate(to.slots.tolist()):
        if slot == PADDING:
            continue
        own = sampler_row(slot)
        greedy = own.temperature == 0 or own.top_k == 1
        row = SamplerRow(
            temperature=0.0 if greedy else own.temperature, seed=own.seed, position=int(to.context_lens[r])
        )
        wide = torch.full((1, vocab), -torch.inf)
        wide[0, target_ids.long()] = logits[r].float()
        token_id = sample(wide, [row])[0].token_id
        to.drafts[r, step] = token_id
        drafts[slot, step] = max(0, token_id)
        to.token_ids[r] = max(0, token_id)
        to.positions[r] += 1
        to.context_lens[r] += 1
