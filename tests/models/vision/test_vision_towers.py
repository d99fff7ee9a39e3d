"""Vision towers against transformers, on small random models of every family."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from emberline.catalog.model_card import describe_path
from emberline.kernels.collectives import Loopback, ParallelGroups
from emberline.models.registry import load_model
from emberline.models.vision.loading import load_tower, tower_bytes
from emberline.models.vision.tower import VisionTower
from emberline.weights.checkpoint import open_checkpoint
from emberline.weights.image_settings import read_image_processor
from emberline.weights.lossless_folder import compress_folder
from emberline.weights.model_config import BadCheckpoint
from emberline.weights.vision_config import read_tower_config
from standins.thread_collectives import run_ranks, thread_groups
from tests.models.vision.small_vision_models import MODELS, TEXT, save_vision_model

SIZES = {  # height and width of tiles
    "idefics3": [(32, 32)] * 3,
    "smolvlm": [(32, 32)] * 2,
    "gemma3": [(32, 32)] * 2,
    "mistral3": [(16, 24), (16, 24), (40, 8), (64, 64)],
    "qwen3_vl": [(24, 24), (16, 40), (40, 16), (8, 64)],
    "kimi_k25": [(24, 24), (16, 40), (40, 16), (64, 48)],
}


def tiles_of(family: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 256, (*size, 3), dtype=torch.uint8, generator=generator) for size in SIZES[family]]


def load(folder: Path, **options: Any) -> VisionTower:
    tower = load_tower(folder, device="cpu", dtype=torch.float32, **options)
    assert tower is not None
    return tower


def normalized(folder: Path, tile: torch.Tensor) -> torch.Tensor:  # [3, height, width]
    processor = read_image_processor(folder)
    assert processor is not None
    mean, std = torch.tensor(processor.mean)[:, None, None], torch.tensor(processor.std)[:, None, None]
    return (tile.permute(2, 0, 1) / 255 - mean) / std


def expected_rows(folder: Path, family: str, model: Any, tile: torch.Tensor) -> Any:
    """What transformers makes of one tile."""
    pixels = normalized(folder, tile)[None]
    height, width = pixels.shape[2] // 4, pixels.shape[3] // 4
    with torch.inference_mode():
        if family in ("idefics3", "smolvlm"):
            return model.model.get_image_features(pixels[None]).pooler_output[0]
        if family == "gemma3":
            return model.model.get_image_features(pixels).pooler_output[0]
        if family == "mistral3":
            sizes = torch.tensor([pixels.shape[2:]])
            return model.model.get_image_features(pixels, sizes, vision_feature_layer=-1).pooler_output[0]
        grid = torch.tensor([[1, height, width]])
        patches = pixels[0].view(3, height // 2, 2, 4, width // 2, 2, 4).permute(1, 4, 2, 5, 0, 3, 6)
        if family == "qwen3_vl":
            frames = patches.reshape(-1, 3, 1, 4, 4).expand(-1, 3, 2, 4, 4)
            out = model.model.get_image_features(frames.reshape(-1, 96), grid)
            return torch.cat([out.pooler_output[0], *(layer[0] for layer in out.deepstack_features)], -1)
        plain = pixels[0].view(3, height, 4, width, 4).permute(1, 3, 0, 2, 4).reshape(-1, 3, 4, 4)
        return model.model.get_image_features(plain, grid).pooler_output[0]


@pytest.mark.parametrize("family", MODELS)
def test_rows_equal_transformers(tmp_path: Path, family: str) -> None:
    model = save_vision_model(tmp_path, family)
    tower, tiles = load(tmp_path), tiles_of(family)
    rows = tower.encode(tiles)
    expected = torch.cat([expected_rows(tmp_path, family, model, tile) for tile in tiles])
    assert rows.shape == expected.shape == (len(expected), TEXT["hidden_size"] * (1 + tower.n_deepstack))
    assert expected.std() > 0.1
    assert (rows - expected).abs().max() < 1e-3
    processor = read_image_processor(tmp_path)
    assert processor is not None
    assert len(rows) == sum(processor.n_rows((width, height)) for height, width in SIZES[family])


@pytest.mark.parametrize("family", ["idefics3", "mistral3", "qwen3_vl", "kimi_k25"])
def test_deterministic_rows_do_not_depend_on_other_tiles(tmp_path: Path, family: str) -> None:
    save_vision_model(tmp_path, family)
    tower, tiles = load(tmp_path, deterministic=True), tiles_of(family)
    alone = torch.cat([tower.encode([tile]) for tile in tiles])
    assert torch.equal(tower.encode(tiles), alone)
    torch.testing.assert_close(load(tmp_path).encode(tiles), alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", MODELS)
def test_bfloat16_towers_are_near_float32(tmp_path: Path, family: str) -> None:
    save_vision_model(tmp_path, family)
    exact = load(tmp_path)
    half = load_tower(tmp_path, device="cpu", dtype=torch.bfloat16)
    assert half is not None
    assert exact.n_bytes > half.n_bytes >= exact.n_bytes / 2
    rows = half.encode(tiles_of(family))
    assert rows.dtype == torch.bfloat16
    errors = (rows.float() - exact.encode(tiles_of(family))).norm() / exact.encode(tiles_of(family)).norm()
    assert errors < 0.05


@pytest.mark.parametrize("family", MODELS)
def test_language_models_load_without_the_towers_tensors(tmp_path: Path, family: str) -> None:
    model = save_vision_model(tmp_path, family)
    checkpoint = open_checkpoint(tmp_path)
    embeddings = model.get_input_embeddings().weight.detach()
    assert torch.equal(checkpoint.weight("token_embd.weight").tensor(torch.float32), embeddings)
    assert not any(name.startswith(("v.", "mm.")) for name in checkpoint.names)
    load_model(checkpoint)


@pytest.mark.parametrize("family", MODELS)
def test_plans_count_what_a_loaded_tower_takes(tmp_path: Path, family: str) -> None:
    save_vision_model(tmp_path, family)
    config = read_tower_config(tmp_path)
    assert tower_bytes(config, torch.float32) == load(tmp_path).n_bytes
    assert tower_bytes(config, torch.float32, 3) == load(tmp_path, group=Loopback(2, 3)).n_bytes


@pytest.mark.parametrize("family", MODELS)
def test_ranks_divide_a_tower(tmp_path: Path, family: str) -> None:
    """Three ranks of towers with four heads: all get the rows of the whole tower, and rank 0 alone sees pixels."""
    save_vision_model(tmp_path, family)
    whole, tiles = load(tmp_path), tiles_of(family)

    def encode(groups: ParallelGroups) -> tuple[torch.Tensor, int]:
        tower = load(tmp_path, group=groups.tp)
        sizes_alone = [torch.empty_like(tile, device="meta") for tile in tiles]
        return tower.encode(sizes_alone if groups.tp.rank else tiles), tower.n_bytes

    found = run_ranks(thread_groups(tp=3), encode)
    for rows, n_bytes in found:
        torch.testing.assert_close(rows, whole.encode(tiles), atol=1e-5, rtol=1e-5)
        assert torch.equal(rows, found[0][0])
        assert n_bytes <= found[-1][1] < whole.n_bytes


def test_cards_say_that_a_model_sees(tmp_path: Path) -> None:
    save_vision_model(tmp_path, "smolvlm")
    card = describe_path(tmp_path)
    assert card.capabilities.vision
    assert card.weight_bytes == sum(tensor.nbytes for tensor in load_file(tmp_path / "model.safetensors").values())


def test_text_models_have_no_tower(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert load_tower(tmp_path, device="cpu", dtype=torch.float32) is None


NORM = "model.vision_model.post_layernorm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(NORM), "'v.post_ln.weight' of the vision tower is missing"),
        (lambda tensors: tensors.update({NORM: torch.ones(3)}), r"shape \(3,\), but its configuration implies \(48,\)"),
        (lambda tensors: tensors.update({NORM: torch.ones(48, dtype=torch.int8)}), "is I8; vision towers are read in"),
        (
            lambda tensors: tensors.update({"model.vision_model.extra.weight": torch.ones(3)}),
            "'model.vision_model.extra.weight' has no place in a vision tower of the family idefics3",
        ),
        (
            lambda tensors: tensors.update({"model.vision_model.encoder.layers.3.mlp.fc1.weight": torch.ones(3, 3)}),
            "no use for 1 of its tensors: 'v.blk.3.ffn_up.weight'",
        ),
    ],
)
def test_wrong_tensors_are_refused_by_name(tmp_path: Path, change: Any, message: str) -> None:
    save_vision_model(tmp_path, "idefics3")
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(BadCheckpoint, match=message):
        load(tmp_path)


def test_compressed_folders_have_the_same_tower(tmp_path: Path) -> None:
    save_vision_model(tmp_path / "plain", "qwen3_vl", torch.bfloat16)
    compress_folder(tmp_path / "plain", tmp_path / "packed")
    tiles = tiles_of("qwen3_vl")
    assert torch.equal(load(tmp_path / "packed").encode(tiles), load(tmp_path / "plain").encode(tiles))
    assert open_checkpoint(tmp_path / "packed").fingerprint == open_checkpoint(tmp_path / "plain").fingerprint


def test_a_model_with_another_tower_has_another_fingerprint(tmp_path: Path) -> None:
    save_vision_model(tmp_path, "idefics3")
    before = open_checkpoint(tmp_path).fingerprint
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[NORM] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    assert open_checkpoint(tmp_path).fingerprint != before
