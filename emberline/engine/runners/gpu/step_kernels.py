"""The kernels that a step launches around the forward pass, as the GPU runner calls them."""

from typing import Any, Protocol

from torch import Tensor

from emberline.kernels.decode_inputs import DecodeInputs, SlotState
from emberline.kernels.draft_chain import CarriedStates, ChainInputs


class ChainKernels(Protocol):
    """Launches of a chain of drafts. Their reference is `kernels.draft_chain`."""

    def carry(
        self, hidden: Tensor, starts: Tensor, slots: Tensor, positions: Tensor, carried: CarriedStates, out: Tensor,
        drafts: bool,
    ) -> None: ...  # fmt: skip
    def keep_accepted(
        self, hidden: Tensor, starts: Tensor, slots: Tensor, positions: Tensor, n_accepted: Tensor,
        carried: CarriedStates,
    ) -> None: ...  # fmt: skip
    def begin_chain(
        self, state: SlotState, carried: CarriedStates, group: int, first_scratch: int, to: ChainInputs
    ) -> None: ...
    def draw_drafts(
        self, logits: Tensor, table: Any, target_ids: Tensor, step: int, drafts: Tensor, to: ChainInputs
    ) -> None: ...


class Kernels(ChainKernels, Protocol):
    """All launches around a forward pass. Their references are `kernels.decode_inputs` and `kernels.sampling`."""

    def prepare(self, packet: Tensor, state: SlotState, to: DecodeInputs, drafts: Tensor | None = None) -> None: ...
    def keep(self, tokens: Tensor, slots: Tensor, positions: Tensor, state: SlotState) -> None: ...
    def sample(
        self,
        logits: Tensor,
        table: Any,
        slots: Tensor,
        positions: Tensor,
        out: Any,
        guided: bool = False,
        token_ids: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> None: ...
    def accept(
        self, draws: Tensor, inputs: DecodeInputs, table: Any, state: SlotState, n_rows: int, guided: bool = False
    ) -> None: ...
