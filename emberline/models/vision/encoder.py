"""The course of an encoding, for towers of every family: passes of tiles through patches, blocks and projector."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from emberline.models.vision.blocks import Block, Grid, Linear, Patches, Rotation, TowerWeights, runs_of, total
from emberline.weights.vision_config import TowerConfig

MAX_PASS_PATCHES = 16_384  # a larger tile has a pass of its own


class TowerEncoder(ABC):
    """A tower. Families say how patches are embedded and placed, and how rows are projected."""

    def __init__(self, config: TowerConfig, weights: TowerWeights, deterministic: bool = False) -> None:
        """Reads the weights. `deterministic`: a tile's rows are the same bits whatever it is encoded with."""
        self.config, self.deterministic = config, deterministic
        self._device, self._group = weights.device, weights.group
        self._patches = Patches(config, weights.device, weights.dtype)
        self._embed, self._blocks = self.read_encoder(weights)
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
        return torch.cat([self._pass(part) for part in self._passes(tiles)])

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

    def _pass(self, tiles: Sequence[Tensor]) -> Tensor:
        grids = [self._patches.grid(tile) for tile in tiles]
        if self._group.rank:
            n_patches = sum(rows * columns for rows, columns in grids)
            x = torch.zeros(n_patches, self.config.width, dtype=self._dtype, device=self._device)
        else:
            x = self.place(self._embed(torch.cat([self._patches.cut(tile) for tile in tiles])), grids)
        x = total(x, self._group)  # rank 0 alone has the pixels
        rotation, runs = self.rotation(grids), runs_of(grids)
        outputs: list[Tensor] = []
        for number, block in enumerate(self._blocks):
            x = block(x, runs, rotation)
            if number in self.config.deepstack:
                outputs.append(self.deepstack(x, len(outputs)))
        return torch.cat([self.project(x), *outputs], -1)

    @abstractmethod
    def read_encoder(self, weights: TowerWeights) -> tuple[Linear, list[Block]]:
        """Read the patch embedding and the blocks."""

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
