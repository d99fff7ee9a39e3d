"""Pixtral in Mistral Small 3: decoder-like blocks with 2-D RoPE, and a projector over squares of patches."""

from collections.abc import Sequence

import torch
from torch import Tensor

from emberline.models.vision.blocks import (
    Grid,
    Linear,
    Rotation,
    TowerWeights,
    frequencies,
)
from emberline.models.vision.encoder import TowerEncoder
from emberline.models.vision.grid_positions import axis_angles


class PixtralTower(TowerEncoder):
    plain = True

    def read_projector(self, weights: TowerWeights) -> None:
        """Read the norms, the merging matrix, whose columns are reordered to whole patches, and two linear layers."""
        config, bias = self.config, self.config.projector_bias
        self._pre_norm = weights.norm("v.pre_ln", config.width, config.norm_eps, bias=False)
        self._norm = weights.norm("mm.input_norm", config.width, config.projector_eps, bias=False)
        merging = weights.take("mm.patch_merger.weight", config.width, config.width * config.square)
        by_channel = merging.view(config.width, config.width, config.square)
        self._merging = Linear(by_channel.transpose(1, 2).reshape(config.width, -1).contiguous(), None)
        widths = config.width, config.hidden, config.hidden
        self._projector = weights.mlp("mm.1", "", "mm.2", widths, config.projector_activation, bias=bias)

    def place(self, x: Tensor, grids: Sequence[Grid]) -> Tensor:  # [patches, width]
        """Norm the embedded patches; their positions are RoPE's."""
        return self._pre_norm(x)

    def rotation(self, grids: Sequence[Grid]) -> Rotation:
        """Even frequencies turn with the row, odd ones with the column."""
        steps = frequencies(self.config.rope_theta, self.config.head_dim, self._device)
        rows, columns = axis_angles(grids, self.config.processor.merge, steps)
        return Rotation.by(torch.cat((rows[:, 0::2], columns[:, 1::2]), -1))

    def project(self, x: Tensor) -> Tensor:  # [rows, hidden]
        """Norm, merge each square, then two linear layers."""
        return self._projector(self._merging(self._norm(x).view(-1, self.config.square * self.config.width)))
