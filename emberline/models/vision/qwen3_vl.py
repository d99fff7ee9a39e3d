"""Qwen3-VL: resized learned positions and 2-D RoPE, squares merged by an MLP, and deepstack outputs of some blocks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from emberline.models.vision.blocks import DividedMLP, Grid, Linear, Norm, Rotation, TowerWeights, frequencies
from emberline.models.vision.encoder import TowerEncoder
from emberline.models.vision.grid_positions import add_positions, axis_angles


class Qwen3VLTower(TowerEncoder):
    fused = True

    def read_embedding(self, weights: TowerWeights) -> Linear:
        """Read the embedding of patches, whose two frames are summed: an image is a frame twice."""
        config, patch = self.config, self.config.processor.patch
        if weights.has("v.patch_embd.weight.1"):  # llama.cpp has a tensor for each frame
            names, shape = ("v.patch_embd.weight", "v.patch_embd.weight.1"), (config.width, 3, patch, patch)
            one, two = (weights.take(name, *shape, dtype=torch.float32) for name in names)
            both = one + two
        else:
            both = weights.take("v.patch_embd.weight", config.width, 3, 2, patch, patch, dtype=torch.float32).sum(2)
        rows = both.permute(0, 2, 3, 1).reshape(config.width, -1).to(weights.dtype).contiguous()
        return Linear(rows, weights.take("v.patch_embd.bias", config.width))

    def read_projector(self, weights: TowerWeights) -> None:
        """Read learned positions, the merger, and a merger for each deepstack output."""
        config, inner = self.config, self.config.square * self.config.width
        table = weights.take("v.position_embd.weight", config.n_positions, config.width, dtype=torch.float32)
        self._positions = table.view(config.grid_side, config.grid_side, config.width)
        self._norm = weights.norm("v.post_ln", config.width, config.projector_eps)
        widths = inner, inner, config.hidden
        self._merger = weights.mlp("mm.0", "", "mm.2", widths, "gelu")
        self._deepstack: list[tuple[Norm, DividedMLP]] = [
            (
                weights.norm(f"{name}.norm", inner, config.projector_eps),
                weights.mlp(f"{name}.fc1", "", f"{name}.fc2", widths, "gelu"),
            )
            for name in (f"v.deepstack.{number}" for number in range(len(config.deepstack)))
        ]

    def place(self, x: Tensor, grids: Sequence[Grid]) -> Tensor:  # [patches, width]
        """Add the learned positions, resized bilinearly between the corners."""
        merge = self.config.processor.merge
        return add_positions(x, self._positions, grids, merge, "bilinear", align_corners=True)

    def rotation(self, grids: Sequence[Grid]) -> Rotation:
        """The first half of the angles turns with the row, the second with the column."""
        steps = frequencies(self.config.rope_theta, self.config.head_dim // 2, self._device)
        return Rotation.by(torch.cat(axis_angles(grids, self.config.processor.merge, steps), -1))

    def deepstack(self, x: Tensor, number: int) -> Tensor:  # [rows, hidden]
        """Merge each square, norm it, and project it."""
        norm, merger = self._deepstack[number]
        return merger(norm(x.view(-1, self.config.square * self.config.width)))

    def project(self, x: Tensor) -> Tensor:  # [rows, hidden]
        """Norm each patch, merge each square, and project it."""
        return self._merger(self._norm(x).view(-1, self.config.square * self.config.width))
