"""Idefics3 and SmolVLM: SigLIP's encoder over square tiles, squares of patches side by side, and one matrix."""

from collections.abc import Sequence

import torch
from torch import Tensor

from emberline.models.vision.blocks import Block, Grid, Linear, TowerWeights, square_order
from emberline.models.vision.encoder import TowerEncoder


class Idefics3Tower(TowerEncoder):
    def read_encoder(self, weights: TowerWeights) -> tuple[Linear, list[Block]]:
        """Read the patch embedding and the blocks."""
        blocks = [Block.read(weights, number, self.config) for number in range(self.config.n_layers)]
        return weights.patches(self.config), blocks

    def read_projector(self, weights: TowerWeights) -> None:
        """Read learned positions, the last norm and the projection."""
        config = self.config
        self._positions = weights.take("v.position_embd.weight", config.n_positions, config.width)
        self._norm = weights.norm("v.post_ln", config.width, config.norm_eps)
        self._projection = weights.linear("mm.model.fc", config.hidden, config.square * config.width, bias=False)

    def place(self, x: Tensor, grids: Sequence[Grid]) -> Tensor:  # [patches, width]
        """Add the position whose bucket a patch's fraction of the tile falls into."""
        side = self.config.grid_side
        bounds = torch.arange(1 / side, 1.0, 1 / side, device=x.device)

        def buckets(numbers: Tensor, n: int) -> Tensor:
            fractions = (numbers * torch.tensor(1.0 / n, device=x.device)).clamp(max=1.0 - 1e-6)
            return torch.bucketize(fractions, bounds, right=True)

        found = []
        for grid in grids:
            rows, columns = square_order(grid, self.config.processor.merge, x.device)
            found.append(buckets(rows, grid[0]) * side + buckets(columns, grid[1]))
        return x + self._positions[torch.cat(found)]

    def project(self, x: Tensor) -> Tensor:  # [rows, hidden]
        """Norm, then one matrix over the patches of each square."""
        return self._projection(self._norm(x).view(-1, self.config.square * self.config.width))
