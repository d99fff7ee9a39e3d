"""The request to a process that decodes images, and its answer.

Both sides import this module; only the confined process imports Pillow.
"""

import msgspec

from emberline.protocol.images import ImagePlan, ImageProcessor


class DecodeJob(msgspec.Struct, frozen=True, array_like=True):
    """An image file, and how the model wants it."""

    processor: ImageProcessor
    detail: str
    max_pixels: int  # of the file
    data: bytes


class DecodedImage(msgspec.Struct, frozen=True, array_like=True):
    """The result of a job. If `error` is set, it says what is wrong with the file, and the rest is empty."""

    error: str = ""
    n_pixels: int = 0  # of the file
    plan: ImagePlan | None = None
    pixels: bytes = b""  # uint8 RGB of the plan's tiles
