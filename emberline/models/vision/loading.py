"""Loading of a checkpoint's vision tower."""

from pathlib import Path

import torch

from emberline.kernels.collectives import Collectives, Loopback
from emberline.models.vision.blocks import OutlineWeights, TowerWeights
from emberline.models.vision.encoder import TowerEncoder
from emberline.models.vision.idefics3 import Idefics3Tower
from emberline.models.vision.moonvit import MoonViTTower
from emberline.models.vision.pixtral import PixtralTower
from emberline.models.vision.qwen3_vl import Qwen3VLTower
from emberline.models.vision.siglip import SiglipTower
from emberline.models.vision.tower import VisionTower
from emberline.protocol.images import Family
from emberline.weights.vision_config import TowerConfig, read_tower_config
from emberline.weights.vision_tensors import read_vision_tensors

TOWERS: dict[Family, type[TowerEncoder]] = {
    "idefics3": Idefics3Tower,
    "siglip": SiglipTower,
    "pixtral": PixtralTower,
    "qwen3_vl": Qwen3VLTower,
    "kimi_k25": MoonViTTower,
}


def tower_bytes(config: TowerConfig | None, dtype: torch.dtype = torch.bfloat16, n_ranks: int = 1) -> int:
    """Bytes that the weights of a tower take once they are loaded, on that of its ranks with the most; 0 without a
    tower."""
    if config is None:
        return 0
    group = Loopback(n_ranks - 1, n_ranks)
    return TOWERS[config.processor.family](config, OutlineWeights(dtype, group)).n_bytes


def load_tower(
    folder: Path,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    deterministic: bool = False,
    group: Collectives | None = None,
) -> VisionTower | None:
    """Load the tower and projector of a Hugging Face folder, or of the mmproj file beside a GGUF file. Returns None if
    the model has none.

    Raises BadCheckpoint if a tensor is unknown, missing, misshapen, or quantized in a folder. `deterministic`: a tile's
    rows are the same bits whatever it is encoded with. group: of the ranks that divide the tower.
    """
    config = read_tower_config(folder)
    if config is None:
        return None
    family = config.processor.family
    weights = TowerWeights(read_vision_tensors(folder, family), device, dtype, group)
    return TOWERS[family](config, weights, deterministic)
