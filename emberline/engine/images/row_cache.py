"""Rows of image tiles: a tower makes them once, and a cache bounded by bytes keeps them for later steps and requests.

Rows are named by the image's digest, which covers the file, how it is resized, and the account's salt.

In a rank group every rank of the first stage encodes with its share of the tower, and keeps some columns of the rows.
All ranks see the same plans: their caches hold, and evict, the same tiles.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from emberline.engine.images.places import TileRows
from emberline.kernels.collectives import Collectives, NoCollectives
from emberline.protocol.images import Size, n_pixel_bytes


class Tower(Protocol):
    """A vision tower with its projector: `models.vision`."""

    @property
    def hidden(self) -> int: ...
    @property
    def n_bytes(self) -> int: ...
    @property
    def n_deepstack(self) -> int: ...

    def encode(self, tiles: Sequence[Tensor]) -> Tensor:
        """Rows of all tiles, [rows, hidden * (1 + n_deepstack)]. tiles: uint8 [height, width, 3]."""
        ...


class RowSource(Protocol):
    """Where a runner gets the rows of tiles from."""

    def take(self, wanted: Sequence[TileRows]) -> Tensor:
        """The rows of several tiles in order, [rows, width]."""
        ...

    def measured_bytes(self) -> int:
        """Bytes of a GPU that it needs beside the weights."""
        ...


class AbsentRows:
    """The rows on a rank of a later stage, whose model has no embeddings that they could replace."""

    def __init__(self, width: int, dtype: torch.dtype, device: str) -> None:
        self._width, self._dtype, self._device = width, dtype, device

    def take(self, wanted: Sequence[TileRows]) -> Tensor:
        """Return a zero for every row."""
        n_rows = sum(rows.end - rows.first for rows in wanted)
        return torch.zeros(n_rows, self._width, dtype=self._dtype, device=self._device)

    def measured_bytes(self) -> int:
        """Nothing worth counting."""
        return 0


class RowCache:
    """The tower and the rows that it made, the least recently used ones evicted first."""

    def __init__(
        self,
        tower: Tower,
        n_rows: Callable[[Size], int],
        capacity_bytes: int,
        device: str = "cpu",
        threads: int = 0,
        largest: Size = (0, 0),
        group: Collectives | None = None,
    ) -> None:
        """n_rows: how many rows the tower makes of a tile of this size. capacity_bytes: of all ranks together. threads:
        torch's while it encodes; 0: as they are. largest: size of the largest tile. group: of the ranks that divide
        the tower."""
        self.tower, self._n_rows, self._device = tower, n_rows, device
        self._capacity, self._used = capacity_bytes, 0
        self._threads, self._largest = threads, largest
        self._group = group or NoCollectives()
        self._width = width = tower.hidden * (1 + tower.n_deepstack)
        rank, of = self._group.rank, self._group.size
        self._columns = slice(width * rank // of, width * (rank + 1) // of)  # of the rows, that this rank keeps
        self._rows: OrderedDict[tuple[bytes, int], Tensor] = OrderedDict()
        self.n_encoded = 0  # tiles, in all

    def has(self, key: tuple[bytes, int]) -> bool:
        """True if the rows of a tile need not be made."""
        return key in self._rows

    def take(self, wanted: Sequence[TileRows]) -> Tensor:
        """The rows of several tiles in order, [rows, width], after encoding those that are missing. Columns that other
        ranks keep are zeros, so that the sum over all ranks has the rows."""
        missing = {rows.key: rows for rows in wanted if rows.key not in self._rows}
        if missing:
            self._encode(list(missing.values()))
        for rows in wanted:
            self._rows.move_to_end(rows.key)
        found = torch.cat([self._rows[rows.key][rows.first : rows.end] for rows in wanted])
        self._evict({rows.key for rows in wanted})
        if self._group.size == 1:
            return found
        padded = found.new_zeros(len(found), self._width)
        padded[:, self._columns] = found
        return padded

    def measured_bytes(self) -> int:
        """Bytes of a GPU that the cache and an encoding need beside the weights. Encodes a tile to learn that."""
        width, height = self._largest
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self.tower.encode([torch.zeros(height, width, 3, dtype=torch.uint8, device=self._device)])
        return self._capacity // self._group.size + torch.cuda.max_memory_allocated(self._device) - before

    @torch.inference_mode()
    def _encode(self, missing: list[TileRows]) -> None:
        tiles = [_pixels(rows) for rows in missing]
        with _torch_threads(self._threads):
            made = self.tower.encode(tiles)
        counts = [self._n_rows(rows.image.tiles[rows.tile]) for rows in missing]
        for rows, part in zip(missing, torch.split(made, counts), strict=True):
            self._rows[rows.key] = part[:, self._columns].clone()  # not a view: it would keep the others of the batch
            self._used += part.nbytes
        self.n_encoded += len(missing)

    def _evict(self, in_use: Collection[tuple[bytes, int]]) -> None:
        """Forget the oldest rows until the cache is as small as it has to be. Rows in use stay."""
        for key in list(self._rows):
            if self._used <= self._capacity:
                return
            if key not in in_use:
                rows = self._rows.pop(key)
                self._used -= len(rows) * self._width * rows.itemsize


@contextmanager
def _torch_threads(n_threads: int) -> Iterator[None]:
    """Let torch compute with so many threads; 0: with as many as it has. Beside the C kernels it has one else."""
    before = torch.get_num_threads()
    if n_threads and n_threads != before:
        torch.set_num_threads(n_threads)
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)


def _pixels(rows: TileRows) -> Tensor:
    """The pixels of a tile, uint8 [height, width, 3]. A follower of a rank group has none, and knows their number."""
    image = rows.image
    width, height = image.tiles[rows.tile]
    if not image.pixels:
        return torch.empty(height, width, 3, dtype=torch.uint8, device="meta")
    first = n_pixel_bytes(image.tiles[: rows.tile])
    view = memoryview(image.pixels)[first : first + 3 * width * height]
    return torch.frombuffer(bytearray(view), dtype=torch.uint8).view(height, width, 3)
