"""The configuration of a vision tower: its encoder's sizes, and what its projector makes of the encoder's rows."""

import math
from collections.abc import Callable
from pathlib import Path

import msgspec

from emberline.protocol.images import ImageProcessor
from emberline.weights.image_settings import read_image_processor
from emberline.weights.mmproj import MMProj
from emberline.weights.model_config import MAX_LAYERS, BadCheckpoint, Fields
from emberline.weights.task_config import read_json

_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "gelu_quick",
    "silu": "silu",
}


class TowerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """An encoder of image patches, and the projector to the language model's hidden size."""

    processor: ImageProcessor  # patch and square sizes, mean and standard deviation
    width: int
    n_layers: int
    n_heads: int
    mlp_size: int
    hidden: int  # the language model's
    norm_eps: float = 1e-6
    activation: str = "gelu_tanh"
    n_positions: int = 0  # learned positions, those of a square grid; 0: there are none
    rope_theta: float = 10_000.0
    projector_eps: float = 1e-6
    projector_activation: str = "gelu"
    projector_bias: bool = True
    deepstack: tuple[int, ...] = ()  # blocks whose outputs are projected too, for the language model's first layers

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        return self.width // self.n_heads

    @property
    def grid_side(self) -> int:
        """Side of the grid of learned positions."""
        return math.isqrt(self.n_positions)

    @property
    def square(self) -> int:
        """Patches of which the projector makes one row."""
        return self.processor.merge * self.processor.merge


def read_tower_config(folder: Path) -> TowerConfig | None:
    """Read the configuration of the vision tower of a folder or a GGUF file. Returns None if the model has none."""
    if folder.is_file():
        mmproj = MMProj.beside(folder)
        return None if mmproj is None else _checked(_mmproj_config(mmproj))
    processor = read_image_processor(folder)
    return None if processor is None else tower_config(read_json(folder, "config.json"), processor)


def tower_config(document: dict[str, object], processor: ImageProcessor) -> TowerConfig:
    """The configuration of the tower that config.json describes. Raises BadCheckpoint if it describes none."""
    vision, text = document["vision_config"], document.get("text_config")
    if not isinstance(vision, dict) or not isinstance(text, dict):
        raise BadCheckpoint("config.json: a model with a vision tower needs 'vision_config' and 'text_config'")
    read = _READERS[processor.family]
    return _checked(read(Fields(document, "config.json"), Fields(vision, "vision_config"), text, processor))


def _checked(config: TowerConfig) -> TowerConfig:
    if config.width % config.n_heads or config.head_dim % 4:
        raise BadCheckpoint(f"a vision tower of width {config.width} cannot have {config.n_heads} heads")
    if config.n_positions != config.grid_side**2:
        raise BadCheckpoint(f"{config.n_positions} positions of a vision tower are no square grid")
    if any(layer >= config.n_layers for layer in config.deepstack):
        raise BadCheckpoint(
            f"deepstack outputs {config.deepstack} reach beyond the {config.n_layers} blocks of the tower"
        )
    return config


def _mmproj_config(mmproj: MMProj) -> TowerConfig:
    vision, names = mmproj.vision, mmproj.file.tensors
    eps, family = vision.positive("attention.layer_norm_epsilon"), mmproj.projector.family
    positions = names.get("v.position_embd.weight")
    return TowerConfig(
        processor=mmproj.processor(),
        width=vision.whole("embedding_length"),
        n_layers=vision.whole("block_count", most=MAX_LAYERS),
        n_heads=vision.whole("attention.head_count"),
        mlp_size=vision.whole("feed_forward_length"),
        hidden=mmproj.text.whole("embedding_length"),
        norm_eps=eps,
        activation="silu" if mmproj.has_silu else "gelu" if family == "pixtral" else "gelu_tanh",
        n_positions=0 if positions is None else positions.shape[0],
        projector_eps=mmproj.text.positive("attention.layer_norm_rms_epsilon") if family == "pixtral" else eps,
        projector_bias="mm.1.bias" in names,
        deepstack=mmproj.deepstack,
    )


