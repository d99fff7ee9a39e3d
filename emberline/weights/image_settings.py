"""Image settings of a model: its processor's, from config.json, preprocessor_config.json and their defaults.

Processors are known by the model's type. Files that a published model lacks, and keys that they leave out, have the
values of the family's own processor.
"""

from collections.abc import Callable
from pathlib import Path

from emberline.protocol.images import ImageProcessor
from emberline.weights.mmproj import mmproj_processor
from emberline.weights.model_config import BadCheckpoint, Fields
from emberline.weights.task_config import read_json

_HALF = (0.5, 0.5, 0.5)
_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_LANCZOS, _BILINEAR, _BICUBIC = 1, 2, 3  # Pillow's numbers
_MAX_PIXELS = 1 << 28
_MAX_EDGE = 1 << 14


class ProcessorFiles:
    """The files of a folder that say how images are prepared, as documents."""

    def __init__(
        self, config: dict[str, object], processor: dict[str, object], preprocessor: dict[str, object]
    ) -> None:
        self.config = Fields(config, "config.json")
        self.vision = _inner(self.config, "vision_config")
        values = preprocessor or _object(processor.get("image_processor"))
        self.images = Fields(_object(values.get("media_proc_cfg")) or values, "preprocessor_config.json")
        self.processor = Fields(processor, "processor_config.json")

    def triple(self, key: str, default: tuple[float, float, float]) -> tuple[float, float, float]:
        """A number for each of red, green and blue."""
        values = self.images.get(key, list(default))
        if not isinstance(values, list) or len(values) != 3:
            raise self.images.wrong(key, "three numbers")
        red, green, blue = (Fields({key: value}, self.images.where).positive(key) for value in values)
        return red, green, blue

    def size(self, name: str, key: str, default: int, most: int = _MAX_EDGE) -> int:
        """A number of pixels in one of the processor's sizes."""
        return _inner(self.images, name).whole(key, default, most=most)

    def token(self, *keys: str) -> int:
        """Id of the image token, under the first of several keys that the configuration has."""
        key = next((key for key in keys if self.config.has(key)), keys[0])
        return self.config.whole(key, least=0)

    @property
    def resample(self) -> int:
        """Number of the processor's filter; 0 if its files do not say."""
        return self.images.whole("resample", 0, least=0, most=5)


def read_image_processor(folder: Path) -> ImageProcessor | None:
    """Read the image processor of a folder or a GGUF file. Returns None if the model takes no images."""
    if folder.is_file():
        return mmproj_processor(folder)
    if not folder.is_dir() or not (folder / "config.json").is_file():
        return None
    return image_processor(
        read_json(folder, "config.json"),
        read_json(folder, "processor_config.json", optional=True),
        read_json(folder, "preprocessor_config.json", optional=True),
    )


