"""Positions of the rows of a request's images in its prompt."""

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from emberline.protocol.errors import BadInput
from emberline.protocol.images import ImageProcessor, PromptImage
from emberline.protocol.request import EngineRequest


class TileRows(NamedTuple):
    """A tile of an image, and which of the rows that the tower makes of it are meant."""

    image: PromptImage
    tile: int  # number within the image
    first: int  # row of the tile
    end: int  # after the last row
    position: int  # of the tile's first row in the prompt

    @property
    def key(self) -> tuple[bytes, int]:
        """Name of the tile's rows in a cache."""
        return self.image.digest, self.tile

    @property
    def n_pixels(self) -> int:
        """Pixels of the whole tile."""
        width, height = self.image.tiles[self.tile]
        return width * height


class ImagePlaces:
    """The prompt's image tokens: their positions, and the tiles of which each is a row."""

    def __init__(self, request: EngineRequest, processor: ImageProcessor) -> None:
        """Raises BadInput if the prompt's image tokens and the tiles do not belong together."""
        ids = np.frombuffer(request.prompt_ids, "<u4")
        found, last = list[NDArray[np.int64]](), 0
        self._images: tuple[PromptImage, ...] = request.images
        self._n_prompt = len(ids)
        self._tiles: list[tuple[PromptImage, int]] = []
        counts: list[int] = []
        self.spans: list[tuple[int, int]] = []  # positions of each image: the first, and the one after the last
        for number, image in enumerate(request.images, 1):
            if not last <= image.start < image.end < len(ids):
                raise BadInput(f"image {number} is not where a prompt can have it", param="images")
            places = np.flatnonzero(ids[image.start : image.end] == processor.image_token_id) + image.start
            n_rows = [processor.n_rows(tile) for tile in image.tiles]
            if len(places) != sum(n_rows) or not all(n_rows):
                message = f"image {number} makes {sum(n_rows)} rows, and the prompt has {len(places)} tokens for them"
                raise BadInput(message, param="images")
            found.append(places)
            self._tiles += [(image, tile) for tile in range(len(n_rows))]
            counts += n_rows
            self.spans.append((image.start, image.end))
            last = image.end
        self.positions: NDArray[np.int64] = np.concatenate(found)
        self._ends = np.fromiter(accumulate(counts), np.int64)  # of each tile's rows, among all rows of the prompt

    def between(self, start: int, end: int) -> tuple[NDArray[np.int64], list[TileRows]]:
        """The image tokens at positions start .. end - 1, and the rows that replace them, tile by tile."""
        first, stop = np.searchsorted(self.positions, (start, end)).tolist()
        return self.positions[first:stop], list(self._tile_rows(first, stop))

    def forget_pixels(self) -> None:
        """Let go of the images, of which nothing is encoded any more: the prompt was computed."""
        self._images, self._tiles = (), []

    def rope_positions(self, cell: int) -> NDArray[np.int32]:
        """Positions of time, height and width of the prompt's tokens, [3, tokens], for M-RoPE. An image counts as many
        positions as it has rows or columns of squares, whose side is `cell` pixels."""
        parts, last, position = list[NDArray[np.int32]](), 0, 0
        for image in self._images:
            position = _append_text(parts, position, image.start - last)
            width, height = (side // cell for side in image.tiles[0])
            grid = np.indices((height, width), np.int32).reshape(2, -1)
            parts.append(np.concatenate([np.zeros((1, height * width), np.int32), grid]) + np.int32(position))
            position += max(width, height)
            last = image.end
        _append_text(parts, position, self._n_prompt - last)
        return np.concatenate(parts, axis=1)

    def _tile_rows(self, first: int, stop: int) -> Iterator[TileRows]:
        tile = int(np.searchsorted(self._ends, first, side="right"))
        while first < stop:
            begin, end = int(self._ends[tile - 1]) if tile else 0, int(self._ends[tile])
            yield TileRows(*self._tiles[tile], first - begin, min(stop, end) - begin, int(self.positions[begin]))
            first, tile = end, tile + 1


def _append_text(parts: list[NDArray[np.int32]], position: int, n: int) -> int:
    """Append the positions of n tokens of text, which are the same on all axes. Returns the next position."""
    parts.append(np.repeat(np.arange(position, position + n, dtype=np.int32)[None], 3, axis=0))
    return position + n
