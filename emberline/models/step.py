"""The inputs of one forward pass: plain tensors, built by the runner from a step's plan."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(slots=True)
class StepInputs:
    """A ragged batch. Row r owns tokens query_starts[r] : query_starts[r + 1]; they are the last of its context."""

    token_ids: Tensor  # int32 [tokens]
    positions: Tensor  # int32 [tokens]
    query_starts: Tensor  # int32 [rows + 1]
    context_lens: Tensor  # int32 [rows], the new tokens included
    block_tables: list[Tensor]  # per KV group: int32 [rows, max_blocks]; entry j holds tokens 16j .. 16j + 15
    sample_tokens: Tensor  # int64 [samples], indices into tokens whose logits are wanted
    shape: Any = None  # kernels.gpu.step.StepShape: what the host knows, so that a backend need not ask the device
