"""A Hugging Face folder as a checkpoint: config.json, and safetensors in one file or in shards."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import cast

import msgspec

from emberline.weights.encoder_checkpoint import EncoderConfig
from emberline.weights.expert_tensors import arrange
from emberline.weights.hf_config import read_config
from emberline.weights.lossless_files import LosslessFile, Manifest, config_digest, is_compressed, open_compressed
from emberline.weights.model_config import BadCheckpoint, ModelConfig
from emberline.weights.quantization import join_quantized, read_quantization
from emberline.weights.safetensors_file import KINDS, QUANTIZED_KINDS, SafetensorsFile
from emberline.weights.task_config import read_json, task_of
from emberline.weights.tensor_names import canonical
from emberline.weights.tensor_shapes import check_tensors
from emberline.weights.tensors import Bytes, CheckpointFiles, Weight
from emberline.weights.vision_names import VISION_TENSOR

TensorFile = SafetensorsFile | LosslessFile
_INDEX = "model.safetensors.index.json"


def folder_config(folder: Path) -> ModelConfig:
    """The configuration without the weights, which alone tell whether there are biases."""
    document = read_json(folder, "config.json")
    config = read_config(document, read_json(folder, "generation_config.json", optional=True))
    read_quantization(document)  # rejects what is not supported before any file is read
    embeds = task_of(folder).task != "generate" and not isinstance(config, EncoderConfig)
    return msgspec.structs.replace(config, tie_embeddings=True) if embeds else config  # it needs no output matrix


def read_folder(folder: Path) -> CheckpointFiles:
    """Map a folder's safetensors files and check that they hold exactly one model's tensors."""
    config = folder_config(folder)
    quantization = read_quantization(read_json(folder, "config.json"))
    files, manifest = open_files(folder)
    found: dict[str, Weight] = {}
    for file in files:
        for weight in _weights(file, config):
            if weight.name in found:
                raise BadCheckpoint(f"tensor {weight.name!r} is in two files")
            found[weight.name] = weight
    weights = join_quantized(found, quantization)
    config = msgspec.structs.replace(config, qkv_bias="blk.0.attn_q.bias" in weights)
    check_tensors(config, weights)
    is_known = manifest is not None and manifest.config == config_digest(config)

    def close() -> None:
        for file in files:
            file.close()

    fingerprint = manifest.fingerprint if manifest and is_known else None
    return CheckpointFiles(config, weights, close, fingerprint, _tower(files))


def _tower(files: Iterable[TensorFile]) -> dict[str, Weight]:
    """Tensors of a vision tower, by the names that the files have for them."""
    found: dict[str, Weight] = {}
    for file in files:
        for key, tensor in file.tensors.items():
            if VISION_TENSOR.match(key) and tensor.dtype in KINDS:
                raw, location = file.rows_of(key)
                found[key] = Weight(key, tensor.shape or (1,), KINDS[tensor.dtype], cast(Bytes, raw), location=location)
    return found


def open_files(folder: Path) -> tuple[Sequence[TensorFile], Manifest | None]:
    """The files that hold a folder's tensors, and the manifest if they are compressed."""
    if is_compressed(folder):
        return open_compressed(folder)
    return [SafetensorsFile.open(folder / name) for name in shard_names(folder)], None


def shard_names(folder: Path) -> list[str]:
    """Names of the safetensors files, which must be in the folder itself."""
    if not (folder / _INDEX).is_file():
        names = sorted(path.name for path in folder.glob("*.safetensors"))
        if len(names) != 1:
            raise BadCheckpoint(f"{folder.name} has {len(names)} safetensors files and no {_INDEX}")
        return names
    weight_map = read_json(folder, _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadCheckpoint(f"{_INDEX} has no weight_map")
    for name in weight_map.values():
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+\.safetensors", name):
            raise BadCheckpoint(f"{_INDEX} names {str(name)[:80]!r}, not a safetensors file of this folder")
    names = sorted(set(weight_map.values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        shown = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        raise BadCheckpoint(
            f"{len(missing)} of the {len(names)} files that {_INDEX} names are not in {folder.name}: {shown};"
            " download them again"
        )
    return names


def _weights(file: TensorFile, config: ModelConfig) -> list[Weight]:
    weights: list[Weight] = []
    for key, tensor in file.tensors.items():
        name = canonical(key, config)
        if name is None:
            continue
        kind = KINDS.get(tensor.dtype) or QUANTIZED_KINDS.get(tensor.dtype)
        if kind is None or len(tensor.shape) > 4:
            known = ", ".join((*KINDS, *QUANTIZED_KINDS))
            raise BadCheckpoint(f"tensor {key!r} is {tensor.dtype} {tensor.shape}, not up to 4-D of {known}")
        shape = tensor.shape or (1,)
        raw, location = file.rows_of(key)
        if len(shape) == 4:  # GPT-OSS: the blocks of a row
            shape = (*shape[:2], shape[2] * shape[3])
        if tensor.dtype == "I32":
            shape = (*shape[:-1], 4 * shape[-1])
        shift = 1.0 if config.architecture == "gemma3" and name.endswith("norm.weight") else 0.0
        weights += arrange(Weight(name, shape, kind, cast(Bytes, raw), shift=shift, location=location), config)
    return weights
