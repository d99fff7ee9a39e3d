"""Opening a checkpoint of any supported format: its configuration, its weights and a fingerprint of both."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

import msgspec

from emberline.weights.gguf import read_gguf
from emberline.weights.hf_checkpoint import read_folder
from emberline.weights.mmproj import MMProj
from emberline.weights.model_config import BadCheckpoint, ModelConfig
from emberline.weights.readahead import will_need
from emberline.weights.tensors import CheckpointFiles, Weight

_SAMPLE_BYTES = 256  # hashed at the start, middle and end of every tensor


class Checkpoint:
    """A model on disk. Weights stay in the memory-mapped file until they are requested.

    Conventions are the same for every format: tensor names are GGUF's, shapes are [out, in], RoPE pairs dimension i
    with i + head_dim / 2, and norm weights multiply as stored.
    """

    def __init__(self, files: CheckpointFiles, fingerprint: str | None = None) -> None:
        self.config: ModelConfig = files.config
        self.fingerprint = (
            fingerprint or files.fingerprint or _fingerprint(files.config, {**files.weights, **files.tower})
        )
        self._weights = files.weights
        self._close = files.close

    @property
    def names(self) -> Iterable[str]:
        return self._weights.keys()

    def has(self, name: str) -> bool:
        return name in self._weights

    def weight(self, name: str) -> Weight:
        return self._weights[name]

    def close(self) -> None:
        """Drop the weights; a file is unmapped when the last view of it is released."""
        self._weights = {}
        self._close()


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a GGUF file, or a Hugging Face folder with config.json and safetensors; raises BadCheckpoint."""
    path = Path(path)
    try:
        if path.is_dir():
            return Checkpoint(read_folder(path))
        files, mmproj = read_gguf(path), MMProj.beside(path)
        return Checkpoint(files if mmproj is None else files._replace(tower=mmproj.tensors()))
    except OSError as error:
        raise BadCheckpoint(f"{path.name}: {error.strerror or error}") from None


def _fingerprint(config: ModelConfig, weights: dict[str, Weight]) -> str:
    """Identify the content by the configuration, and each tensor's type, shape and samples of its bytes."""
    digest = hashlib.blake2b(msgspec.json.encode(config), digest_size=16)
    will_need(
        (part.location.path, part.location.offset + start, _SAMPLE_BYTES)
        for weight in weights.values()
        for part in weight.stored
        if part.location is not None
        for start in _sample_offsets(part.raw.nbytes)
    )
    for name in sorted(weights):
        weight = weights[name]
        digest.update(f"{name} {weight.kind} {weight.shape}".encode())
        for part in weight.stored:
            for start in _sample_offsets(part.raw.nbytes):
                digest.update(part.sample(start, _SAMPLE_BYTES))
    return digest.hexdigest()


def _sample_offsets(n_bytes: int) -> tuple[int, int, int]:
    return 0, n_bytes // 2, max(0, n_bytes - _SAMPLE_BYTES)
