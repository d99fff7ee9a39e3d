"""The tensors of a checkpoint's vision tower and projector: BF16, FP16 or FP32, also beside a quantized model."""

from collections.abc import Iterable
from pathlib import Path

from emberline.weights.hf_checkpoint import KINDS, SafetensorsFile, shard_names
from emberline.weights.mmproj import MMProj
from emberline.weights.model_config import BadCheckpoint
from emberline.weights.tensors import FileLocation, Weight
from emberline.weights.vision_names import vision_tensor


def read_vision_tensors(folder: Path, family: str) -> dict[str, Weight]:
    """The tower's tensors of a folder, or of the mmproj file beside a GGUF file, still in the mapped files. Raises
    BadCheckpoint."""
    found: dict[str, Weight] = {}
    if folder.is_file():
        mmproj = MMProj.beside(folder)
        return found if mmproj is None else mmproj.tensors()
    for shard in shard_names(folder):
        file = SafetensorsFile.open(folder / shard)
        for weight in _weights(file, family):
            if weight.name in found:
                raise BadCheckpoint(f"tensor {weight.name!r} of the vision tower is there twice")
            found[weight.name] = weight
    return found


def _weights(file: SafetensorsFile, family: str) -> Iterable[Weight]:
    for key, tensor in file.tensors.items():
        name = vision_tensor(key, family)
        if name is None:
            continue
        if tensor.dtype not in KINDS:
            raise BadCheckpoint(f"tensor {key[:120]!r} is {tensor.dtype}; vision towers are read in {', '.join(KINDS)}")
        shape = tensor.shape or (1,)
        raw = file.bytes_of(tensor).reshape(shape[0], -1)
        yield Weight(name, shape, KINDS[tensor.dtype], raw, location=FileLocation(file.path, file.offset_of(tensor)))
