"""Folders with models that are large enough to have planes, and what tests do to compressed files."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from emberline.weights.lossless_files import MANIFEST, SUFFIX, LosslessFile
from emberline.weights.lossless_folder import Progress, compress_folder, staging_folder
from emberline.weights.safetensors_file import SafeTensor
from tests.weights.quantized_folder import CONFIG, llama_tensors, write_folder

WIDE = CONFIG | {"intermediate_size": 512}


def bf16_patterns() -> Tensor:
    """All 65,536 patterns of BF16: NaN payloads, infinities, denormals and both zeros among them."""
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def model_tensors() -> dict[str, Tensor]:
    """A Llama's tensors, with every pattern of bits in one, and a constant in another."""
    tensors = llama_tensors()
    generator = torch.Generator().manual_seed(1)
    for name, tensor in tensors.items():
        if ".mlp." in name:
            shape = (512, 128) if "down" not in name else (128, 512)
            tensors[name] = (torch.randn(shape, generator=generator) * 0.1).to(tensor.dtype)
    odd = tensors["model.layers.0.mlp.gate_proj.weight"]
    odd[:256] = bf16_patterns()[: 256 * 128].view(256, 128)  # the rest stays regular, so that it is worth coding
    tensors["model.layers.0.mlp.up_proj.weight"][:] = -0.0
    return tensors


def write_model(folder: Path) -> Path:
    write_folder(folder, WIDE, model_tensors())
    return folder


def compressed_file(folder: Path) -> Path:
    return folder / "model.lossless.safetensors"


def part_of(path: Path, name: str) -> SafeTensor:
    file = LosslessFile.open(path)
    tensor = file.stored.tensors[name]
    file.close()
    return SafeTensor(tensor.dtype, tensor.shape, tuple(len(file_header(path)) + at for at in tensor.data_offsets))


def file_header(path: Path) -> bytes:
    data = path.read_bytes()
    return data[: 8 + int.from_bytes(data[:8], "little")]


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(bytes(data))


def edit_manifest(folder: Path, **changes: object) -> None:
    document = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(document | changes))


def bits(tensor: Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.int16).numpy()


class Stopped(Exception):
    pass


def stop_after(n: int) -> Callable[[Progress], None]:
    """A report that ends the run after `n` tensors."""

    def report(progress: Progress) -> None:
        nonlocal n
        n -= 1
        if not n:
            raise Stopped

    return report


def stopped_run(folder: Path) -> Path:
    """A model's folder in which a run was stopped. Returns the file that it was writing."""
    with pytest.raises(Stopped):
        compress_folder(write_model(folder / "plain"), folder / "packed", stop_after(9))
    return staging_folder(folder / "packed") / f"model{SUFFIX}.part"
