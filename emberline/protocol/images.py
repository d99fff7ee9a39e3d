"""Images of a prompt: how a model wants them prepared, where their rows stand, and what an engine gets of each.

A vision tower turns an image into rows, which take the place of the embeddings of placeholder tokens. A model's own
processor says how many: `ImageProcessor.plan` follows its arithmetic from width and height alone. Pixels are resized
beside the decoder (`text.image_pixels`), and normalized and cut into patches by the engine.
"""

import math
from collections.abc import Sequence
from hashlib import blake2b
from typing import Literal, NamedTuple

import msgspec

from emberline.protocol.errors import BadInput, EmberlineError
from emberline.protocol.token_ids import unpack

MAX_PIXEL_BYTES = 192 << 20  # of the images of one request, resized
LOW_DETAIL_EDGE = 512  # pixels of the longer edge, with the detail "low"
DIGEST_BYTES = 16

Size = tuple[int, int]  # width, height in pixels
Family = Literal["idefics3", "kimi_k25", "siglip", "pixtral", "qwen3_vl"]


class ImageLink(NamedTuple):
    """An image of a request, which the request names by a URL or as a file of its account."""

    number: int  # among all images of the request, from 1
    field: str  # names the image
    url: str

    def named(self, error: EmberlineError) -> EmberlineError:
        """Add the image to the error's message, and make its field the error's."""
        error.message = f"image {self.number} of the request (`{self.field}`) cannot be used: {error.message}"
        error.param = self.field
        return error


class Tile(msgspec.Struct, frozen=True, array_like=True):
    """A rectangle of an image, after some of the plan's resizes. What lies beyond the image is black."""

    n_resizes: int
    box: tuple[int, int, int, int]  # left, top, right, bottom

    @property
    def size(self) -> Size:
        """Width and height in pixels."""
        left, top, right, bottom = self.box
        return right - left, bottom - top


class ImagePlan(msgspec.Struct, frozen=True, array_like=True):
    """Preprocessing of one image: a pure function of its size and of the model's processor."""

    resizes: tuple[Size, ...]  # each from the result of the one before
    resample: int  # Pillow's number of the filter
    tiles: tuple[Tile, ...]  # each goes through the tower by itself
    text: str  # replaces the placeholder in the rendered conversation
    n_rows: int  # placeholder tokens in the text: rows that the tower makes

    @property
    def tile_sizes(self) -> tuple[Size, ...]:
        """Width and height of each tile."""
        return tuple(tile.size for tile in self.tiles)

    @property
    def n_bytes(self) -> int:
        """Bytes of the tiles, three for each pixel."""
        return n_pixel_bytes(self.tile_sizes)


