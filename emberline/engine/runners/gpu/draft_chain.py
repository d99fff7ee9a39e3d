"""A draft head behind the GPU runner's steps: a step writes its entries, a graph of their own its drafts.

step:   layers, tapped -> hidden states -> entries of the step's tokens -> logits -> draws -> what is carried
chain:  the token drawn last -> (layer -> draw) as often as the chain is deep -> drafts by slot     one CUDA graph

A chain starts from what the device has by slot. So the next step can verify its drafts before the host knows them.
`draft_model_chain` has the same of a draft model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from emberline.engine.runners.gpu.shapes import MAX_VERIFY_ROWS, all_decode_rows, decode_rows
from emberline.engine.runners.gpu.slots import Slots
from emberline.engine.runners.gpu.step_kernels import ChainKernels
from emberline.engine.runners.gpu.stream import Upload
from emberline.kernels.decode_inputs import MAX_DRAFTS, PADDING
from emberline.kernels.draft_chain import NOT_KNOWN, CarriedStates, ChainInputs
from emberline.kernels.gpu.backend.workspace import StepShape
from emberline.models.decoder import StepInputs, Taps
from emberline.models.draft_head import GpuDraftHead

CHAIN_DEPTHS = (1, 2, 4)


class ChainShape(NamedTuple):
    """The key of a chain's CUDA graph."""

    n_rows: int
    depth: int

    @classmethod
    def of(cls, n_rows: int, depth: int, max_rows: int, depths: tuple[int, ...] = CHAIN_DEPTHS) -> "ChainShape":
        deep = next((each for each in depths if each >= depth), depths[-1])
        return cls(decode_rows(n_rows, max_rows), deep)

    @classmethod
    def all(cls, max_rows: int, depths: tuple[int, ...] = CHAIN_DEPTHS) -> list["ChainShape"]:
        sizes = [n for n in all_decode_rows(max_rows) if n <= MAX_VERIFY_ROWS]
        return [cls(n_rows, depth) for n_rows in sizes for depth in reversed(depths)]


