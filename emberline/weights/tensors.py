"""One weight of a checkpoint: bytes in the file until somebody asks for numbers."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from emberline.weights.model_config import BadCheckpoint, ModelConfig
from emberline.weights.quantization import FORMATS, Bytes, Floats, floats

if TYPE_CHECKING:
    import torch

GROUP = 32  # weights that share a scale and an offset in the affine form
_CHUNK_WEIGHTS = 1 << 24  # float32 numbers held at once while a quantised weight becomes another dtype


@dataclass(frozen=True, slots=True)
class Affine:
    """`w = scale * code + offset`, scale and offset shared by GROUP neighbours of a row."""

    codes: Bytes  # [rows, cols]; 0..15 when bits == 4, else 0..255
    scale: Floats  # [rows, cols / GROUP]
    offset: Floats  # [rows, cols / GROUP]
    bits: int  # 4 or 8

    def dense(self) -> Floats:
        grouped = self.codes.reshape(*self.scale.shape, GROUP)
        return (grouped * self.scale[..., None] + self.offset[..., None]).reshape(self.codes.shape)


class Place(NamedTuple):
    """Where a weight's bytes lie."""

    path: Path
    offset: int


@dataclass(frozen=True, slots=True)
class Weight:
    name: str
    shape: tuple[int, ...]  # (rows, cols) or (n,)
    kind: str  # a key of quants.FORMATS
    raw: Bytes  # [rows, row_bytes], a view of the mapped file; a vector is n rows of one number
    order: NDArray[np.intp] | None = None  # row i of the weight is row order[i] of the file
    shift: float = 0.0  # added to every number (Hugging Face's Gemma stores norms minus one)
    place: Place | None = None  # of `raw`, for those who read the file themselves

    def _rows(self, start: int = 0, stop: int | None = None) -> Bytes:
        return self.raw[start:stop] if self.order is None else self.raw[self.order[start:stop]]

    def dense(self) -> Floats:
        """The numbers as float32."""
        out = floats(self.kind, self._rows()).reshape(self.shape)
        return out + np.float32(self.shift) if self.shift else out

    def affine(self) -> Affine | None:
        """The group-32 affine form: exact, but for Q6_K, whose groups of 16 are requantised to 8 bits.

        None where there is no such form: the float kinds.
        """
        fmt = FORMATS[self.kind]
        if fmt.unpack is None or len(self.shape) != 2:
            return None
        if fmt.group != GROUP:
            return _requantise(self.dense())
        rows, cols = self.shape
        codes, scale, offset = fmt.unpack(self._rows().reshape(-1, fmt.block_bytes))
        groups = (rows, cols // GROUP)
        return Affine(codes.reshape(rows, cols), scale.reshape(groups), offset.reshape(groups), fmt.bits)

    def into(self, target: "torch.Tensor") -> None:
        """The numbers to where they are wanted, in that tensor's type."""
        target.copy_(self.tensor(target.dtype, "cpu"))

    def tensor(self, dtype: "torch.dtype", device: "torch.device | str" = "cpu") -> "torch.Tensor":
        """The numbers as a torch tensor; half precision is not detoured through float32."""
        import torch

        same = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}.get(self.kind)
        if same is not None and not self.shift:
            plain = np.array(self._rows())  # a copy: torch wants writable memory of its own
            return torch.from_numpy(plain).view(same).view(self.shape).to(device=device, dtype=dtype)
        out = torch.empty(self.shape, dtype=dtype, device=device)
        step = max(1, _CHUNK_WEIGHTS // max(1, int(np.prod(self.shape[1:]))))
        for start in range(0, self.shape[0], step):
            part = floats(self.kind, self._rows(start, start + step)).reshape(-1, *self.shape[1:])
            out[start : start + step] = torch.from_numpy(part + np.float32(self.shift))
        return out


def _requantise(dense: Floats) -> Affine:
    """Float32 [rows, cols] to 8 bits, each group of GROUP spanning its own least to greatest value."""
    rows, cols = dense.shape
    grouped = dense.reshape(rows, cols // GROUP, GROUP)
    low = grouped.min(axis=2)
    scale = (grouped.max(axis=2) - low) / np.float32(255)
    step = np.where(scale == 0, np.float32(1), scale)
    with np.errstate(invalid="ignore"):  # a NaN in the file stays the model's problem, not a warning of ours
        codes = np.rint((grouped - low[..., None]) / step[..., None]).astype(np.uint8)
    return Affine(codes.reshape(rows, cols), scale, low, 8)


Shape = tuple[int, ...]


def shapes(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    """Every tensor a model of this description has, and its shape [out, in]."""
    hidden = config.hidden_size
    yield "token_embd.weight", (config.vocab_size, hidden)
    yield "output_norm.weight", (hidden,)
    if not config.tie_embeddings:
        yield "output.weight", (config.vocab_size, hidden)
    for layer in range(config.n_layers):
        for part, shape in _layer(config):
            yield f"blk.{layer}.{part}", shape


def _layer(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    hidden, q, kv = config.hidden_size, config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    yield "attn_norm.weight", (hidden,)
    for part, rows in ("attn_q", q), ("attn_k", kv), ("attn_v", kv):
        yield f"{part}.weight", (rows, hidden)
        if config.qkv_bias:
            yield f"{part}.bias", (rows,)
    yield "attn_output.weight", (hidden, q)
    if config.qk_norm:
        yield "attn_q_norm.weight", (config.head_dim,)
        yield "attn_k_norm.weight", (config.head_dim,)
    if config.post_norms:
        yield "post_attention_norm.weight", (hidden,)
        yield "post_ffw_norm.weight", (hidden,)
    yield "ffn_norm.weight", (hidden,)
    yield "ffn_gate.weight", (config.mlp_size, hidden)
    yield "ffn_up.weight", (config.mlp_size, hidden)
    yield "ffn_down.weight", (hidden, config.mlp_size)


def check(config: ModelConfig, found: dict[str, Weight]) -> None:
    """Refuses a checkpoint with tensors missing, left over or of another shape: any would give wrong numbers."""
    if 9 * config.n_layers > len(found):  # bounds the loop below before it starts
        raise BadCheckpoint(f"{len(found)} tensors cannot make {config.n_layers} layers")
    if config.n_heads % config.n_kv_heads:
        raise BadCheckpoint(f"{config.n_heads} query heads cannot share {config.n_kv_heads} KV heads")
    wanted = dict(shapes(config))
    for name, shape in wanted.items():
        if name not in found:
            raise BadCheckpoint(f"tensor {name!r} is missing")
        if found[name].shape != shape:
            raise BadCheckpoint(f"tensor {name!r} has shape {found[name].shape}, the model's description wants {shape}")
    extra = [name for name in found if name not in wanted]
    if extra:
        raise BadCheckpoint(f"tensor {extra[0]!r} has no place in a {config.architecture} model")
