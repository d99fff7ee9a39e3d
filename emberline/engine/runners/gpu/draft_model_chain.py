"""A draft model behind the GPU runner's steps: a step ends with its pass over the step's tokens, a graph of their own
drafts.

step:   layers of the target -> layers of the draft model, which write its entries -> logits -> draws
chain:  the token drawn last -> (all layers -> logits -> draw) as often as the chain is deep -> drafts by slot

A draft model needs the tokens alone, so nothing is carried from step to step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from emberline.engine.runners.gpu.draft_chain import ChainOfDrafts, ChainShape, DraftChain, first_rows
from emberline.engine.runners.gpu.slots import Slots
from emberline.engine.runners.gpu.step_kernels import ChainKernels
from emberline.kernels.gpu.backend.workspace import StepShape
from emberline.models.decoder import StepInputs, Taps
from emberline.models.draft_head import GpuDraftHead
from emberline.models.draft_model import DraftModel

MODEL_CHAIN_DEPTHS = (1, 2, 4, 8)  # the last one is kernels.decode_inputs.MAX_DRAFTS


@dataclass(frozen=True, slots=True)
class _Following:
    """Takes in one step: a `models.decoder.Taps` that reads no layer."""

    chain: "DraftModelChain"
    taps: tuple[int, ...] = ()

    def take(self, n: int, residual: Tensor) -> None:
        raise AssertionError("a draft model has no taps")

    def end(self, step: StepInputs) -> None:
        self.chain.write_entries(step)


class DraftModelChain(ChainOfDrafts):
    """Owns the buffers around the model; its backend's workspace is reserved by the caller."""

    depths = MODEL_CHAIN_DEPTHS

    def __init__(
        self,
        model: DraftModel,
        pools: Sequence[Tensor],
        first_scratch: Sequence[int],
        first_group: int,
        slots: Slots,
        kernels: ChainKernels,
    ) -> None:
        """pools: of the model's KV groups, the first of which is number `first_group` of all. first_scratch: in each,
        the first of the blocks behind the cache's, one per slot."""
        device, n_slots = pools[0].device, slots.state.tables.shape[1]
        super().__init__(slots, kernels, device, torch.zeros(n_slots, 0, device=device))
        self._model, self._pools = model, list(pools)
        self._first_scratch, self._first_group = list(first_scratch), first_group
        tables = [self._inputs.tables, *(torch.zeros_like(self._inputs.tables) for _ in pools[1:])]
        self._by_group = [replace(self._inputs, tables=table) for table in tables]
        self._samples = torch.arange(n_slots, dtype=torch.int64, device=device)
        self._ids = torch.arange(model.vocab_size, dtype=torch.int32, device=device)

    @staticmethod
    def state_bytes(model: DraftModel, max_running: int, table_width: int) -> int:
        """Return the bytes of tables and token ids, which are needed besides the pools."""
        return 4 * max_running * (len(model.kv_groups) * table_width + 16) + 4 * model.vocab_size

    def reading(self, slots: Tensor, drafts: bool = False) -> Taps:
        return _Following(self)

    def write_entries(self, step: StepInputs) -> None:
        """Write the draft model's entries of a target step's tokens. The step has block tables of all groups. Entries
        of drafts that will not be accepted are made again, as the target's are."""
        tables = step.block_tables[self._first_group :]
        shape = replace(step.shape, shared_prefix=None, prefix_lens=None)
        own = replace(step.of_tokens(), block_tables=tables, sample_tokens=self._none, shape=shape)
        self._model.forward(own, self._pools)

    def run(self, shape: ChainShape) -> Tensor:
        n, state = shape.n_rows, self._slots.state
        by_group = [first_rows(each, n) for each in self._by_group]
        for i, (group, scratch) in enumerate(zip(by_group, self._first_scratch, strict=True)):
            self._kernels.begin_chain(state, self._carried, self._first_group + i, scratch, group)
        to = by_group[0]
        step = StepInputs(
            token_ids=to.token_ids,
            positions=to.positions,
            query_starts=self._starts[: n + 1],
            context_lens=to.context_lens,
            block_tables=[each.tables for each in by_group],
            sample_tokens=self._samples[:n],
            shape=StepShape(n),
        )
        for index in range(shape.depth):
            logits = self._model.forward(step, self._pools)
            self._kernels.draw_drafts(logits, self._slots.sampler, self._ids, index, state.drafts, to)
        return to.drafts


def open_chain(
    head: GpuDraftHead | DraftModel,
    pools: Sequence[Tensor],
    n_blocks: Sequence[int],
    slots: Slots,
    kernels: ChainKernels,
    max_tokens: int,
) -> ChainOfDrafts:
    """pools, n_blocks: of all KV groups, of which those of the head or draft model come last."""
    first = len(pools) - len(head.kv_groups)
    if isinstance(head, DraftModel):
        return DraftModelChain(head, pools[first:], n_blocks[first:], first, slots, kernels)
    return DraftChain(head, pools[first], n_blocks[first], slots, kernels, max_tokens)


def pool_blocks(n_blocks: Sequence[int], max_running: int, head: GpuDraftHead | DraftModel | None) -> list[int]:
    """Blocks of the pools: those of the cache, and scratch for chains of drafts, one of each slot."""
    n_own = len(n_blocks) - (0 if head is None else len(head.kv_groups))
    return [*n_blocks[:n_own], *(n + max_running + 1 for n in n_blocks[n_own:])]
