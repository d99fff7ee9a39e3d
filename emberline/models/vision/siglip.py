"""SigLIP: an encoder with a learned position for each patch. Gemma 3 projects the mean of each square of patches."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from emberline.models.vision.blocks import Grid, TowerWeights, square_order
from emberline.models.vision.encoder import TowerEncoder


class SiglipEncoder(TowerEncoder):
    """Plain blocks between learned positions and a norm. Families differ in the projector."""

    def read_projector(self, weights: TowerWeights) -> None:
        """Read learned positions and the last norm."""
        config = self.config
        self._positions = weights.take("v.position_embd.weight", config.n_positions, config.width)
        self._norm = weights.norm("v.post_ln", config.width, config.norm_eps)

    def place(self, x: Tensor, grids: Sequence[Grid]) -> Tensor:  # [patches, width]
        """Add the position of each patch."""
        found = []
        for grid in grids:
            rows, columns = square_order(grid, self.config.processor.merge, x.device)
            found.append(self.on_side(rows, grid[0]) * self.config.grid_side + self.on_side(columns, grid[1]))
        return x + self._positions[torch.cat(found)]

    def on_side(self, numbers: Tensor, n: int) -> Tensor:
        """Numbers of positions along a side, of patches numbered among the n along a tile's side."""
        return numbers


class SiglipTower(SiglipEncoder):
    """The tower of Gemma 3."""

    def read_projector(self, weights: TowerWeights) -> None:
        """Read the second norm and the projection, which the checkpoint has as [in, out]."""
        super().read_projector(weights)
        config = self.config
        self._soft_norm = weights.take("mm.soft_emb_norm.weight", config.width, dtype=torch.float32) + 1
        self._projection = weights.take("mm.input_projection.weight", config.width, config.hidden)

    def project(self, x: Tensor) -> Tensor:  # [rows, hidden]
        """Norm, the mean of each square in float32, RMSNorm, and the projection."""
        squares = self._norm(x).view(-1, self.config.square, self.config.width).float().mean(1)
        normed = F.rms_norm(squares, self._soft_norm.shape, self._soft_norm, self.config.projector_eps)
        return normed.to(x.dtype) @ self._projection