def image_processor(
    config: dict[str, object], processor: dict[str, object] | None = None, preprocessor: dict[str, object] | None = None
) -> ImageProcessor | None:
    """The image processor that a model's documents describe. Returns None if the model takes no images."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in READERS or not isinstance(config.get("vision_config"), dict):
        return None
    return READERS[kind](ProcessorFiles(config, processor or {}, preprocessor or {}))


def _idefics3(files: ProcessorFiles) -> ImageProcessor:
    tile = files.size("max_image_size", "longest_edge", 364)
    patch = files.vision.whole("patch_size", 14 if tile % 16 else 16, most=tile)
    merge = files.config.whole("scale_factor", 2, most=tile)
    if tile % (patch * merge):
        raise BadCheckpoint(f"preprocessor_config.json: tiles of {tile} pixels are no squares of {patch * merge}")
    return ImageProcessor(
        family="idefics3",
        placeholder="<image>",
        image_token="<image>",
        image_token_id=files.token("image_token_id"),
        patch=patch,
        merge=merge,
        resample=files.resample or _LANCZOS,
        mean=files.triple("image_mean", _HALF),
        std=files.triple("image_std", _HALF),
        tile=tile,
        longest_edge=files.size("size", "longest_edge", 4 * tile),
        splits=files.images.flag("do_image_splitting", True),
    )


def _kimi_k25(files: ProcessorFiles) -> ImageProcessor:
    return ImageProcessor(
        family="kimi_k25",
        placeholder="<|media_pad|>",
        image_token="<|media_pad|>",
        image_token_id=files.token("media_placeholder_token_id", "image_token_id"),
        patch=files.vision.whole("patch_size", 14, most=256),
        merge=_merge(files.vision),
        resample=files.resample or _BICUBIC,
        mean=files.triple("image_mean", _HALF),
        std=files.triple("image_std", _HALF),
        max_patches=files.images.whole("in_patch_limit", files.images.get("max_patches", 16_384), most=1 << 20),
        max_side=files.images.whole("patch_limit_on_one_side", 512, most=_MAX_EDGE),
    )


def _gemma3(files: ProcessorFiles) -> ImageProcessor:
    side, patch = files.vision.whole("image_size", 896, most=_MAX_EDGE), files.vision.whole("patch_size", 14, most=256)
    per_side = round(files.config.whole("mm_tokens_per_image", 256, most=1 << 16) ** 0.5)
    if side % patch or side // patch % per_side:
        raise BadCheckpoint(f"config.json: {side // patch} patches a side are no {per_side} squares")
    return ImageProcessor(
        family="siglip",
        placeholder="<start_of_image>",
        image_token="<image_soft_token>",
        image_token_id=files.token("image_token_id", "image_token_index"),
        patch=patch,
        merge=side // patch // per_side,
        resample=files.resample or _BILINEAR,
        mean=files.triple("image_mean", _HALF),
        std=files.triple("image_std", _HALF),
        tile=side,
    )


def _mistral3(files: ProcessorFiles) -> ImageProcessor:
    edge = files.vision.whole("image_size", 1540, most=_MAX_EDGE)
    return ImageProcessor(
        family="pixtral",
        placeholder="[IMG]",
        image_token="[IMG]",
        image_token_id=files.token("image_token_id", "image_token_index"),
        patch=files.vision.whole("patch_size", 14, most=256),
        merge=files.config.whole("spatial_merge_size", 2, most=16),
        resample=files.resample or _BICUBIC,
        mean=files.triple("image_mean", _CLIP_MEAN),
        std=files.triple("image_std", _CLIP_STD),
        longest_edge=files.size("size", "longest_edge", edge),
    )


def _qwen3_vl(files: ProcessorFiles) -> ImageProcessor:
    least = files.images.get("min_pixels", 65_536)
    most = files.images.get("max_pixels", 16_777_216)
    return ImageProcessor(
        family="qwen3_vl",
        placeholder="<|image_pad|>",
        image_token="<|image_pad|>",
        image_token_id=files.token("image_token_id"),
        patch=files.vision.whole("patch_size", 16, most=256),
        merge=files.vision.whole("spatial_merge_size", 2, most=16),
        resample=files.resample or _BICUBIC,
        mean=files.triple("image_mean", _HALF),
        std=files.triple("image_std", _HALF),
        min_pixels=_inner(files.images, "size").whole("shortest_edge", least, most=_MAX_PIXELS),
        max_pixels=_inner(files.images, "size").whole("longest_edge", most, most=_MAX_PIXELS),
    )


READERS: dict[str, Callable[[ProcessorFiles], ImageProcessor]] = {
    "idefics3": _idefics3,
    "smolvlm": _idefics3,
    "kimi_k25": _kimi_k25,
    "gemma3": _gemma3,
    "mistral3": _mistral3,
    "qwen3_vl": _qwen3_vl,
}


def _object(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}


def _inner(fields: Fields, key: str) -> Fields:
    return Fields(_object(fields.get(key, {})), f"{fields.where}: {key}")


def _merge(vision: Fields) -> int:
    """Patches along a side of a row's square."""
    sides = vision.get("merge_kernel_size", [2, 2])
    if not isinstance(sides, list | int) or (isinstance(sides, list) and len(set(map(str, sides))) != 1):
        raise vision.wrong("merge_kernel_size", "the same number for height and width")
    side = sides[0] if isinstance(sides, list) else sides
    return Fields({"merge_kernel_size": side}, vision.where).whole("merge_kernel_size", most=16)
