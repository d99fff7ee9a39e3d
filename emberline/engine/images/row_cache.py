"""Rows of image tiles: a tower makes them once, and a cache bounded by bytes keeps them for later steps and requests.

Rows are named by the image's digest, which covers the file, how it is resized, and the account's salt.

In a rank group every rank of the first stage encodes with its share of the tower, and keeps some columns of the rows.
All ranks see the same plans: their caches hold, and evict, the same tiles.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from emberline.engine.images.places import TileRows
from emberline.kernels.collectives import Collectives, NoCollectives
from emberline.models.vision.tower import Encoding, VisionTower, finish
from emberline.protocol.images import Size, n_pixel_bytes

TileKey = tuple[bytes, int]  # the image's digest, and the number of a tile
_log = logging.getLogger(__name__)


class RowSource(Protocol):
    """Where a runner gets the rows of tiles from."""

    def take(self, wanted: Sequence[TileRows]) -> Tensor:
        """The rows of several tiles in order, [rows, width]."""
        ...

    def advance(self, limit_s: float) -> None:
        """Encode tiles that were begun, for about so long on a GPU."""
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

    def advance(self, limit_s: float) -> None:
        """Nothing is encoded here."""

    def measured_bytes(self) -> int:
        """Nothing worth counting."""
        return 0


class RowCache:
    """The tower and the rows that it made, the least recently used ones evicted first."""

    def __init__(
        self,
        tower: VisionTower,
        n_rows: Callable[[Size], int],
        capacity_bytes: int,
        device: str = "cpu",
        threads: int = 0,
        largest: Size = (0, 0),
        group: Collectives | None = None,
        typical: Size | None = None,
    ) -> None:
        """n_rows: how many rows the tower makes of a tile of this size. capacity_bytes: of all ranks together. threads:
        torch's while it encodes; 0: as they are. largest: size of the largest tile. group: of the ranks that divide
        the tower. typical: of a tile whose encoding is timed; then steps beside sequences that decode encode parts of
        tiles, which no other rank may have."""
        self.tower, self._n_rows, self._device = tower, n_rows, device
        self._typical = typical
        self._begun: dict[TileKey, Encoding] = {}
        self._failed: set[TileKey] = set()  # tiles whose pieces failed beside sequences that have no part in it
        self._operations_s = 0.0  # floating-point operations per second of the tower, once they are measured
        self._capacity, self._used = capacity_bytes, 0
        self._threads, self._largest = threads, largest
        self._group = group or NoCollectives()
        self._width = width = tower.hidden * (1 + tower.n_deepstack)
        rank, of = self._group.rank, self._group.size
        self._columns = slice(width * rank // of, width * (rank + 1) // of)  # of the rows, that this rank keeps
        self._rows: OrderedDict[TileKey, Tensor] = OrderedDict()
        self.n_encoded = 0  # tiles, in all

    def has(self, key: TileKey) -> bool:
        """True if the rows of a tile need not be made."""
        return key in self._rows

    def begin(self, rows: TileRows) -> bool:
        """Let the next steps encode a tile, piece by piece. Returns False if the step that takes its rows is to encode
        it as a whole."""
        if self._typical is None or rows.key in self._failed:
            return False
        if rows.key not in self._begun:
            self._begun[rows.key] = self._pieces(rows)
        return True

    @torch.inference_mode()
    def advance(self, limit_s: float) -> None:
        """Queue pieces of the tiles that were begun, one at least, that take the device about so long. A tile that
        fails is encoded by the step that takes its rows: if that fails too, it is no other sequence's fault."""
        left = limit_s * self._operations_s
        while self._begun:
            key, encoding = next(iter(self._begun.items()))
            try:
                left -= next(encoding)
            except StopIteration as end:
                del self._begun[key]
                self._keep(key, end.value)
            except Exception:
                _log.exception("a tile could not be encoded beside other sequences")
                del self._begun[key]
                self._failed.add(key)
            if left <= 0:
                return

    def take(self, wanted: Sequence[TileRows]) -> Tensor:
        """The rows of several tiles in order, [rows, width], after encoding those that are missing. Columns that other
        ranks keep are zeros, so that the sum over all ranks has the rows."""
        for key in {rows.key for rows in wanted} & self._begun.keys():
            self._keep(key, finish(self._begun.pop(key)))
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
        """Bytes of a GPU that the cache and an encoding need besides the weights. Encodes tiles to learn that, and how
        fast the tower is."""
        width, height = self._largest
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self.tower.encode([torch.zeros(height, width, 3, dtype=torch.uint8, device=self._device)])
        n_bytes = self._capacity // self._group.size + torch.cuda.max_memory_allocated(self._device) - before
        if self._typical is not None:
            self._operations_s = self._timed(self._typical)
        return n_bytes

    def _timed(self, size: Size) -> float:
        """Floating-point operations per second of the tower, for a tile of this size."""
        width, height = size
        tile = torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, device=self._device)
        self.tower.encode([tile])  # compiles kernels
        torch.cuda.synchronize(self._device)
        began_s = time.perf_counter()
        self.tower.encode([tile])
        torch.cuda.synchronize(self._device)
        return self.tower.operations(size) / (time.perf_counter() - began_s)

    @torch.inference_mode()
    def _encode(self, missing: list[TileRows]) -> None:
        tiles = [_pixels(rows, self._device) for rows in missing]
        with _torch_threads(self._threads):
            made = self.tower.encode(tiles)
        counts = [self._n_rows(rows.image.tiles[rows.tile]) for rows in missing]
        for rows, part in zip(missing, torch.split(made, counts), strict=True):
            self._keep(rows.key, part)
            self._failed.discard(rows.key)

    def _pieces(self, rows: TileRows) -> Encoding:
        return (yield from self.tower.pieces(_pixels(rows, self._device)))

    def _keep(self, key: TileKey, rows: Tensor) -> None:
        self._rows[key] = rows[:, self._columns].clone()  # not a view: it would keep the others of the batch
        self._used += rows.nbytes
        self.n_encoded += 1

    def _evict(self, in_use: Collection[TileKey]) -> None:
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


def _pixels(rows: TileRows, device: str) -> Tensor:
    """The pixels of a tile, uint8 [height, width, 3], on the device. The host does not wait for their copy. A follower
    of a rank group has none, and knows their number."""
    image = rows.image
    width, height = image.tiles[rows.tile]
    if not image.pixels:
        return torch.empty(height, width, 3, dtype=torch.uint8, device="meta")
    first = n_pixel_bytes(image.tiles[: rows.tile])
    pixels = torch.empty(height, width, 3, dtype=torch.uint8, pin_memory=device.startswith("cuda"))
    pixels.numpy().reshape(-1)[:] = np.frombuffer(image.pixels, np.uint8, pixels.numel(), first)
    return pixels.to(device, non_blocking=True)
