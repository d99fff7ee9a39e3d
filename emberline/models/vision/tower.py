"""A vision tower: tiles of images in, rows for the language model's embeddings out."""

from collections.abc import Generator, Sequence
from typing import Protocol

from torch import Tensor

from emberline.protocol.images import Size

Encoding = Generator[float, None, Tensor]  # floating-point operations of each piece that was queued, and the rows


class VisionTower(Protocol):
    @property
    def hidden(self) -> int:
        """The language model's hidden size."""
        ...

    @property
    def n_bytes(self) -> int:
        """Bytes of the weights."""
        ...

    @property
    def n_deepstack(self) -> int:
        """Number of the language model's first layers after which rows are added to those of images."""
        ...

    def encode(self, tiles: Sequence[Tensor]) -> Tensor:  # uint8 [height, width, 3] each
        """Rows of all tiles, in order: [rows, hidden * (1 + n_deepstack)] in the tower's dtype.

        In a rank group all ranks call it with tiles of the same sizes; the pixels of rank 0 count, and every rank gets
        all rows. The first `hidden` columns replace the embeddings of the image tokens, the next ones are added after
        layer 0, and so on.
        """
        ...

    def pieces(self, tile: Tensor) -> Encoding:  # uint8 [height, width, 3]
        """Encode one tile in pieces. Yields the floating-point operations of each, once it is queued; returns the
        tile's rows."""
        ...

    def operations(self, tile: Size) -> float:
        """Floating-point operations of all pieces of a tile."""
        ...


def finish(encoding: Encoding) -> Tensor:
    """Run all pieces that are left of an encoding. Returns its rows."""
    while True:
        try:
            next(encoding)
        except StopIteration as end:
            rows: Tensor = end.value
            return rows
