# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""Loading experts: each expert's tensors of a checkpoint into one tensor of all, at the drive's speed.

The file's bytes are read into the memory of the kernels' layout, which is never smaller, and rearranged when all are
read, some experts at a time.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from emberline.kernels.backend import WeightSource
from emberline.kernels.gpu.dequantize import HALVES, TILE, pack_nibbles, pack_scales
from emberline.kernels.gpu.expert_matrix import (
    FP8_BLOCK,
    ROW_BLOCK,
    ExpertMatrix,
    divide_codes,
    divide_words,
    empty_packed,
)
from emberline.kernels.gpu.launch import cdiv

_EXPERTS = 4  # rearranged at a time: bounds the temporary memory
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
        return _load_packed(experts, kind, group, k, bias, device)
    if kind == "fp8":
        weight, scale = _load_fp8(experts, bool(group), k, device)
        return ExpertMatrix("fp8_blocks" if group else kind, k, weight, scale, group, bias)
    return ExpertMatrix("dense", k, _stack(experts, experts, k, dtype, device), bias=bias)


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


def _load_packed(
    experts: list[list[Any]], kind: str, group: int, k: int, bias: Tensor | None, device: str
) -> ExpertMatrix:
    rows = [weight.shape[0] for weight in experts[0]]
    n_experts, n = len(experts), sum(rows)
    matrix = empty_packed(kind, n_experts, n, k, group, bias, device)
    codes, scale = matrix.weight, matrix.scale
    assert scale is not None
    scale_dtype = torch.uint8 if kind == "mxfp4" else torch.bfloat16
    raw = _first_bytes(codes, n, k // 2)
    raw_scale = _first_bytes(scale, n, k // group * scale_dtype.itemsize).view(scale_dtype)
    for weights, codes_of, scale_of in zip(experts, raw, raw_scale, strict=True):
        parts = zip(weights, torch.split(codes_of, rows), torch.split(scale_of, rows), strict=True)
        for weight, codes_part, scale_part in parts:
            weight.codes.into(codes_part)
            weight.row_scale.into(scale_part)

    def repack() -> None:
        for start in range(0, n_experts, _EXPERTS):
            some = slice(start, start + _EXPERTS)
            given = raw[some].clone()
            if k % TILE:  # a row of the layout is longer than one of the file
                codes[some] = divide_codes(pack_nibbles(given, kind))
            else:
                interleave_codes(given, codes[some])
            scale[some] = divide_words(pack_scales(raw_scale[some].clone(), kind, group))

    experts[0][0].when_read(repack)
    return matrix


def _first_bytes(memory: Tensor, rows: int, row_bytes: int) -> Tensor:
    """The beginning of each expert's memory as bytes [experts, rows, row_bytes]."""
    flat = memory.view(len(memory), -1).view(torch.uint8)[:, : rows * row_bytes]
    return flat.view(len(memory), rows, row_bytes)


class _Converted:
    """A tensor that a loader's thread makes on the host; to the loader a weight like any other."""

    kind, raw, order, shift, transposed, location = "converted", None, None, 0.0, False, None

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
def _interleave(
    raw, codes, n_tiles, row_tiles, n, blocks, ROWS: tl.constexpr, HALVES_: tl.constexpr, TILES: tl.constexpr
):
    """Half-word h of a tile: codes 32 i + h; in the file codes 2 j and 2 j + 1 are byte j."""
    tile = tl.program_id(0).to(tl.int64) * TILES + tl.arange(0, TILES)
    half = tl.arange(0, HALVES_)
    mask = (tile < n_tiles)[:, None]
    bytes_ptrs = raw + (tile * (2 * HALVES_))[:, None] + (half // 2)[None, :]
    shift = ((half % 2) * 4)[None, :]
    halves = tl.zeros([TILES, HALVES_], tl.int32)
    for i in tl.static_range(4):
        code = (tl.load(bytes_ptrs + 16 * i, mask=mask, other=0).to(tl.int32) >> shift) & 15
        halves |= code << (4 * i)
    expert, row, column = tile // row_tiles // n, tile // row_tiles % n, tile % row_tiles
    to = ((expert * blocks + row // ROWS) * row_tiles + column) * ROWS + row % ROWS
    tl.store(codes + (to * HALVES_)[:, None] + half[None, :], halves.to(tl.int16), mask=mask)


def interleave_codes(raw: Tensor, codes: Tensor) -> None:
    """Codes as they lie in a file, uint8 [experts, n, k / 2], to the layout of an `ExpertMatrix`. k: whole tiles."""
    (experts, n, row_bytes), blocks = raw.shape, codes.shape[1]
    row_tiles = row_bytes // (2 * HALVES)
    n_tiles = experts * n * row_tiles
    _interleave[(cdiv(n_tiles, _PROGRAM_TILES),)](
        raw, codes, n_tiles, row_tiles, n, blocks, ROWS=ROW_BLOCK, HALVES_=HALVES, TILES=_PROGRAM_TILES
    )
