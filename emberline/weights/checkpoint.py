"""A model on disk, whatever its format: its description and its weights under canonical names."""

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from emberline.weights import names
from emberline.weights.config import ModelConfig
from emberline.weights.errors import BadCheckpoint
from emberline.weights.tensor import Weight

_SAMPLE_BYTES = 256  # read at the start, middle and end of every tensor


class Checkpoint:
    """Weights stay in the mapped file until asked for. What they mean is the same for every format:

    names are GGUF's, shapes [out, in]; rope pairs dimension i with i + head_dim / 2; norms multiply as they are.
    """

    def __init__(self, config: ModelConfig, weights: dict[str, Weight], close: Callable[[], None]) -> None:
        names.check(config, weights)
        self.config = config
        self.fingerprint = _fingerprint(config, weights)
        self._weights = weights
        self._close = close

    @property
    def names(self) -> Iterable[str]:
        return self._weights.keys()

    def has(self, name: str) -> bool:
        return name in self._weights

    def weight(self, name: str) -> Weight:
        return self._weights[name]

    def close(self) -> None:
        """Forgets the weights; a file is unmapped when the last view of it is gone."""
        self._weights = {}
        self._close()


def open_checkpoint(path: Path) -> Checkpoint:
    """A GGUF file, or a Hugging Face folder with config.json and safetensors; else BadCheckpoint."""
    from emberline.weights.gguf_checkpoint import open_gguf
    from emberline.weights.hf_checkpoint import open_folder

    path = Path(path)
    try:
        return open_folder(path) if path.is_dir() else open_gguf(path)
    except OSError as error:
        raise BadCheckpoint(f"{path.name}: {error.strerror or error}") from None


def _fingerprint(config: ModelConfig, weights: dict[str, Weight]) -> str:
    """Identifies the content, cheaply: the description, every tensor's form, and samples of its bytes."""
    digest = hashlib.blake2b(msgspec.json.encode(config), digest_size=16)
    for name in sorted(weights):
        weight = weights[name]
        digest.update(f"{name} {weight.kind} {weight.shape}".encode())
        raw = weight.raw.reshape(-1)
        middle = len(raw) // 2
        for start in 0, middle, max(0, len(raw) - _SAMPLE_BYTES):
            digest.update(raw[start : start + _SAMPLE_BYTES].tobytes())
    return digest.hexdigest()