class ImageProcessor(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Settings of a model's image processor. Which of them count depends on the family."""

    family: Family
    placeholder: str  # stands for one image in a rendered conversation
    image_token: str  # its embeddings are replaced
    image_token_id: int
    patch: int  # side of a patch, in pixels
    merge: int  # side of a row's square, in patches
    resample: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    tile: int = 0  # side of a tile, in pixels: idefics3, siglip
    longest_edge: int = 0  # in pixels: idefics3, pixtral
    splits: bool = True  # idefics3: into tiles; otherwise an image is one tile
    max_patches: int = 0  # of an image: kimi_k25
    max_side: int = 0  # in patches: kimi_k25
    min_pixels: int = 0  # of an image: qwen3_vl
    max_pixels: int = 0  # of an image: qwen3_vl

    @property
    def cell(self) -> int:
        """Side of the square of which the tower makes one row, in pixels."""
        return self.patch * self.merge

    @property
    def largest_tile(self) -> Size:
        """Size of a square tile with as many patches as a tile may have."""
        side = self.tile or self.longest_edge or int(math.sqrt(self.max_patches * self.patch**2 or self.max_pixels))
        side = max(1, side // self.cell) * self.cell
        return side, side

    def plan(self, width: int, height: int, detail: str = "auto") -> ImagePlan:
        """Plan an image. Raises BadInput if the model takes none of this size."""
        if width < 1 or height < 1:
            raise BadInput("an image needs at least one pixel", param="images")
        return _PLANS[self.family](self, width, height, detail == "low")

    def n_rows(self, tile: Size) -> int:
        """Number of rows that the tower makes of a tile."""
        return (tile[0] // self.cell) * (tile[1] // self.cell)


class PromptImage(msgspec.Struct, frozen=True, array_like=True):
    """An image of an `EngineRequest`. Its rows replace the image tokens of the prompt from `start` to `end`."""

    digest: bytes  # see `image_digest`
    start: int  # position of its first image token
    end: int  # position after its last image token; other tokens may stand between them
    tiles: tuple[Size, ...]
    pixels: bytes = b""  # uint8 RGB of the tiles, end to end, each [height, width, 3]


def n_pixel_bytes(tiles: Sequence[Size]) -> int:
    """Bytes of tiles, three for each pixel."""
    return sum(3 * width * height for width, height in tiles)


def image_digest(file_digest: bytes, plan: ImagePlan, salt: bytes) -> bytes:
    """Name what the tower makes of an image: by the digest of its file, how it is resized, and the account."""
    digest = blake2b(file_digest, key=b"emberline.image", digest_size=DIGEST_BYTES)
    digest.update(msgspec.msgpack.encode((salt, plan.resizes, plan.resample, plan.tiles)))
    return digest.digest()


def expand(text: str, processor: ImageProcessor, plans: Sequence[ImagePlan]) -> str:
    """Replace the placeholders of a rendered conversation, in order. Raises BadInput if there are not as many."""
    first, *rest = text.split(processor.placeholder)
    if len(rest) != len(plans):
        message = f"the model's chat template has rendered {len(rest)} of the conversation's {len(plans)} images"
        raise BadInput(message, param="messages")
    return first + "".join(plan.text + piece for plan, piece in zip(plans, rest))


def locate(prompt_ids: bytes, processor: ImageProcessor, plans: Sequence[ImagePlan]) -> list[tuple[int, int]]:
    """Find the tokens of each image in a tokenized prompt: the position of the first, and the one after the last."""
    found = [at for at, token_id in enumerate(unpack(prompt_ids)) if token_id == processor.image_token_id]
    n_expected = sum(plan.n_rows for plan in plans)
    if len(found) != n_expected:
        message = f"the prompt has {len(found)} image tokens, and its {len(plans)} images make {n_expected}"
        raise BadInput(message, param="messages")
    spans, first = [], 0
    for plan in plans:
        spans.append((found[first], found[first + plan.n_rows - 1] + 1))
        first += plan.n_rows
    return spans


# --- the processors' arithmetic ---------------------------------------------------------------------------------------


_MAX_IDEFICS_EDGE = 4096


def _whole(processor: ImageProcessor, size: Size, text: str, padded: Size | None = None) -> ImagePlan:
    """One tile: the whole image in one size, padded on the right and below."""
    tile = Tile(1, (0, 0, *(padded or size)))
    return ImagePlan((size,), processor.resample, (tile,), text, processor.n_rows(tile.size))


def _capped(width: int, height: int, edge: int) -> Size:
    """The size with its longer edge reduced to `edge`."""
    ratio = min(1.0, edge / max(width, height))
    return max(1, int(width * ratio)), max(1, int(height * ratio))


def _up(pixels: float, unit: int) -> int:
    return math.ceil(pixels / unit) * unit


def _idefics3(processor: ImageProcessor, width: int, height: int, low: bool) -> ImagePlan:
    """Tiles of the image in a multiple of their size, row by row, and the image as one tile after them."""
    side, edge, ratio = processor.tile, min(processor.longest_edge, _MAX_IDEFICS_EDGE), width / height
    if width >= height:
        width, height = edge, int(edge / ratio)
        height += height % 2
    else:
        width, height = int(edge * ratio), edge
        width += width % 2
    width, height = max(width, 1), max(height, 1)
    n_rows = (side // processor.cell) ** 2
    tokens, around = processor.image_token * n_rows, "<fake_token_around_image>"
    single = f"{around}<global-img>{tokens}{around}"
    if not processor.splits or low:
        tile = Tile(2, (0, 0, side, side))
        return ImagePlan(((width, height), (side, side)), processor.resample, (tile,), single, n_rows)
    ratio = width / height
    if width >= height:
        across = _up(width, side)
        down = _up(int(across / ratio), side)
    else:
        down = _up(height, side)
        across = _up(int(down * ratio), side)
    columns, rows = across // side, down // side
    if columns == rows == 1:
        tile = Tile(2, (0, 0, side, side))
        return ImagePlan(((width, height), (side, side)), processor.resample, (tile,), single, n_rows)
    corners = [(side * column, side * row) for row in range(rows) for column in range(columns)]
    tiles = [Tile(2, (left, top, left + side, top + side)) for left, top in corners]
    lines = (
        "".join(f"{around}<row_{row}_col_{column}>{tokens}" for column in range(1, columns + 1)) + "\n"
        for row in range(1, rows + 1)
    )
    return ImagePlan(
        ((width, height), (across, down), (side, side)),
        processor.resample,
        (*tiles, Tile(3, (0, 0, side, side))),
        "".join(lines) + "\n" + single,
        n_rows * (len(tiles) + 1),
    )


def _kimi_k25(processor: ImageProcessor, width: int, height: int, low: bool) -> ImagePlan:
    """The image reduced to so many patches, and padded to whole squares."""
    patch, most, side = processor.patch, processor.max_patches, processor.max_side
    if low:
        side = min(side, LOW_DETAIL_EDGE // patch)
    n_patches = max(1.0, width // patch) * max(1.0, height // patch)
    scale = min(1.0, math.sqrt(most / n_patches), side * patch / width, side * patch / height)
    width, height = (min(max(1, int(pixels * scale)), side * patch) for pixels in (width, height))
    padded = _up(width, processor.cell), _up(height, processor.cell)
    return _whole(processor, (width, height), processor.image_token * processor.n_rows(padded), padded)


def _siglip(processor: ImageProcessor, width: int, height: int, low: bool) -> ImagePlan:
    """The image stretched to one tile."""
    size = processor.tile, processor.tile
    tokens = processor.image_token * processor.n_rows(size)
    return _whole(processor, size, f"\n\n<start_of_image>{tokens}<end_of_image>\n\n")


def _pixtral(processor: ImageProcessor, width: int, height: int, low: bool) -> ImagePlan:
    """The image reduced to a longest edge, in whole squares; a token ends each row of squares."""
    edge = min(processor.longest_edge, LOW_DETAIL_EDGE) if low else processor.longest_edge
    ratio = max(width / edge, height / edge)
    if ratio > 1:
        width, height = int(width / ratio), int(height / ratio)
    width, height = _up(max(1, width), processor.cell), _up(max(1, height), processor.cell)
    row = processor.image_token * (width // processor.cell)
    text = "[IMG_BREAK]".join([row] * (height // processor.cell)) + "[IMG_END]"
    return _whole(processor, (width, height), text)


def _qwen3_vl(processor: ImageProcessor, width: int, height: int, low: bool) -> ImagePlan:
    """The image in whole squares, as near its aspect ratio as a number of pixels between two bounds allows."""
    if max(width, height) > 200 * min(width, height):
        raise BadInput(f"the model takes no image of {width} x {height} pixels: one side is 200 times the other")
    if low:
        width, height = _capped(width, height, LOW_DETAIL_EDGE)
    cell, least, most = processor.cell, processor.min_pixels, processor.max_pixels
    across, down = round(width / cell) * cell, round(height / cell) * cell
    if across * down > most:
        beta = math.sqrt(width * height / most)
        across, down = (max(cell, int(pixels / beta / cell) * cell) for pixels in (width, height))
    elif across * down < least:
        beta = math.sqrt(least / (width * height))
        across, down = (_up(pixels * beta, cell) for pixels in (width, height))
    size = across, down
    return _whole(processor, size, processor.image_token * processor.n_rows(size))


_PLANS = {
    "idefics3": _idefics3,
    "kimi_k25": _kimi_k25,
    "siglip": _siglip,
    "pixtral": _pixtral,
    "qwen3_vl": _qwen3_vl,
}