def _activation(fields: Fields, key: str, default: str) -> str:
    name = fields.text(key, default)
    if name not in _ACTIVATIONS:
        raise BadCheckpoint(f"activation {name!r} is not supported; supported are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _hidden(text: dict[str, object]) -> int:
    return Fields(text, "config.json: text_config").whole("hidden_size")


def _siglip_encoder(
    vision: Fields, text: dict[str, object], processor: ImageProcessor, width: int, n_heads: int, image_side: int
) -> TowerConfig:
    return TowerConfig(
        processor=processor,
        width=vision.whole("hidden_size", width),
        n_layers=vision.whole("num_hidden_layers", 12, most=MAX_LAYERS),
        n_heads=vision.whole("num_attention_heads", n_heads),
        mlp_size=vision.whole("intermediate_size", 3072),
        hidden=_hidden(text),
        norm_eps=vision.positive("layer_norm_eps", 1e-6),
        activation=_activation(vision, "hidden_act", "gelu_pytorch_tanh"),
        n_positions=(vision.whole("image_size", image_side) // processor.patch) ** 2,
        projector_eps=vision.positive("layer_norm_eps", 1e-6),
    )


def _idefics3(top: Fields, vision: Fields, text: dict[str, object], processor: ImageProcessor) -> TowerConfig:
    return _siglip_encoder(vision, text, processor, 1152, 16, processor.tile)


def _siglip(top: Fields, vision: Fields, text: dict[str, object], processor: ImageProcessor) -> TowerConfig:
    return _siglip_encoder(vision, text, processor, 768, 12, processor.tile)


def _pixtral(top: Fields, vision: Fields, text: dict[str, object], processor: ImageProcessor) -> TowerConfig:
    if top.get("vision_feature_layer", -1) not in (-1, [-1]):
        raise top.wrong("vision_feature_layer", "-1, the last layer")
    rope = vision.get("rope_parameters", {})
    return TowerConfig(
        processor=processor,
        width=vision.whole("hidden_size", 1024),
        n_layers=vision.whole("num_hidden_layers", 24, most=MAX_LAYERS),
        n_heads=vision.whole("num_attention_heads", 16),
        mlp_size=vision.whole("intermediate_size", 4096),
        hidden=_hidden(text),
        norm_eps=1e-5,
        activation=_activation(vision, "hidden_act", "gelu"),
        rope_theta=_theta(rope, vision),
        projector_eps=Fields(text, "config.json: text_config").positive("rms_norm_eps", 1e-6),
        projector_activation=_activation(top, "projector_hidden_act", "gelu"),
        projector_bias=top.flag("multimodal_projector_bias", False),
    )


def _qwen3_vl(top: Fields, vision: Fields, text: dict[str, object], processor: ImageProcessor) -> TowerConfig:
    hidden = _hidden(text)
    if vision.whole("out_hidden_size", hidden) != hidden:
        raise vision.wrong("out_hidden_size", f"{hidden}, the language model's hidden size")
    return TowerConfig(
        processor=processor,
        width=vision.whole("hidden_size", 1152),
        n_layers=vision.whole("depth", 27, most=MAX_LAYERS),
        n_heads=vision.whole("num_heads", 16),
        mlp_size=vision.whole("intermediate_size", 4304),
        hidden=hidden,
        activation=_activation(vision, "hidden_act", "gelu_pytorch_tanh"),
        n_positions=vision.whole("num_position_embeddings", 2304),
        rope_theta=_theta(vision.get("rope_parameters", {}), vision),
        deepstack=vision.whole_numbers("deepstack_visual_indexes", most=MAX_LAYERS) or (),
    )


def _kimi_k25(top: Fields, vision: Fields, text: dict[str, object], processor: ImageProcessor) -> TowerConfig:
    def size(key: str, default: int) -> int:
        """The number under the key of the published configuration, or under transformers'."""
        return vision.whole(f"vt_{key}", vision.get(key, default))

    sides = {vision.whole(f"{prefix}pos_emb_{side}", 64) for side in ("height", "width") for prefix in _prefix(vision)}
    if len(sides) != 1:
        raise vision.wrong("init_pos_emb_height", "the same number as for the width")
    hidden = _hidden(text)
    if vision.whole("text_hidden_size", hidden) != hidden:
        raise vision.wrong("text_hidden_size", f"{hidden}, the language model's hidden size")
    return TowerConfig(
        processor=processor,
        width=size("hidden_size", 1152),
        n_layers=min(size("num_hidden_layers", 27), MAX_LAYERS),
        n_heads=size("num_attention_heads", 16),
        mlp_size=size("intermediate_size", 4304),
        hidden=hidden,
        norm_eps=1e-5,
        n_positions=sides.pop() ** 2,
        rope_theta=_theta(vision.get("rope_parameters", {}), vision),
        projector_eps=vision.positive("projector_ln_eps", top.get("projection_layer_norm_eps", 1e-5)),
    )


def _prefix(vision: Fields) -> tuple[str, ...]:
    """Prefix of the names of the grid's sides: that of the published configuration, or none."""
    return ("init_",) if vision.has("init_pos_emb_height") else ("",)


def _theta(rope: object, vision: Fields) -> float:
    values = rope if isinstance(rope, dict) else {}
    return Fields(values, vision.where).positive("rope_theta", vision.get("rope_theta", 10_000.0))


_READERS: dict[str, Callable[[Fields, Fields, dict[str, object], ImageProcessor], TowerConfig]] = {
    "idefics3": _idefics3,
    "siglip": _siglip,
    "pixtral": _pixtral,
    "qwen3_vl": _qwen3_vl,
    "kimi_k25": _kimi_k25,
}
