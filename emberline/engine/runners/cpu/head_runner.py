"""Runs a draft head behind every step of a CPU runner: keeps its KV cache, and drafts for the rows that sample.

The head's entry at position p needs the token at p and the target's hidden state at p - 1. So a step gives entries for
the tokens it computed, for the drafts that it accepted and for the last token it drew, from which the head drafts. Of
each slot the last hidden state is carried to the next step. Where it is not known, behind a prefix that came from the
cache, zeros stand for it: drafts may be worse for that, never wrong.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from emberline.engine.core.plan import Row, Sampled, StepPlan, known_tokens
from emberline.kernels.sampling import SamplerRow, sample
from emberline.kv.block_pool import blocks_of
from emberline.models.decoder import StepInputs
from emberline.models.draft_head import DraftHead
from emberline.protocol.block_hash import BLOCK_TOKENS
from emberline.protocol.token_ids import pack


@dataclass(slots=True)
class _Slot:
    admission: int  # serial number of the admission whose entries these are
    next: int  # position of the first missing entry
    hidden: Tensor  # of the target before the next row, combined; used where the entry of its first token is missing


@dataclass(slots=True)
class _Chain:
    """A row that drafts."""

    row: int
    position: int  # of the next entry
    token_id: int
    sampler: SamplerRow


class HeadRunner:
    def __init__(self, head: DraftHead, pool: Tensor, vocab_size: int, max_running: int) -> None:
        self.head, self.taps = head, head.taps
        self._pool = pool
        self._vocab_size = vocab_size
        self._slots: list[_Slot | None] = [None] * max_running

    def draft(
        self,
        plan: StepPlan,
        states: list[Tensor],
        tables: Sequence[NDArray[np.int32]],
        sampled: Sequence[Sampled],
        samplers: Sequence[SamplerRow],
    ) -> list[bytes]:
        """Take in a step's tokens; what may follow the last token drawn, for each row that samples.

        `states`: the tapped states of the step's tokens, of each tap. `tables`: the head's block table alone, by slot.
        """
        combined = self.head.combine(states)
        ids: list[int] = []
        positions: list[NDArray[np.int64]] = []
        hidden: list[Tensor] = []
        starts, chains, at, draw = [0], [], 0, 0
        planned = plan.rows
        for number, row in enumerate(planned):
            own = combined[at : at + row.stop - row.start]
            at += row.stop - row.start
            tokens = known_tokens(row, sampled[draw : draw + 1 + row.n_drafts] if row.samples else ())
            tokens[-1] = max(tokens[-1], 0)  # behind an invalid draw, which ends its request
            slot = self._slot(row, own)
            first, last = slot.next, row.start + len(tokens)  # entries first .. last - 1
            before = torch.cat([slot.hidden[None], own[: last - 1 - row.start]])  # at row.start - 1 .. last - 2
            ids += tokens[first - row.start :]
            hidden.append(before[first - row.start :])
            positions.append(np.arange(first, last))
            starts.append(starts[-1] + last - first)
            # The token drawn last is behind the row's blocks where these are full: its entry is made again in the next
            # step, which begins with it.
            slot.next = min(last, BLOCK_TOKENS * blocks_of(row.stop))
            slot.hidden = own[last - 1 - row.samples - row.start]
            if row.samples:
                chains.append(_Chain(number, last, -1, samplers[draw]))
                draw += 1 + row.n_drafts
        if not ids:
            return []
        rows = tables[0][[row.slot for row in planned]]
        ends = np.array([each[-1] + 1 if len(each) else 0 for each in positions])
        inputs = _inputs(ids, np.concatenate(positions), starts, ends, rows, self._pool.device)
        out = self.head.extend(inputs, torch.cat(hidden), self._pool)
        return (
            self._chains(plan.depth, chains, out[[starts[chain.row + 1] - 1 for chain in chains]], rows)
            if chains and plan.depth
            else []
        )

    def _slot(self, row: Row, own: Tensor) -> _Slot:
        slot = self._slots[row.slot]
        if slot is None or slot.admission != row.admission or not row.start <= slot.next <= row.start + 1:
            slot = self._slots[row.slot] = _Slot(row.admission, row.start, torch.zeros_like(own[0]))
        return slot

    def _chains(self, depth: int, chains: list[_Chain], hidden: Tensor, tables: NDArray[np.int32]) -> list[bytes]:
        drafts: list[list[int]] = [[] for _ in chains]
        tables = tables[[chain.row for chain in chains]]
        for n in range(depth):
            if n:
                ends = np.array([chain.position for chain in chains])
                ids = [chain.token_id for chain in chains]
                starts = list(range(len(chains) + 1))
                inputs = _inputs(ids, ends - 1, starts, ends, tables, self._pool.device)
                hidden = self.head.extend(inputs, hidden, self._pool)
            chosen = self._choose(chains, hidden)
            self.head.feed_back(hidden)
            for chain, draft, token_id in zip(chains, drafts, chosen):
                draft.append(token_id)
                chain.position, chain.token_id = chain.position + 1, max(token_id, 0)
        return [pack(draft) if min(draft) >= 0 else b"" for draft in drafts]

    def _choose(self, chains: list[_Chain], hidden: Tensor) -> list[int]:
        """With the noise and the parameters of the draw that will verify it, so that they agree more often."""
        logits = hidden.new_full((len(chains), self._vocab_size), -torch.inf, dtype=torch.float32)
        logits[:, self.head.target_ids.long()] = self.head.logits(hidden)
        rows = [replace(chain.sampler, position=chain.position, allowed=None, logprobs=None) for chain in chains]
        return [drawn.token_id for drawn in sample(logits, rows)]


def _inputs(
    ids: Sequence[int],
    positions: NDArray[np.int64],
    starts: Sequence[int],
    context_lens: NDArray[np.int64],
    tables: NDArray[np.int32],
    device: torch.device,
) -> StepInputs:
    def ints(values: ArrayLike) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, np.int32)).to(device)

    return StepInputs(
        token_ids=ints(ids),
        positions=ints(positions),
        query_starts=ints(starts),
        context_lens=ints(context_lens),
        block_tables=[ints(tables[:, : blocks_of(int(context_lens.max()))])],
        sample_tokens=torch.empty(0, dtype=torch.int64, device=device),
    )
