"""Opening a checkpoint that is not in the page cache: little of it is read."""

import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from benchmarks.gpu.large_shapes import KIMI_9
from benchmarks.gpu.large_start import write_checkpoint
from benchmarks.gpu.model_files import drop_from_page_cache
from emberline.weights.checkpoint import open_checkpoint
from emberline.weights.readahead import resident

EXPERTS = KIMI_9 | {
    "num_hidden_layers": 2, "hidden_size": 1024, "intermediate_size": 1024, "moe_intermediate_size": 512,
    "n_routed_experts": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 512, "q_lora_rank": 64,
}  # fmt: skip


def resident_share(path: Path) -> float:
    """Share of a file's pages that are in the page cache."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        first = np.frombuffer(mapped, np.uint8).ctypes.data
        pages = range(0, len(mapped), mmap.PAGESIZE)
        found = sum(resident(first + at, min(mmap.PAGESIZE, len(mapped) - at)) for at in pages)
        return found / len(pages)


def test_scales_of_experts_are_read_without_what_is_around_them(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, EXPERTS)
    weights = tmp_path / "model.safetensors"
    os.sync()
    drop_from_page_cache(tmp_path)
    if resident_share(weights) > 0.01:
        pytest.skip("files of this folder do not leave memory")
    checkpoint = open_checkpoint(tmp_path)
    checkpoint.close()
    assert resident_share(weights) < 0.25
