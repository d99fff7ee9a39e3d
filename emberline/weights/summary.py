"""The size and the number format of a model's weights, as lists of models show them."""

import re
from collections import Counter
from collections.abc import Iterable
from math import prod
from pathlib import Path

import msgspec

from emberline.weights.gguf import GGUFFile
from emberline.weights.model_config import BadCheckpoint
from emberline.weights.tensors import Weight

# Mixtures of formats, by the number that llama.cpp writes into `general.file_type`.
_MIXTURES = {14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M"}


class WeightSummary(msgspec.Struct, frozen=True):
    n_parameters: int
    n_bytes: int
    quantization: str  # the format of most weights: "Q4_K_M", "BF16", "FP8", "INT4", …


def summarize(weights: Iterable[tuple[Weight, int]], path: Path | None = None) -> WeightSummary:
    """Summary of weights, each with the number of tensors that it stands for; `path`: their file, if there is one."""
    n_bytes, by_format = 0, Counter[str]()
    for weight, n_tensors in weights:
        n_bytes += n_tensors * weight.nbytes
        by_format[weight.kind] += n_tensors * prod(weight.shape)
    most = max(by_format, key=by_format.__getitem__)
    return WeightSummary(by_format.total(), n_bytes, _mixture(path) or most.upper())


class PartSize(msgspec.Struct, frozen=True):
    """The weights of one part of a model, such as attention."""

    name: str
    n_bytes: int  # decoded
    stored_bytes: int  # on disk


# The beginnings of tensor names within a layer, and of those outside of layers.
_PARTS = (
    ("experts", r"ffn_\w+_exps"),
    ("attention", r"attn_(?!norm)"),
    ("feed-forward", r"ffn_(?!norm|gate_inp)"),
    ("embedding", r"token_embd|position_embd"),
    ("head", r"output\."),
    ("other", r""),
)


def part_sizes(weights: Iterable[Weight]) -> list[PartSize]:
    """Bytes of each part that a model has, decoded and on disk."""
    found: dict[str, list[int]] = {}
    for weight in weights:
        inner = re.sub(r"^blk\.\d+\.", "", weight.name)
        name = next(name for name, pattern in _PARTS if re.match(pattern, inner))
        sizes = found.setdefault(name, [0, 0])
        sizes[0] += weight.nbytes
        sizes[1] += weight.stored_bytes
    return [PartSize(name, *found[name]) for name, _ in _PARTS if name in found]


def _mixture(path: Path | None) -> str:
    """The name of the mixture of formats in a GGUF file; empty if there is none."""
    if path is None or not path.is_file():
        return ""
    try:
        file = GGUFFile.open(path)
    except (OSError, BadCheckpoint):
        return ""
    mixture = file.metadata.get("general.file_type")
    file.close()
    return _MIXTURES.get(mixture, "") if isinstance(mixture, int) else ""
