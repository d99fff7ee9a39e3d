"""A model on disk, whatever its format: its description and its weights under canonical names."""

import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from emberline.weights import tensors as names
from emberline.weights.model_config import BadCheckpoint, ModelConfig
from emberline.weights.tensors import Weight

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
    _announce(weights)
    for name in sorted(weights):
        weight = weights[name]
        digest.update(f"{name} {weight.kind} {weight.shape}".encode())
        raw = weight.raw.reshape(-1)
        for start in _samples(raw.nbytes):
            digest.update(raw[start : start + _SAMPLE_BYTES].tobytes())
    return digest.hexdigest()


def _samples(n_bytes: int) -> tuple[int, int, int]:
    return 0, n_bytes // 2, max(0, n_bytes - _SAMPLE_BYTES)


def _announce(weights: dict[str, Weight]) -> None:
    """Have all samples read at once: one after the other, a cold drive takes a second for them."""
    if not hasattr(os, "posix_fadvise"):
        return
    opened: dict[Path, int] = {}
    try:
        for weight in weights.values():
            if weight.place is None:
                continue
            path, offset = weight.place
            if path not in opened:
                opened[path] = os.open(path, os.O_RDONLY)
            for start in _samples(weight.raw.nbytes):
                os.posix_fadvise(opened[path], offset + start, _SAMPLE_BYTES, os.POSIX_FADV_WILLNEED)
    except OSError:
        return  # they are read all the same
    finally:
        for descriptor in opened.values():
            os.close(descriptor)
