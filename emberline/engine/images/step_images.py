"""Images of a step: from the rows of a plan to the model's inputs."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from emberline.engine.images.places import ImagePlaces, TileRows
from emberline.engine.images.row_cache import RowSource
from emberline.models.decoder import ImageInputs, StepInputs
from emberline.protocol.images import ImageProcessor
from emberline.protocol.request import EngineRequest

ENCODING_SHARE = 0.4  # of the time of a step that decodes: so much longer it takes while images are encoded beside it
FIRST_PIECES_S = 0.002  # of encoding beside a step, before the time of any is known
_GAIN = 0.2  # of a new measurement


class SlotImages(NamedTuple):
    """The images of the sequence in a slot."""

    places: ImagePlaces
    n_prompt: int
    rope: NDArray[np.int32] | None  # [3, prompt tokens], positions under M-RoPE; None: the model has no M-RoPE
    rope_delta: int  # what is added to the positions of tokens after the prompt, for M-RoPE

    def concern(self, start: int) -> bool:
        """True if tokens from this position on may depend on them otherwise than by the cache."""
        return start < self.n_prompt or self.rope is not None


class ImageRow(NamedTuple):
    """A row of a step whose sequence has images."""

    start: int  # position of its first token
    end: int  # after its last token
    first: int  # index of its first token in the step
    images: SlotImages


class ImageRows:
    """Makes the image inputs of a step for a runner."""

    def __init__(
        self, cache: RowSource, processor: ImageProcessor, whole_images: bool = False, mrope: bool = False
    ) -> None:
        """whole_images: image tokens see all tokens of their image. mrope: tokens have three positions."""
        self.cache, self._processor = cache, processor
        self._whole_images, self.mrope = whole_images, mrope
        self._decode_s = FIRST_PIECES_S / ENCODING_SHARE

    def of(self, request: EngineRequest) -> SlotImages | None:
        """The images of a request. Returns None if it has none."""
        if not request.images:
            return None
        places = ImagePlaces(request, self._processor)
        n_prompt = len(request.prompt_ids) >> 2
        if not self.mrope:
            return SlotImages(places, n_prompt, None, 0)
        rope = places.rope_positions(self._processor.cell)
        return SlotImages(places, n_prompt, rope, int(rope.max()) + 1 - n_prompt)

    def advance(self) -> None:
        """Before a step: queue the next pieces of tiles that were begun."""
        self.cache.advance(ENCODING_SHARE * self._decode_s)

    def observe(self, seconds: float) -> None:
        """Learn how long a step takes that only decodes."""
        self._decode_s += _GAIN * (min(seconds, 2 * self._decode_s) - self._decode_s)

    def complete(self, inputs: StepInputs, found: Sequence[ImageRow]) -> None:
        """Give the images of some rows to the inputs of their step. Encodes tiles whose rows are not cached. Under
        M-RoPE the inputs have the positions of all other rows, or none if these are the tokens' own."""
        device, tokens, wanted = inputs.token_ids.device, list[NDArray[np.int64]](), list[TileRows]()
        for row in found:
            at, rows = row.images.places.between(row.start, row.end)
            tokens.append(at - row.start + row.first)
            wanted += rows
        if wanted:
            seen = _last_visible(found, inputs.positions) if self._whole_images else None
            places = to_device(np.concatenate(tokens), device)
            inputs.images = ImageInputs(places, self.cache.take(wanted), seen)
        if self.mrope:
            known = inputs.positions if inputs.rope_positions is None else inputs.rope_positions
            inputs.rope_positions = _rope_positions(found, known)
        for row in found:
            if row.end >= row.images.n_prompt:  # a sequence that is preempted is admitted anew
                row.images.places.forget_pixels()


def _last_visible(found: Sequence[ImageRow], positions: Tensor) -> Tensor:
    """The position up to which each token of a step sees: of image tokens, the last one of the image."""
    seen = positions.clone()
    for row in found:
        shift = row.first - row.start
        for begin, end in row.images.places.spans:
            if begin < row.end and row.start < end:
                seen[max(begin, row.start) + shift : min(end, row.end) + shift] = end - 1
    return seen


def _rope_positions(found: Sequence[ImageRow], positions: Tensor) -> Tensor:
    """Positions of time, height and width of each token of a step, int32 [3, tokens]. positions: of other rows."""
    rope = positions.expand(3, -1).clone()
    for row in found:
        assert row.images.rope is not None
        own = row.images.rope[:, row.start : row.end]
        n_more = row.end - row.start - own.shape[1]  # tokens of the reply
        if n_more:
            first = row.end - n_more + row.images.rope_delta
            reply = np.arange(first, first + n_more, dtype=np.int32)
            own = np.concatenate([own, np.repeat(reply[None], 3, axis=0)], axis=1)
        rope[:, row.first : row.first + own.shape[1]] = to_device(own, rope.device)
    return rope


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array to a device. The host does not wait for a GPU's copy."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
