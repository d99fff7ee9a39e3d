"""Vision towers alone, beside transformers' with the same random weights: tiles to rows, on a GPU or a CPU.

python -m benchmarks.gpu.vision_tower [qwen3_vl|kimi_k25|idefics3|siglip|pixtral …] [--side 1024] [--tiles 1,8,32]

Both towers get the same uint8 tiles; transformers' is timed without the preparation of its patches. The work is counted
from shapes: two operations for each weight of a matrix and patch, and attention's four for each pair of patches and
dimension. `share` is that rate over the rate of one large matrix product of the same device and type, measured in the
same run. Targets on an H200 at 1024 x 1024: a share of 0.5 of its 800 TFLOP/s, and 1.0 times transformers.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from emberline.models.vision.loading import load_tower
from emberline.weights.vision_config import TowerConfig, read_tower_config

_TEXT = {
    "hidden_size": 1024, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 8,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128, "max_position_embeddings": 128,
}  # fmt: skip
_SIGLIP = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
# Published shapes: the towers of Qwen3-VL-8B, Kimi K2.5, SmolVLM-256M, Gemma 3 and Mistral Small 3.1. Their language
# models are cut to one narrow layer.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_vl": (
        "qwen3_vl",
        {
            "text_config": _TEXT | {"rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20]}},
            "vision_config": {"out_hidden_size": 1024},
        },
    ),
    "kimi_k25": ("kimi_k25", {"text_config": _TEXT | {"model_type": "llama"}, "vision_config": {}}),
    "idefics3": (
        "smolvlm",
        {
            "text_config": _TEXT | {"model_type": "llama"},
            "vision_config": {"hidden_size": 768, "num_attention_heads": 12, "image_size": 512, "patch_size": 16},
            "scale_factor": 4,
        },
    ),
    "siglip": (
        "gemma3",
        {
            "text_config": _TEXT | {"sliding_window": 64},
            "vision_config": _SIGLIP | {"image_size": 896, "patch_size": 14, "vision_use_head": False},
            "mm_tokens_per_image": 256,
        },
    ),
    "pixtral": (
        "mistral3",
        {
            "text_config": _TEXT | {"model_type": "mistral"},
            "vision_config": {"model_type": "pixtral", "image_size": 1540, "patch_size": 14, "hidden_act": "silu"},
        },
    ),
}


@dataclass(frozen=True, slots=True)
class Result:
    family: str
    tiles: int
    side: int
    ours_ms: float
    transformers_ms: float
    tflop_s: float
    share: float  # of the rate of one large matrix product
    against_transformers: float
    largest_difference: float  # of rows, over their standard deviation


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=["qwen3_vl", "kimi_k25"], metavar="FAMILY", help=str([*SHAPES]))
    parser.add_argument("--side", type=int, default=1024, help="pixels of a tile's sides, rounded to whole squares")
    parser.add_argument("--tiles", default="1,8,32", help="tiles of a call")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    dtype = torch.bfloat16 if args.device.startswith("cuda") else torch.float32
    peak = _matmul_rate(args.device, dtype)
    print(f"one matrix product on {args.device} in {dtype}: {peak / 1e12:.2f} TFLOP/s")
    found = []
    for family in args.families:
        for n_tiles in map(int, args.tiles.split(",")):
            found.append(measure(family, n_tiles, args.side, args.device, dtype, args.repeats, peak))
            print("  ".join(f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}"
                            for key, value in asdict(found[-1]).items()), flush=True)  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps([asdict(each) for each in found], indent=1))


def measure(family: str, n_tiles: int, side: int, device: str, dtype: torch.dtype, repeats: int, peak: float) -> Result:
    """Time both towers in turn, and compare their rows."""
    with tempfile.TemporaryDirectory() as folder:
        theirs = save_random(family, Path(folder)).to(device=device, dtype=dtype)
        config = read_tower_config(Path(folder))
        tower = load_tower(Path(folder), device=device, dtype=dtype)
    assert config is not None
    assert tower is not None
    side = config.processor.tile or side // config.processor.cell * config.processor.cell
    generator = torch.Generator().manual_seed(1)
    tiles = [torch.randint(0, 256, (side, side, 3), dtype=torch.uint8, generator=generator) for _ in range(n_tiles)]
    tiles = [tile.to(device) for tile in tiles]
    with torch.inference_mode():
        call = transformers_call(family, theirs, config, tiles, dtype)
        ours, others = tower.encode(tiles).float(), call().float()
        times = [(_seconds(lambda: tower.encode(tiles), device), _seconds(call, device)) for _ in range(repeats)]
    mine, other = (median(column) for column in zip(*times, strict=True))
    rate = operations(config, side, n_tiles) / mine
    difference = ((ours - others).abs().max() / others.std()).item()
    return Result(
        family, n_tiles, side, 1e3 * mine, 1e3 * other, rate / 1e12, rate / peak, median(b / a for a, b in times),
        difference,
    )  # fmt: skip


def operations(config: TowerConfig, side: int, n_tiles: int) -> float:
    """Floating-point operations of an encoding, from shapes."""
    patches, width = (side // config.processor.patch) ** 2, config.width
    mlp = (3 if config.processor.family == "pixtral" else 2) * config.mlp_size
    block = 2 * patches * width * (4 * width + mlp) + 4 * patches**2 * width
    inner = config.square * width
    merger = {
        "idefics3": inner * config.hidden,
        "siglip": width * config.hidden,
        "pixtral": inner * width + width * config.hidden + config.hidden**2,
    }.get(config.processor.family, inner * (inner + config.hidden))
    projector = 2 * patches / config.square * merger * (1 + len(config.deepstack))
    embedding = 2 * patches * width * 3 * config.processor.patch**2
    return n_tiles * (embedding + config.n_layers * block + projector)


def save_random(family: str, folder: Path) -> Any:
    """Save a random model of the family as transformers makes it, and return it."""
    import transformers

    torch.manual_seed(0)
    model_type, document = SHAPES[family]
    if family == "kimi_k25":
        document = document | {"tie_word_embeddings": False}
    config = transformers.AutoConfig.for_model(model_type, **document)
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa").eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    model.save_pretrained(folder)
    if family == "idefics3":
        (folder / "preprocessor_config.json").write_text(json.dumps({"max_image_size": {"longest_edge": 512}}))
    return model


def transformers_call(
    family: str, model: Any, config: TowerConfig, tiles: list[Tensor], dtype: torch.dtype
) -> Callable[[], Tensor]:
    """A call of transformers' tower and projector with the tiles' normalized pixels."""
    processor, device = config.processor, tiles[0].device
    mean, std = (torch.tensor(values, device=device)[:, None, None] for values in (processor.mean, processor.std))
    pixels = torch.stack([((tile.permute(2, 0, 1).float() / 255 - mean) / std).to(dtype) for tile in tiles])
    features, patch = model.model.get_image_features, processor.patch
    rows = pixels.shape[2] // patch
    grid = torch.tensor([[1, rows, rows]] * len(tiles), device=device)
    if family == "idefics3":
        return lambda: torch.cat(list(features(pixels[None]).pooler_output))
    if family == "siglip":
        return lambda: features(pixels).pooler_output.flatten(0, 1)
    if family == "pixtral":
        sizes = torch.tensor([pixels.shape[2:]] * len(tiles), device=device)
        return lambda: torch.cat(list(features(pixels, sizes, vision_feature_layer=-1).pooler_output))
    cells = pixels.view(len(tiles), 3, rows // 2, 2, patch, rows // 2, 2, patch)
    if family == "qwen3_vl":
        squares = cells.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(-1, 3, 1, patch, patch)
        frames = squares.expand(-1, 3, 2, patch, patch).reshape(-1, 6 * patch * patch)

        def qwen() -> Tensor:
            out = features(frames, grid)
            stacked = (torch.cat(list(each)) if isinstance(each, tuple) else each for each in out.deepstack_features)
            return torch.cat([torch.cat(list(out.pooler_output)), *stacked], -1)

        return qwen
    plain = cells.permute(0, 2, 3, 5, 6, 1, 4, 7).reshape(-1, 3, patch, patch)
    return lambda: torch.cat(list(features(plain, grid).pooler_output))


def _seconds(call: Callable[[], Any], device: str) -> float:
    _wait(device)
    start = perf_counter()
    call()
    _wait(device)
    return perf_counter() - start


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def _matmul_rate(device: str, dtype: torch.dtype) -> float:
    """Operations a second of one large matrix product."""
    n = 8192 if device.startswith("cuda") else 1536
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    a @ b
    return 2 * n**3 / median(_seconds(lambda: a @ b, device) for _ in range(7))


if __name__ == "__main__":
    main()
