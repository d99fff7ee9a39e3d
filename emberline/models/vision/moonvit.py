"""MoonViT in Kimi K2.5: resized learned positions and 2-D RoPE on adjacent pairs, squares merged by an MLP."""

from collections.abc import Sequence

import torch
from torch import Tensor

from emberline.models.vision.blocks import Block, Grid, Linear, Rotation, TowerWeights, frequencies
from emberline.models.vision.encoder import TowerEncoder
from emberline.models.vision.grid_positions import add_positions, axis_angles


class MoonViTTower(TowerEncoder):
    fused = True

    def read_blocks(self, weights: TowerWeights) -> list[Block]:
        """Read the blocks, whose rows of q and k are reordered to halves."""
        config = self.config
        own = weights.share(config.width, config.head_dim)
        plain = torch.arange(own.stop - own.start)
        halves = plain.view(-1, config.head_dim // 2, 2).transpose(1, 2).reshape(-1)
        order = torch.cat((halves, halves + len(plain), plain + 2 * len(plain))).to(weights.device)
        blocks = []
        for block in super().read_blocks(weights):
            weight, bias = block.qkv
            assert bias is not None
            blocks.append(block.with_qkv(Linear(weight[order], bias[order])))
        return blocks

    def read_projector(self, weights: TowerWeights) -> None:
        """Read learned positions, both norms, and the projector's two linear layers."""
        config, inner = self.config, self.config.square * self.config.width
        side = config.grid_side
        self._positions = weights.take("v.position_embd.weight", side, side, config.width, dtype=torch.float32)
        self._norm = weights.norm("v.post_ln", config.width, config.norm_eps)
        self._projector_norm = weights.norm("mm.input_norm", config.width, config.projector_eps)
        self._projector = weights.mlp("mm.1", "", "mm.2", (inner, inner, config.hidden), "gelu")

    def place(self, x: Tensor, grids: Sequence[Grid]) -> Tensor:  # [patches, width]
        """Add the learned positions, resized bicubically."""
        merge = self.config.processor.merge
        return add_positions(x, self._positions, grids, merge, "bicubic", align_corners=False)

    def rotation(self, grids: Sequence[Grid]) -> Rotation:
        """Angles alternate: a pair turns with the column, the next one with the row."""
        steps = frequencies(self.config.rope_theta, self.config.head_dim // 2, self._device)
        rows, columns = axis_angles(grids, self.config.processor.merge, steps)
        return Rotation.by(torch.stack((columns, rows), -1).flatten(1))

    def project(self, x: Tensor) -> Tensor:  # [rows, hidden]
        """Norm each patch twice, merge each square, and project it."""
        return self._projector(self._projector_norm(self._norm(x)).view(-1, self.config.square * self.config.width))
