# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""Loading experts: each expert's tensors of a checkpoint into one tensor of all, at the drive's speed.

The file's bytes are read into the memory of the kernels' layout, which is never smaller, and rearranged there when all
are read. For 4-bit codes that is one launch for all experts, in place: a tile of 128 columns is 64 bytes in both.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from emberline.kernels.backend import WeightSource
from emberline.kernels.gpu.dequantize import HALVES, TILE, pack_nibbles, pack_scales, scale_words_per_tile
from emberline.kernels.gpu.expert_matrix import FP8_BLOCK, ExpertMatrix
from emberline.kernels.gpu.launch import cdiv

_EXPERTS = 16  # rearranged at a time: bounds the temporary memory
_PROGRAM_TILES = 64  # of a program


def load_expert_matrix(
    experts: list[list[WeightSource]], bias: Tensor | None, dtype: torch.dtype, device: str
) -> ExpertMatrix:
    """Each expert's weights stacked by rows, in the format of the checkpoint. All must have the same."""
    formats = {_format(weight) for weights in experts for weight in weights}
    shapes = {tuple(weight.shape for weight in weights) for weights in experts}
    if len(formats) != 1 or len(shapes) != 1:
        raise ValueError(f"experts differ: {sorted(formats)}, {sorted(shapes)}")
    (kind, group), k = formats.pop(), experts[0][0].shape[1]
    if kind in ("int4", "mxfp4"):
        weight, scale = _load_packed(experts, kind, group, k, device)
    elif kind == "fp8":
        kind = "fp8_blocks" if group else kind
        weight, scale = _load_fp8(experts, bool(group), k, device)
    else:
        return ExpertMatrix("dense", k, _stack(experts, experts, k, dtype, device), bias=bias)
    return ExpertMatrix(kind, k, weight, scale, group, bias)


def _format(weight: Any) -> tuple[str, int]:
    """Kind and columns per scale; kinds of numbers are converted to the activations' dtype."""
    kind = getattr(weight, "kind", "")
    return (kind, weight.group) if kind in ("int4", "mxfp4", "fp8") else ("dense", 0)


def _stack(experts: list[list[Any]], parts: list[list[Any]], cols: int, dtype: torch.dtype, device: str) -> Tensor:
    """Read each expert's parts, one below the other."""
    rows = [weight.shape[0] for weight in experts[0]]
    stacked = torch.empty(len(experts), sum(rows), cols, dtype=dtype, device=device)
    for each, matrix in zip(parts, stacked, strict=True):
        for part, target in zip(each, torch.split(matrix, rows), strict=True):
            part.into(target)
    return stacked


def _load_packed(experts: list[list[Any]], kind: str, group: int, k: int, device: str) -> tuple[Tensor, Tensor]:
    rows = [weight.shape[0] for weight in experts[0]]
    n_experts, n, tiles = len(experts), sum(rows), cdiv(k, TILE)
    codes = torch.empty(n_experts, n, tiles * HALVES, dtype=torch.int16, device=device)
    scale = torch.empty(n_experts, tiles * scale_words_per_tile(kind, group), n, dtype=torch.int32, device=device)
    scale_dtype = torch.uint8 if kind == "mxfp4" else torch.bfloat16
    raw = _first_bytes(codes, n, k // 2)
    raw_scale = _first_bytes(scale, n, k // group * scale_dtype.itemsize).view(scale_dtype)
    for weights, codes_of, scale_of in zip(experts, raw, raw_scale, strict=True):
        parts = zip(weights, torch.split(codes_of, rows), torch.split(scale_of, rows), strict=True)
        for weight, codes_part, scale_part in parts:
            weight.codes.into(codes_part)
            weight.row_scale.into(scale_part)

    def repack() -> None:
        if k % TILE == 0:
            interleave_codes(codes)
        for start in range(0, n_experts, _EXPERTS):
            some = slice(start, start + _EXPERTS)
            scale[some] = pack_scales(raw_scale[some].clone(), kind, group)
            if k % TILE:  # a row of the layout is longer than one of the file
                codes[some] = pack_nibbles(raw[some].clone(), kind)

    experts[0][0].when_read(repack)
    return codes, scale


def _first_bytes(memory: Tensor, rows: int, row_bytes: int) -> Tensor:
    """The beginning of each expert's memory as bytes [experts, rows, row_bytes]."""
    flat = memory.view(len(memory), -1).view(torch.uint8)[:, : rows * row_bytes]
    return flat.view(len(memory), rows, row_bytes)


class _Converted:
    """A tensor that a loader's thread makes on the host; to the loader a weight like any other."""

    kind, order, shift, transposed, location = "converted", None, 0.0, False, None

    def __init__(self, of: Any, make: Callable[[], Tensor]) -> None:
        self.name, self._loader, self._make = of.name, of.loader, make

    def into(self, target: Tensor) -> None:
        if self._loader is None:
            target.copy_(self._make())
        else:
            self._loader.fill(self, target)

    def tensor(self, dtype: torch.dtype, device: str) -> Tensor:
        return self._make()


def _load_fp8(experts: list[list[Any]], blocks: bool, k: int, device: str) -> tuple[Tensor, Tensor]:
    if blocks and any(weight.order is not None or weight.shape[0] % FP8_BLOCK for weight in experts[0]):
        raise ValueError(f"FP8 blocks of experts whose rows are not whole blocks of {FP8_BLOCK}")
    codes = _stack(experts, [[weight.codes for weight in weights] for weights in experts], k, torch.uint8, device)
    n = codes.shape[1]
    shape = (n // FP8_BLOCK, cdiv(k, FP8_BLOCK)) if blocks else (n,)
    scale = torch.empty(len(experts), *shape, dtype=torch.float32, device=device)
    for weights, target in zip(experts, scale, strict=True):
        _Converted(weights[0], lambda weights=weights: _fp8_scales(weights)).into(target)
    return codes, scale


def _fp8_scales(weights: list[Any]) -> Tensor:
    return torch.cat([torch.tensor(weight.fp8_scale()[0]) for weight in weights])


@triton.jit
def _interleave(codes, n_tiles, TILES: tl.constexpr):
    """Half-word h of a tile: codes 32 i + h; in the file codes 2 j and 2 j + 1 are byte j."""
    tile = tl.program_id(0).to(tl.int64) * TILES + tl.arange(0, TILES)
    half = tl.arange(0, 32)
    mask = (tile < n_tiles)[:, None]
    bytes_ptrs = codes.to(tl.pointer_type(tl.uint8)) + (tile * 64)[:, None] + (half // 2)[None, :]
    shift = ((half % 2) * 4)[None, :]
    halves = tl.zeros([TILES, 32], tl.int32)
    for i in tl.static_range(4):
        code = (tl.load(bytes_ptrs + 16 * i, mask=mask, other=0).to(tl.int32) >> shift) & 15
        halves |= code << (4 * i)
    tl.debug_barrier()  # every thread has read before one writes
    tl.store(codes + (tile * 32)[:, None] + half[None, :], halves.to(tl.int16), mask=mask)


def interleave_codes(halves: Tensor) -> None:
    """Put 4-bit codes that lie as in a file into the layout of `dequantize.pack_nibbles`, in place. Contiguous."""
    n_tiles = halves.numel() // HALVES
    _interleave[(cdiv(n_tiles, _PROGRAM_TILES),)](halves, n_tiles, TILES=_PROGRAM_TILES)
