"""Learned positions of a square grid, resized to the grids of tiles; and RoPE of rows and columns."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from emberline.models.vision.blocks import Grid, square_order

MOST_RESIZED = 4 << 20  # numbers of a resized table that are in memory at a time


def resized_positions(
    table: Tensor, grids: Sequence[Grid], merge: int, mode: str, *, align_corners: bool
) -> Tensor:  # [patches, width]
    """Resize a float32 table [side, side, width] to each grid, in the order of squares."""
    resized: dict[Grid, Tensor] = {}
    for grid in grids:
        if grid not in resized:
            by_row, by_column = (_weights(len(table), n, mode, table.device, align_corners) for n in grid)
            sized = by_column @ (by_row @ table.flatten(1)).view(-1, *table.shape[1:])  # [rows, columns, width]
            resized[grid] = sized[square_order(grid, merge, table.device)]
    return torch.cat([resized[grid] for grid in grids])


def _weights(side: int, n: int, mode: str, device: torch.device, align_corners: bool) -> Tensor:  # [n, side]
    """Weights of `side` positions in each of n, along one side. As products of matrices, a table is resized many times
    as fast on a GPU as by torch's kernel, whose threads loop over the width."""
    eye = torch.eye(side, device=device)
    if n == side:
        return eye
    return F.interpolate(eye[None, None], size=(n, side), mode=mode, align_corners=align_corners)[0, 0]


def axis_angles(grids: Sequence[Grid], merge: int, steps: Tensor) -> tuple[Tensor, Tensor]:
    """Angles of all patches by their rows and by their columns: float32 [patches, len(steps)] each."""
    coordinates = [square_order(grid, merge, steps.device) for grid in grids]
    rows, columns = (torch.cat(part) for part in zip(*coordinates, strict=True))
    return rows[:, None] * steps, columns[:, None] * steps


def add_positions(
    x: Tensor, table: Tensor, grids: Sequence[Grid], merge: int, mode: str, *, align_corners: bool
) -> Tensor:
    """Add a resized table to embedded patches in place, some columns at a time, and return them."""
    n_columns = max(1, MOST_RESIZED // len(x))
    for first in range(0, x.shape[1], n_columns):
        columns = slice(first, first + n_columns)
        x[:, columns] += resized_positions(table[..., columns], grids, merge, mode, align_corners=align_corners).to(
            x.dtype
        )
    return x
