"""The `mmproj` file beside a GGUF model: its vision tower and projector, as llama.cpp's converter writes them."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from emberline.protocol.images import Family, ImageProcessor
from emberline.weights.gguf import GGUFFile, GGUFTensor, unpermuted_rows
from emberline.weights.model_config import BadCheckpoint, Fields
from emberline.weights.tensors import FileLocation, Weight

_LANCZOS, _BILINEAR, _BICUBIC = 1, 2, 3  # Pillow's numbers
_PREFERRED = ("bf16", "f16", "f32", "q8_0")  # of several files, by the names that converters give them


class Projector(NamedTuple):
    """Properties that follow from the type of a projector."""

    family: Family
    architectures: tuple[str, ...]  # of the language models that it belongs to, in GGUF's words
    placeholder: str  # stands for one image in a rendered conversation
    image_token: str
    resample: int


PROJECTORS = {
    "idefics3": Projector("idefics3", ("llama",), "<image>", "<image>", _LANCZOS),
    "gemma3": Projector("siglip", ("gemma3",), "<start_of_image>", "<image_soft_token>", _BILINEAR),
    "pixtral": Projector("pixtral", ("llama", "mistral3"), "[IMG]", "[IMG]", _BICUBIC),
    "qwen3vl_merger": Projector("qwen3_vl", ("qwen3vl",), "<|image_pad|>", "<|image_pad|>", _BICUBIC),
}


def best_mmproj(names: Iterable[str]) -> str | None:
    """The file of the highest precision among those that are named as mmproj files. Returns None if none is."""
    found = [name for name in names if re.search(r"mmproj.*\.gguf$", name.lower())]

    def rank(name: str) -> tuple[int, str]:
        kinds = (n for n, kind in enumerate(_PREFERRED) if re.search(rf"(?<![a-z0-9]){kind}(?![a-z0-9])", name.lower()))
        return next(kinds, len(_PREFERRED)), name

    return min(found, key=rank, default=None)


class MMProj:
    """An mmproj file that belongs to a model."""

    def __init__(self, file: GGUFFile, model: GGUFFile) -> None:
        self.file, self._model = file, model
        self.vision = Fields(file.metadata, file.path.name).under("clip.vision.")
        top = Fields(file.metadata, file.path.name)
        kind = top.text("clip.projector_type", file.metadata.get("clip.vision.projector_type", "none"))
        if kind not in PROJECTORS:
            raise BadCheckpoint(
                f"{file.path.name}: the vision projector {kind!r} is not supported; supported are"
                f" {', '.join(PROJECTORS)}. Move the file away to serve the model without images"
            )
        self.projector = PROJECTORS[kind]

    @classmethod
    def beside(cls, path: Path) -> "MMProj | None":
        """Open the file for a GGUF model in the same folder. Returns None if there is none that fits the model."""
        names = [each.name for each in path.parent.glob("*") if each != path]
        if best_mmproj(names) is None or path.suffix.lower() != ".gguf":
            return None
        model = GGUFFile.open(path)
        model.close()  # its metadata remain
        while (name := best_mmproj(names)) is not None:
            names.remove(name)
            file = GGUFFile.open(path.parent / name)
            if _has_width_of(file, model) and (found := cls(file, model))._fits():
                return found
            file.close()
        return None

    def _fits(self) -> bool:
        """True if the projector is one of the model's architecture, and the model has its token."""
        architecture = self._model.metadata.get("general.architecture")
        return architecture in self.projector.architectures and self._image_token_id() is not None

    def _image_token_id(self) -> int | None:
        tokens = self._model.metadata.get("tokenizer.ggml.tokens")
        if not isinstance(tokens, list) or self.projector.image_token not in tokens:
            return None
        return tokens.index(self.projector.image_token)

    @property
    def text(self) -> Fields:
        """Fields of the language model."""
        metadata = Fields(self._model.metadata, "the GGUF metadata")
        return metadata.under(f"{metadata.text('general.architecture')}.")

    @property
    def has_silu(self) -> bool:
        """True if the tower's activation is SiLU, False if it is GELU."""
        return Fields(self.file.metadata, self.file.path.name).flag("clip.use_silu", False)

    @property
    def deepstack(self) -> tuple[int, ...]:
        """Numbers of the blocks whose outputs are projected too."""
        flags = self.file.metadata.get("clip.vision.is_deepstack_layers")
        return tuple(np.flatnonzero(flags).tolist()) if isinstance(flags, np.ndarray) else ()

    def processor(self) -> ImageProcessor:
        """Return the settings of the model's image processor. Raises BadCheckpoint."""
        family, vision, token_id = self.projector.family, self.vision, self._image_token_id()
        assert token_id is not None  # `beside` has checked it
        side = vision.whole("image_size", most=1 << 14)
        merge = {
            "idefics3": ("projector.scale_factor", 4),
            "siglip": ("projector.scale_factor", 4),
            "pixtral": ("spatial_merge_size", 1),
            "qwen3_vl": ("spatial_merge_size", 2),
        }[family]
        return ImageProcessor(
            family=family,
            placeholder=self.projector.placeholder,
            image_token=self.projector.image_token,
            image_token_id=token_id,
            patch=vision.whole("patch_size", most=256),
            merge=vision.whole(*merge, most=16),
            resample=self.projector.resample,
            mean=self._triple("image_mean"),
            std=self._triple("image_std", above_zero=True),
            tile=side if family in ("idefics3", "siglip") else 0,
            longest_edge=vision.whole("preproc_image_size", 4 * side if family == "idefics3" else side, most=1 << 14),
            min_pixels=vision.whole("image_min_pixels", 65_536),
            max_pixels=vision.whole("image_max_pixels", 16_777_216),
        )

    def _triple(self, key: str, *, above_zero: bool = False) -> tuple[float, float, float]:
        values = self.vision.get(key)
        if not isinstance(values, np.ndarray) or len(values) != 3 or not np.isfinite(values.astype(np.float64)).all():
            raise self.vision.wrong(key, "three numbers")
        if above_zero and (values <= 0).any():
            raise self.vision.wrong(key, "three numbers above zero")
        red, green, blue = (round(float(value), 8) for value in values)
        return red, green, blue

    def tensors(self) -> dict[str, Weight]:
        """The tower's tensors under canonical names: llama.cpp's, but deepstack outputs are counted from 0."""
        numbers = {f"v.deepstack.{layer}.": f"v.deepstack.{n}." for n, layer in enumerate(self.deepstack)}
        found: dict[str, Weight] = {}
        for tensor in self.file.tensors.values():
            if tensor.name == "v.token_embd.img_break":  # a copy of a row of the language model's embeddings
                continue
            name = re.sub(r"^v\.deepstack\.\d+\.", lambda match: numbers.get(match[0], match[0]), tensor.name)
            found[name] = self._weight(name, tensor)
        for name in [name for name in found if ".ffn_up." in name]:  # older converters exchanged them
            other = name.replace(".ffn_up.", ".ffn_down.")
            up, down = found[name], found.get(other)
            width, mlp = self.vision.whole("embedding_length"), self.vision.whole("feed_forward_length")
            if down is not None and up.shape[0] == width != mlp == down.shape[0]:
                found[name], found[other] = down, up
        return found

    def _weight(self, name: str, tensor: GGUFTensor) -> Weight:
        raw = self.file.bytes_of(tensor).reshape(tensor.shape[0], -1)
        order = None
        n_heads = self.vision.whole("attention.head_count")
        is_permuted = self.projector.family == "pixtral" and re.fullmatch(r"v\.blk\.\d+\.attn_[qk]\.weight", name)
        if is_permuted and tensor.shape[0] % (2 * n_heads) == 0:  # of another shape, it is refused later
            order = unpermuted_rows(tensor.shape[0], n_heads)
        shift = -1.0 if name == "mm.soft_emb_norm.weight" else 0.0  # llama.cpp adds Gemma's one
        location = FileLocation(self.file.path, tensor.offset)
        return Weight(name, tensor.shape, tensor.kind, raw, order, shift=shift, location=location)


def _has_width_of(file: GGUFFile, model: GGUFFile) -> bool:
    """True if a projector makes rows of the model's width. Else the file belongs to another model of the folder."""
    text = Fields(model.metadata, "the GGUF metadata")
    hidden = text.under(f"{text.text('general.architecture')}.").whole("embedding_length")
    return Fields(file.metadata, file.path.name).under("clip.vision.").whole("projection_dim", hidden) == hidden


def mmproj_processor(path: Path) -> ImageProcessor | None:
    """The image processor of a GGUF model. Returns None if no mmproj file beside it belongs to it."""
    found = MMProj.beside(path)
    return None if found is None else found.processor()
