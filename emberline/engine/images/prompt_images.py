"""Images in the scheduler: which requests are accepted, and where chunks of their prompts end."""

from dataclasses import dataclass, field
from typing import Protocol

from emberline.engine.core.feature import Feature
from emberline.engine.core.plan import StepPlan
from emberline.engine.core.sequence import Flag, Sequence
from emberline.engine.images.places import ImagePlaces, TileRows
from emberline.protocol.block_hash import BLOCK_TOKENS
from emberline.protocol.errors import BadInput, Unsupported
from emberline.protocol.frames import EngineLoad
from emberline.protocol.images import ImageProcessor, n_pixel_bytes
from emberline.protocol.request import EngineRequest

# Pixels that a step beside decoding sequences encodes, but for a tile that is larger by itself.
CPU_STEP_PIXELS, GPU_STEP_PIXELS = 512 * 512, 1024 * 1024
ALONE = 16  # times as many in a step that delays no other sequence
TileKey = tuple[bytes, int]


class EncodedRows(Protocol):
    """The cache of encoded rows on rank 0, as the scheduler sees it: `RowCache`."""

    def has(self, key: TileKey) -> bool:
        """True if the rows of a tile need not be made."""
        ...

    def begin(self, rows: TileRows) -> bool:
        """Let the next steps encode a tile, piece by piece. Returns False if the step that takes its rows is to encode
        it as a whole."""
        ...


@dataclass(slots=True)
class _StepBudget:
    """Images that a step encodes."""

    number: int  # of the step
    left: int  # pixels
    has_others: bool  # sequences wait for the step's end
    keys: set[TileKey] = field(default_factory=set)  # tiles that it encodes


@dataclass(slots=True)
class _Prompt:
    places: ImagePlaces
    counted: set[TileKey] = field(default_factory=set)  # tiles that the totals have


class PromptImages(Feature):
    """Ends chunks of prompts before tiles that the step cannot encode any more. Where a model's image tokens see their
    whole image, no chunk ends inside one.

    Runners take the rows of a chunk from the `RowCache`, which encodes what it lacks while the step is launched.
    """

    def __init__(
        self,
        processor: ImageProcessor | None = None,
        rows: EncodedRows | None = None,
        step_pixels: int = CPU_STEP_PIXELS,
        whole_images: bool = False,
    ) -> None:
        """rows: of rank 0; None: requests with images are refused."""
        self._processor, self._rows = processor, rows
        self._step_pixels, self._whole_images = step_pixels, whole_images
        self._checked: tuple[str, ImagePlaces] | None = None  # of the newest request
        self._prompts: dict[int, _Prompt] = {}  # by the number of the sequence
        self._budget = _StepBudget(-1, 0, False)
        self._n_encoded = self._n_reused = 0  # tiles of prompts

    def check(self, request: EngineRequest) -> None:
        """Refuse images that the model does not take, or that do not fit the prompt."""
        if not request.images:
            return
        if self._processor is None or self._rows is None:
            raise Unsupported("this engine takes no images", param="images")
        for number, image in enumerate(request.images, 1):
            if (n_bytes := len(image.pixels)) != n_pixel_bytes(image.tiles):
                raise BadInput(f"image {number} has {n_bytes} bytes of pixels, which is wrong", param="images")
        self._checked = request.id, ImagePlaces(request, self._processor)

    def enter(self, seq: Sequence, now_s: float) -> None:
        """Remember where the images of a sequence stand."""
        if seq.request.images and self._checked is not None and self._checked[0] == seq.id:
            self._prompts[seq.number] = _Prompt(self._checked[1])
            seq.set_flag(Flag.IMAGES, True)
        self._checked = None

    def admitted(self, seq: Sequence, n_hit: int) -> None:
        """Count the tiles whose KV was cached: nothing is encoded for them."""
        if (prompt := self._prompts.get(seq.number)) is None:
            return
        for rows in prompt.places.between(0, n_hit * BLOCK_TOKENS)[1]:
            self._count(prompt, rows, reused=True)

    def chunk(self, plan: StepPlan, seq: Sequence, n: int) -> int:
        """Bound a chunk by what the step may still encode. A chunk that would end inside an image that is seen as a
        whole ends before it, or after it if it begins there."""
        prompt = self._prompts[seq.number]
        start = seq.n_computed
        end = start + n
        if self._whole_images:
            for first, stop in prompt.places.spans:
                if first < end < stop:
                    end = first if start < first else stop
            if end - start > max(n, self.core.limits.token_budget - plan.n_tokens):
                return 0
        end = self._encodable(plan, prompt, start, end)
        for rows in prompt.places.between(start, end)[1]:
            self._count(prompt, rows, reused=rows.key not in self._budget.keys)
        return end - start

    def leave(self, seq: Sequence) -> None:
        """Forget a sequence that has ended."""
        self._prompts.pop(seq.number, None)

    def report(self, load: EngineLoad) -> None:
        """Report how many tiles of prompts were encoded, and how many did not have to be."""
        load.image_tiles_encoded, load.image_tiles_reused = self._n_encoded, self._n_reused

    def _encodable(self, plan: StepPlan, prompt: _Prompt, start: int, end: int) -> int:
        """The position up to which the step can compute: before the first tile for which its budget has no room."""
        assert self._rows is not None
        if self._budget.number != plan.number:
            pixels = self._step_pixels * (1 if plan.n_rows else ALONE)
            self._budget = _StepBudget(plan.number, pixels, plan.n_rows > 0)
        budget = self._budget
        for rows in prompt.places.between(start, end)[1]:
            if rows.key in budget.keys or self._rows.has(rows.key):
                continue
            if budget.has_others and self._rows.begin(rows):
                self._count(prompt, rows, reused=False)
                return max(start, rows.position)
            if plan.n_rows and budget.keys and rows.n_pixels > budget.left:
                return max(start, rows.position)
            budget.keys.add(rows.key)
            budget.left -= rows.n_pixels
        return end

    def _count(self, prompt: _Prompt, rows: TileRows, reused: bool) -> None:
        if rows.key not in prompt.counted:
            prompt.counted.add(rows.key)
            self._n_reused += reused
            self._n_encoded += not reused
