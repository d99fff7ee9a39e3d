"""Gemma 3: SigLIP's encoder over one square tile, the mean of each square, RMSNorm and one matrix."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from emberline.models.vision.blocks import Block, Grid, Linear, TowerWeights, square_order
from emberline.models.vision.encoder import TowerEncoder


class SiglipTower(TowerEncoder):
    def read_encoder(self, weights: TowerWeights) -> tuple[Linear, list[Block]]:
        """Read the patch embedding and the blocks."""
        blocks = [Block.read(weights, number, self.config) for number in range(self.config.n_layers)]
        return weights.patches(self.config), blocks

    def read_projector(self, weights: TowerWeights) -> None:
        """Read learned positions, both norms and the projection, which the checkpoint has as [in, out]."""
        config = self.config
        self._positions = weights.take("v.position_embd.weight", config.n_positions, config.width)
        self._norm = weights.norm("v.post_ln", config.width, config.norm_eps)
        self._soft_norm = weights.take("mm.soft_emb_norm.weight", config.width, dtype=torch.float32) + 1
        self._projection = weights.take("mm.input_projection.weight", config.width, config.hidden)

    def place(self, x: Tensor, grids: Sequence[Grid]) -> Tensor:  # [patches, width]
        """Add the position of each patch."""
        found = []
        for grid in grids:
            rows, columns = square_order(grid, self.config.processor.merge, x.device)
            found.append(rows * self.config.grid_side + columns)
        return x + self._positions[torch.cat(found)]

    def project(self, x: Tensor) -> Tensor:  # [rows, hidden]
        """Norm, the mean of each square in float32, RMSNorm, and the projection."""
        squares = self._norm(x).view(-1, self.config.square, self.config.width).float().mean(1)
        normed = F.rms_norm(squares, self._soft_norm.shape, self._soft_norm, self.config.projector_eps)
        return normed.to(x.dtype) @ self._projection
