"""The course of an encoding, for towers of every family: passes of tiles through patches, blocks and projector."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from emberline.models.vision.blocks import (
    Block,
    Grid,
    Linear,
    Patches,
    Rotation,
    TowerWeights,
    kernels_for,
    runs_of,
    total,
)
from emberline.models.vision.tower import Encoding, finish
from emberline.protocol.images import Size
from emberline.weights.vision_config import TowerConfig

MAX_PASS_PATCHES = 16_384  # a larger tile has a pass of its own


class TowerEncoder(ABC):
    """A tower. Families say how patches are placed, and how rows are projected."""

    fused: ClassVar[bool] = False  # one matrix of the checkpoint makes q, k and v
    plain: ClassVar[bool] = False  # RMSNorm, gated MLPs, and no biases

    def __init__(self, config: TowerConfig, weights: TowerWeights, deterministic: bool = False) -> None:
        """Reads the weights. `deterministic`: a tile's rows are the same bits whatever it is encoded with."""
        self.config, self.deterministic = config, deterministic
        self._device, self._group = weights.device, weights.group
        self._patches = Patches(config, weights.device, weights.dtype)
        self._kernels = kernels_for(weights.device, weights.dtype)
        self._embed, self._blocks = self.read_embedding(weights), self.read_blocks(weights)
        self.read_projector(weights)
        weights.check_all_taken()
        self._n_bytes, self._dtype = weights.n_bytes, weights.dtype

    @property
    def hidden(self) -> int:
        """The language model's hidden size."""
        return self.config.hidden

    @property
    def n_bytes(self) -> int:
        """Bytes of the weights."""
        return self._n_bytes

    @property
    def n_deepstack(self) -> int:
        """Number of the language model's first layers after which rows are added to those of images."""
        return len(self.config.deepstack)

    @torch.inference_mode()
    def encode(self, tiles: Sequence[Tensor]) -> Tensor:  # uint8 [height, width, 3] each
        """Rows of all tiles, in order: [rows, hidden * (1 + n_deepstack)] in the tower's dtype.

        In a rank group all ranks call it with tiles of the same sizes; the pixels of rank 0 count.
        """
        if not tiles:
            return torch.empty(0, self.hidden * (1 + self.n_deepstack), dtype=self._dtype, device=self._device)
        return torch.cat([finish(self._pass(part)) for part in self._passes(tiles)])

    @torch.inference_mode()
    def pieces(self, tile: Tensor) -> Encoding:  # uint8 [height, width, 3]
        """Encode one tile in pieces. Yields the floating-point operations of each, once it is queued; returns the
        tile's rows."""
        return (yield from self._pass([tile]))

    def operations(self, tile: Size) -> float:
        """Floating-point operations of the blocks for a tile."""
        patch = self.config.processor.patch
        return self.config.n_layers * self._block_operations([(tile[1] // patch, tile[0] // patch)])

    def _block_operations(self, grids: Sequence[Grid]) -> float:
        """Floating-point operations of one block for tiles of these grids."""
        width, mlp = self.config.width, self.config.mlp_size * (3 if self._blocks[0].mlp.gate is not None else 2)
        counts = [rows * columns for rows, columns in grids]
        return sum(2.0 * n * width * (4 * width + mlp) + 4.0 * n * n * width for n in counts)

    def _passes(self, tiles: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """Divide tiles into passes: of one tile each if deterministic, else up to MAX_PASS_PATCHES."""
        part: list[Tensor] = []
        n_patches = 0
        for tile in tiles:
            rows, columns = self._patches.grid(tile)
            if part and (self.deterministic or n_patches + rows * columns > MAX_PASS_PATCHES):
                yield part
                part, n_patches = [], 0
            part.append(tile)
            n_patches += rows * columns
        yield part

    def _pass(self, tiles: Sequence[Tensor]) -> Encoding:
        grids = [self._patches.grid(tile) for tile in tiles]
        if self._group.rank:
            n_patches = sum(rows * columns for rows, columns in grids)
            x = torch.zeros(n_patches, self.config.width, dtype=self._dtype, device=self._device)
        else:
            x = self.place(self._embed(torch.cat([self._patches.cut(tile) for tile in tiles])), grids)
        x = total(x, self._group)  # rank 0 alone has the pixels
        rotation, runs, operations = self.rotation(grids), runs_of(grids), self._block_operations(grids)
        add_norm, outputs = self._kernels.add_norm, list[Tensor]()
        added: Tensor | None = None  # to x, which the next norm does in the same pass over memory
        for number, block in enumerate(self._blocks):
            attended = block.attention(add_norm(x, added, block.norm), self._kernels, runs, rotation)
            added = block.mlp(add_norm(x, attended, block.mlp_norm))
            if number in self.config.deepstack:
                x, added = x.add_(added), None
                outputs.append(self.deepstack(x, len(outputs)))
            yield operations
        return torch.cat([self.project(x if added is None else x.add_(added)), *outputs], -1)

    def read_embedding(self, weights: TowerWeights) -> Linear:
        """Read the embedding of patches."""
        return weights.patches(self.config, bias=not self.plain)

    def read_blocks(self, weights: TowerWeights) -> list[Block]:
        """Read the blocks."""
        numbers = range(self.config.n_layers)
        return [Block.read(weights, number, self.config, fused=self.fused, plain=self.plain) for number in numbers]

    @abstractmethod
    def read_projector(self, weights: TowerWeights) -> None:
        """Read what `place`, `deepstack` and `project` need."""

    def place(self, x: Tensor, grids: Sequence[Grid]) -> Tensor:  # [patches, width]
        """Add learned positions to the embedded patches."""
        return x

    def rotation(self, grids: Sequence[Grid]) -> Rotation | None:
        """RoPE of the patches, in the order of squares. Returns None if the tower has none."""
        return None

    def deepstack(self, x: Tensor, number: int) -> Tensor:  # [rows, hidden]
        """Project the output of one of `TowerConfig.deepstack`."""
        raise NotImplementedError

    @abstractmethod
    def project(self, x: Tensor) -> Tensor:  # [rows, hidden]
        """Norm, merge and project the last block's output."""


def encoding_bytes(config: TowerConfig, dtype: torch.dtype, n_ranks: int = 1) -> int:
    """Bytes of the activations that are alive together while the largest tile is encoded, on a rank of a group."""
    width, height = config.processor.largest_tile
    whole, heads, mlp = config.width, -(-config.width // n_ranks), -(-config.mlp_size // n_ranks)
    numbers = max(3 * whole + 2 * mlp, whole + 7 * heads) + 2 * config.head_dim  # of a patch, with its angles
    return width * height // config.processor.patch**2 * numbers * dtype.itemsize
