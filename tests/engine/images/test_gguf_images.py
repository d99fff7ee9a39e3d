"""Replies about images from a GGUF model and its mmproj file are those of the folder that both were made from."""

from pathlib import Path

import pytest

from tests.engine.images.small_engine import Prompt, SmallEngine
from tests.models.vision.mmproj_files import write_gguf_pair
from tests.models.vision.small_vision_models import save_vision_model


@pytest.mark.slow
@pytest.mark.parametrize("family", ["smolvlm", "mistral3", "qwen3_vl"])
def test_replies_equal_those_of_the_folder(tmp_path: Path, family: str) -> None:
    folder = tmp_path / "folder"
    save_vision_model(folder, family)
    path = write_gguf_pair(folder, tmp_path / "gguf", family)
    requests = [Prompt(folder, family, images, seed).request(f"r{seed}") for seed, images in enumerate(([0], [1, 2]))]
    expected = SmallEngine(folder).replies(*requests)
    assert SmallEngine(path).replies(*requests) == expected
