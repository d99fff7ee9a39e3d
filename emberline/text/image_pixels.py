"""Resizing of decoded images to the tiles that a model's vision tower reads, with Pillow."""

from typing import TYPE_CHECKING

from emberline.protocol.images import ImagePlan

if TYPE_CHECKING:
    from PIL.Image import Image


def image_pixels(image: "Image", plan: ImagePlan) -> bytes:
    """Pixels of a plan's tiles, end to end: uint8 RGB, each [height, width, 3]."""
    from PIL.Image import Resampling

    resized = [image.convert("RGB")]
    for size in plan.resizes:
        resized.append(resized[-1].resize(size, Resampling(plan.resample)))
    return b"".join(resized[tile.n_resizes].crop(tile.box).tobytes() for tile in plan.tiles)
