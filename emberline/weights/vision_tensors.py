"""The tensors of a checkpoint's vision tower and projector: BF16, FP16 or FP32, also beside a quantized model."""

from collections.abc import Iterable
from pathlib import Path
from typing import cast

from emberline.weights.hf_checkpoint import TensorFile, open_files
from emberline.weights.mmproj import MMProj
from emberline.weights.model_config import BadCheckpoint
from emberline.weights.safetensors_file import KINDS
from emberline.weights.tensors import Bytes, Weight
from emberline.weights.vision_names import vision_tensor


def read_vision_tensors(folder: Path, family: str) -> dict[str, Weight]:
    """The tower's tensors of a folder, or of the mmproj file beside a GGUF file, still in the mapped files. Raises
    BadCheckpoint."""
    found: dict[str, Weight] = {}
    if folder.is_file():
        mmproj = MMProj.beside(folder)
        return found if mmproj is None else mmproj.tensors()
    for file in open_files(folder)[0]:
        for weight in _weights(file, family):
            if weight.name in found:
                raise BadCheckpoint(f"tensor {weight.name!r} of the vision tower is there twice")
            found[weight.name] = weight
    return found


def _weights(file: TensorFile, family: str) -> Iterable[Weight]:
    for key, tensor in file.tensors.items():
        name = vision_tensor(key, family)
        if name is None:
            continue
        if tensor.dtype not in KINDS:
            raise BadCheckpoint(f"tensor {key[:120]!r} is {tensor.dtype}; vision towers are read in {', '.join(KINDS)}")
        shape = tensor.shape or (1,)
        raw, location = file.rows_of(key)
        yield Weight(name, shape, KINDS[tensor.dtype], cast(Bytes, raw), location=location)