class ChainOfDrafts:
    """Base of the chains of a head and of a model, with the buffers of their rows."""

    depths: ClassVar[tuple[int, ...]]

    def __init__(self, slots: Slots, kernels: ChainKernels, device: torch.device, hidden: Tensor) -> None:
        """hidden: [slots, hidden], what is carried from step to step."""
        n_slots, table_width = slots.state.tables.shape[1:]
        rows = n_slots - 1

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self._slots, self._kernels = slots, kernels
        self._carried = CarriedStates(hidden, ints(n_slots).fill_(NOT_KNOWN))
        self._inputs = ChainInputs(
            ints(rows), ints(rows), ints(rows), ints(rows), ints(rows, table_width), torch.zeros_like(hidden[:rows]),
            ints(rows, MAX_DRAFTS),
        )  # fmt: skip
        self._starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._none = torch.empty(0, dtype=torch.int64, device=device)
        self._upload = Upload(rows, device)

    def send(self, slots: Sequence[int], n_rows: int) -> None:
        """Queue the slots that the next chain is for, padded to n_rows."""
        array = self._upload.array()
        array[: len(slots)], array[len(slots) : n_rows] = slots, PADDING
        self._upload.send(n_rows, self._inputs.slots)

    def forget(self, slots: Sequence[int]) -> None:
        """Other sequences have taken these slots."""

    def reading(self, slots: Tensor, drafts: bool = False) -> Taps:
        """The call that takes in a step. slots: of each row, or of each token where drafts are verified."""
        raise NotImplementedError

    def keep_accepted(self, starts: Tensor, slots: Tensor, positions: Tensor) -> None:
        """After the drafts of a step were verified; slots and positions by token."""

    def run(self, shape: ChainShape) -> Tensor:
        """The drafts of each row, int32 [rows, MAX_DRAFTS]."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class _Reading:
    """Takes in one step: a `models.decoder.Taps`."""

    chain: "DraftChain"
    slots: Tensor  # int32, of each row, or of each token
    drafts: bool  # they are verified

    @property
    def taps(self) -> tuple[int, ...]:
        return self.chain.head.taps

    def take(self, n: int, residual: Tensor) -> None:
        self.chain.head.add_tap(n, residual, self.chain.hidden[: len(residual)])

    def end(self, step: StepInputs) -> None:
        self.chain.write_entries(step, self.slots, self.drafts)


class DraftChain(ChainOfDrafts):
    """Owns the head's buffers. `first_scratch`: the first of the pool's blocks behind the cache's, one per slot."""

    depths = CHAIN_DEPTHS

    def __init__(
        self, head: GpuDraftHead, pool: Tensor, first_scratch: int, slots: Slots, kernels: ChainKernels, max_tokens: int
    ) -> None:
        device, dtype, width = pool.device, pool.dtype, head.hidden_size
        n_slots = slots.state.tables.shape[1]
        super().__init__(slots, kernels, device, torch.zeros(n_slots, width, dtype=dtype, device=device))
        self.head, self._pool, self._first_scratch = head, pool, first_scratch
        self.hidden, self._before = (torch.zeros(max_tokens, width, dtype=dtype, device=device) for _ in range(2))
        self._forget = Upload(n_slots - 1, device)
        self._forgotten = torch.zeros(n_slots - 1, dtype=torch.int32, device=device)

    @staticmethod
    def state_bytes(head: GpuDraftHead, max_running: int, max_tokens: int, table_width: int) -> int:
        """Beside the pool: of hidden states and tables."""
        return (2 * max_tokens + 2 * max_running) * head.hidden_size * 2 + 4 * max_running * (table_width + 16)

    def forget(self, slots: Sequence[int]) -> None:
        self._forget.array()[: len(slots)] = slots
        sent = self._forget.send(len(slots), self._forgotten)
        self._carried.positions.index_fill_(0, sent.long(), NOT_KNOWN)

    def reading(self, slots: Tensor, drafts: bool = False) -> Taps:
        return _Reading(self, slots, drafts)

    def write_entries(self, step: StepInputs, slots: Tensor, drafts: bool) -> None:
        n = len(step.token_ids)
        before = self._before[:n]
        self.head.gather_taps(self.hidden[:n], before)
        self._kernels.carry(self.hidden[:n], step.query_starts, slots, step.positions, self._carried, before, drafts)
        self.head.write_entries(step, before, self._pool)

    def keep_accepted(self, starts: Tensor, slots: Tensor, positions: Tensor) -> None:
        n_accepted = self._slots.state.n_accepted
        self._kernels.keep_accepted(self.hidden[: len(slots)], starts, slots, positions, n_accepted, self._carried)

    def run(self, shape: ChainShape) -> Tensor:
        n, to, state = shape.n_rows, first_rows(self._inputs, shape.n_rows), self._slots.state
        self._kernels.begin_chain(state, self._carried, self.head.group, self._first_scratch, to)
        step = StepInputs(
            token_ids=to.token_ids,
            positions=to.positions,
            query_starts=self._starts[: n + 1],
            context_lens=to.context_lens,
            block_tables=[to.tables],
            sample_tokens=self._none,
            shape=StepShape(n),
        )
        for index in range(shape.depth):
            self.head.extend_in_place(step, to.hidden, self._pool)
            logits = self.head.logits(to.hidden)
            self._kernels.draw_drafts(logits, self._slots.sampler, self.head.target_ids, index, state.drafts, to)
            self.head.feed_back(to.hidden)
        return to.drafts


def first_rows(inputs: ChainInputs, n: int) -> ChainInputs:
    parts = ("slots", "token_ids", "positions", "context_lens", "tables", "hidden", "drafts")
    return replace(inputs, **{name: getattr(inputs, name)[:n] for name in parts})
