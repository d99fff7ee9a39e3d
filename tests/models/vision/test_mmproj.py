"""Towers from mmproj files, as llama.cpp's converter writes them, against the same towers from folders."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from emberline.models.vision.loading import load_tower
from emberline.weights.checkpoint import open_checkpoint
from emberline.weights.image_settings import read_image_processor
from emberline.weights.mmproj import best_mmproj
from emberline.weights.model_config import BadCheckpoint
from emberline.weights.vision_config import TowerConfig, read_tower_config
from emberline.weights.vision_tensors import read_vision_tensors
from tests.models.vision.mmproj_files import KINDS, write_mmproj
from tests.models.vision.small_vision_models import MODELS, save_vision_model
from tests.weights.tiny_gguf import tiny_gguf

HIDDEN = 64  # of tiny_gguf


def save_folder(folder: Path, family: str) -> TowerConfig:
    text = MODELS[family]["text_config"] | {"hidden_size": HIDDEN, "rms_norm_eps": 1e-5}
    changes: dict[str, Any] = {"text_config": text}
    if family == "qwen3_vl":
        changes["vision_config"] = MODELS[family]["vision_config"] | {"out_hidden_size": HIDDEN}
    save_vision_model(folder, family, **changes)
    config = read_tower_config(folder)
    assert config is not None
    return config


@pytest.mark.parametrize("family", KINDS)
def test_towers_of_mmproj_files_are_those_of_the_folders(tmp_path: Path, family: str) -> None:
    config = save_folder(tmp_path / "folder", family)
    weights = read_vision_tensors(tmp_path / "folder", config.processor.family)
    kind, architecture, token = KINDS[family]
    model = tiny_gguf(tmp_path / "m.gguf", arch=architecture, first_token=token)
    assert read_image_processor(model) is None
    write_mmproj(tmp_path / "mmproj-m-f32.gguf", kind, config, {name: w.dense() for name, w in weights.items()})
    processor = read_image_processor(model)
    assert processor is not None
    assert processor.image_token_id == 0
    for size in [(64, 48), (1000, 300)]:
        ours, theirs = processor.plan(*size), config.processor.plan(*size)
        assert (ours.resizes, ours.tiles, ours.n_rows) == (theirs.resizes, theirs.tiles, theirs.n_rows)
    expected, tower = (load_tower(path, device="cpu", dtype=torch.float32) for path in (tmp_path / "folder", model))
    assert expected is not None
    assert tower is not None
    side = config.processor.tile or 24
    tiles = [torch.randint(0, 256, (side, side, 3), dtype=torch.uint8)] * 2
    torch.testing.assert_close(tower.encode(tiles), expected.encode(tiles), atol=1e-5, rtol=1e-5)


def test_files_of_other_models_are_left_alone(tmp_path: Path) -> None:
    config = save_folder(tmp_path / "folder", "smolvlm")
    tensors = {name: w.dense() for name, w in read_vision_tensors(tmp_path / "folder", "idefics3").items()}
    write_mmproj(tmp_path / "mmproj.gguf", "idefics3", config, tensors)
    for architecture, token in [("qwen3", "<image>"), ("llama", "t0"), ("gemma3", "<image_soft_token>")]:
        model = tiny_gguf(tmp_path / f"{architecture}.gguf", arch=architecture, first_token=token)
        assert read_image_processor(model) is None


def test_other_projectors_are_refused_by_name(tmp_path: Path) -> None:
    config = save_folder(tmp_path / "folder", "smolvlm")
    write_mmproj(tmp_path / "mmproj.gguf", "internvl", config, {})
    with pytest.raises(
        BadCheckpoint, match=r"mmproj.gguf: the vision projector 'internvl' is not supported; .*idefics3"
    ):
        load_tower(tiny_gguf(tmp_path / "m.gguf"), device="cpu", dtype=torch.float32)


def test_files_for_models_of_another_width_are_passed_over(tmp_path: Path) -> None:
    config = save_folder(tmp_path / "folder", "smolvlm")
    tensors = {name: w.dense() for name, w in read_vision_tensors(tmp_path / "folder", "idefics3").items()}
    wider = msgspec.structs.replace(config, hidden=2 * config.hidden)
    write_mmproj(tmp_path / "mmproj-other-bf16.gguf", "internvl", wider, {})
    model = tiny_gguf(tmp_path / "m.gguf", first_token="<image>")
    assert read_image_processor(model) is None
    write_mmproj(tmp_path / "mmproj-mine-f16.gguf", "idefics3", config, tensors)
    processor = read_image_processor(model)
    assert processor is not None
    assert processor.family == "idefics3"


def test_a_standard_deviation_of_zero_is_refused(tmp_path: Path) -> None:
    config = save_folder(tmp_path / "folder", "smolvlm")
    processor = msgspec.structs.replace(config.processor, std=(0.5, 0.0, 0.5))
    write_mmproj(tmp_path / "mmproj.gguf", "idefics3", msgspec.structs.replace(config, processor=processor), {})
    with pytest.raises(BadCheckpoint, match=r"'image_std' is .* not three numbers above zero"):
        read_image_processor(tiny_gguf(tmp_path / "m.gguf", first_token="<image>"))


def test_the_most_precise_file_is_taken() -> None:
    assert best_mmproj(["m-f16.gguf", "mmproj-m-Q8_0.gguf", "m.mmproj-F16.gguf"]) == "m.mmproj-F16.gguf"
    assert best_mmproj(["m-f16.gguf"]) is None


def test_language_models_of_qwen3_vl_are_read_from_gguf(tmp_path: Path) -> None:
    norms = {f"blk.{n}.attn_{part}_norm.weight": np.ones(16, np.float32) for n in (0, 1) for part in "qk"}
    sections = {"qwen3vl.rope.dimension_sections": [4, 2, 2, 0]}
    model = tiny_gguf(tmp_path / "m.gguf", arch="qwen3vl", tensors=norms, arrays=sections)
    config = open_checkpoint(model).config
    assert (config.architecture, config.mrope_sections, config.qk_norm) == ("qwen3", (4, 2, 2), True)
    bad = tiny_gguf(tmp_path / "bad.gguf", arch="qwen3vl", tensors=norms, arrays={next(iter(sections)): [4, 4, 0, 0]})
    with pytest.raises(BadCheckpoint, match="three numbers of frequencies"):
        open_checkpoint(bad)
