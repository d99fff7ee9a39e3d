"""One stage of a pipeline as a model: hidden states come from the stage before and go to the next.

Several steps are in flight, each with its own sequences, so while this stage computes one the others compute theirs.
"""

import torch
from torch import Tensor

from emberline.kernels.collectives import Collectives
from emberline.models.decoder import Decoder, StepInputs, Taps
from emberline.protocol.block_hash import KVGroup


class PipelineStage:
    """A runner's model. Only the last stage returns logits; the others return none."""

    def __init__(self, model: Decoder, stages: Collectives) -> None:
        self._model, self._stages = model, stages

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        return self._model.kv_groups

    def forward(self, step: StepInputs, kv: list[Tensor], taps: Taps | None = None) -> Tensor:
        assert taps is None, "no stage has all layers: draft heads do not run in a pipeline"
        stages, hidden = self._stages, None
        if stages.rank:
            hidden = self._model.kernels.buffer("residual", len(step.token_ids), self._model.config.hidden_size)
            stages.recv(hidden, stages.rank - 1)
        out = self._model.forward_stage(step, kv, hidden)
        if stages.rank < stages.size - 1:
            stages.send(out, stages.rank + 1)
            return torch.empty(0, self._model.config.vocab_size)
        return out

    def forward_tapped(self, step: StepInputs, kv: list[Tensor], taps: tuple[int, ...]) -> tuple[Tensor, list[Tensor]]:
        raise NotImplementedError("no stage has all layers: draft heads do not run in a pipeline")
