"""Idefics3 and SmolVLM: SigLIP's encoder over square tiles, squares of patches side by side, and one matrix."""

import torch
from torch import Tensor

from emberline.models.vision.blocks import TowerWeights
from emberline.models.vision.siglip import SiglipEncoder


class Idefics3Tower(SiglipEncoder):
    def read_projector(self, weights: TowerWeights) -> None:
        """Read the projection."""
        super().read_projector(weights)
        config = self.config
        self._projection = weights.linear("mm.model.fc", config.hidden, config.square * config.width, bias=False)

    def on_side(self, numbers: Tensor, n: int) -> Tensor:
        """The bucket that a patch's fraction of the tile falls into."""
        side = self.config.grid_side
        bounds = torch.arange(1 / side, 1.0, 1 / side, device=numbers.device)
        fractions = numbers * torch.full((), 1.0 / n, device=numbers.device)
        return torch.bucketize(fractions.clamp(max=1.0 - 1e-6), bounds, right=True)

    def project(self, x: Tensor) -> Tensor:  # [rows, hidden]
        """Norm, then one matrix over the patches of each square."""
        return self._projection(self._norm(x).view(-1, self.config.square * self.config.width))
