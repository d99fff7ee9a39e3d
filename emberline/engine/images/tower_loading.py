"""Opening of what an engine needs for images: the model's tower, the cache of its rows, and who may use them."""

import argparse
import logging
import os
from dataclasses import dataclass
from typing import Any

import torch

from emberline.engine.images.prompt_images import CPU_STEP_PIXELS, GPU_STEP_PIXELS, PromptImages
from emberline.engine.images.row_cache import AbsentRows, RowCache
from emberline.engine.images.step_images import ImageRows
from emberline.models.vision.encoder import encoding_bytes
from emberline.models.vision.loading import load_tower
from emberline.protocol.images import ImageProcessor
from emberline.weights.model_config import BadCheckpoint
from emberline.weights.vision_config import TowerConfig

CPU_ROW_BYTES, GPU_ROW_BYTES = 256 << 20, 1 << 30  # of the cache
TYPICAL_SIDE = 1024  # pixels of a tile by which a tower is timed
WHOLE_IMAGES = frozenset({"siglip"})  # families whose image tokens see all tokens of their image
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Images:
    """Image settings of a model that the parts of an engine need."""

    processor: ImageProcessor
    rows: ImageRows  # of the runner
    feature: PromptImages  # of the scheduler


def open_images(config: TowerConfig, args: argparse.Namespace, model: Any, device: str) -> Images | None:
    """Load the tower of a checkpoint. Returns None, and says why in the log, if the engine takes no images.

    The ranks of the first stage divide the tower; those of later stages need none."""
    processor = config.processor
    why = _refusal(args, model, config)
    if why is not None:
        _log.warning("images are refused: %s", why)
        return None
    on_gpu = device.startswith("cuda")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    whole, mrope = processor.family in WHOLE_IMAGES, bool(model.config.mrope_sections)
    shard = model.shard
    if shard.position.stage:
        absent = AbsentRows(config.hidden * (1 + len(config.deepstack)), dtype, device)
        return Images(processor, ImageRows(absent, processor, whole, mrope), PromptImages())
    group = shard.groups.tp
    tower = load_tower(args.model, device=device, dtype=dtype, deterministic=args.deterministic, group=group)
    if tower is None:
        return None
    if tower.hidden != model.config.hidden_size:
        message = f"its projector makes rows of {tower.hidden} numbers, the model has {model.config.hidden_size}"
        raise BadCheckpoint(f"the checkpoint's vision tower does not belong to its language model: {message}")
    threads = 0 if on_gpu else args.threads or max(1, len(os.sched_getaffinity(0)) // group.size)
    row_bytes, largest = GPU_ROW_BYTES if on_gpu else CPU_ROW_BYTES, processor.largest_tile
    side = min(largest[0], TYPICAL_SIDE // processor.cell * processor.cell)
    typical = (side, side) if on_gpu and shard.layout.n_ranks == 1 else None
    cache = RowCache(tower, processor.n_rows, row_bytes, device, threads, largest, group, typical)
    rows = ImageRows(cache, processor, whole, mrope)
    pixels = GPU_STEP_PIXELS if on_gpu else CPU_STEP_PIXELS
    _log.info("images are encoded by a tower of %.2f GiB", tower.n_bytes / (1 << 30))
    return Images(processor, rows, PromptImages(processor, cache, pixels, whole))


def image_bytes(config: TowerConfig, n_ranks: int) -> int:
    """Bytes of a GPU for rows that are kept and for an encoding, as `RowCache.measured_bytes` finds them."""
    return GPU_ROW_BYTES // n_ranks + encoding_bytes(config, torch.bfloat16, n_ranks)


def _refusal(args: argparse.Namespace, model: Any, config: TowerConfig) -> str | None:
    """Why the engine cannot take images, which all ranks answer alike. Returns None if it can."""
    processor, first_stage = config.processor, len(model.shard.stages.layers(0))
    if args.random_weights is not None:
        return "the weights are generated, and a tower's are not"
    if len(config.deepstack) > first_stage:
        return f"rows are added behind {len(config.deepstack)} layers, and the first stage has {first_stage}"
    if processor.family not in WHOLE_IMAGES:
        return None
    n_rows = processor.n_rows((processor.tile, processor.tile))
    if n_rows + args.max_running > args.token_budget:
        return f"a step computes an image's {n_rows} tokens together: --token-budget is too small beside --max-running"
    windows = [window for window in model.config.windows if window is not None]
    if windows and min(windows) < n_rows:
        return f"an image of {n_rows} tokens is larger than the model's attention window"
    return None
