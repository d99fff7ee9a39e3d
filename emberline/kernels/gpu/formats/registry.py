"""The weight formats that GPU kernels multiply, in the order in which they are asked to load a matrix.

A format is registered here, and nowhere else is asked which format a matrix has. What a checkpoint's readers know of
the same formats (bytes, slices of ranks) is in `emberline.weights.tensors`, by `Weight.kind`. Compression on disk is
no format of its own: `emberline.weights.lossless_files` reads numbers of the kind that they had.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from emberline.kernels.backend import WeightSource
from emberline.kernels.gpu.formats.dense import Dense
from emberline.kernels.gpu.formats.fp8 import FP8
from emberline.kernels.gpu.formats.gguf import Affine
from emberline.kernels.gpu.formats.lossless import Lossless
from emberline.kernels.gpu.formats.matrix_format import Matrix, MatrixFormat
from emberline.kernels.gpu.formats.packed import Packed

LOSSLESS = Lossless()
STORED: tuple[MatrixFormat, ...] = (FP8(), Packed(), Affine(), Dense())  # as a checkpoint has them
_BY_MATRIX = {each.matrix: each for each in (LOSSLESS, *STORED)}


def format_of(matrix: Any) -> MatrixFormat:
    return _BY_MATRIX[type(matrix)]


def load_stacked(
    weights: Sequence[WeightSource], bias: Tensor | None, dtype: torch.dtype, device: str, compress: bool = False
) -> Matrix:
    """Weights stacked by rows, in the first format that takes them. compress: pack BF16 losslessly."""
    for each in (LOSSLESS, *STORED) if compress else STORED:
        matrix = each.load(weights, bias, dtype, device)
        if matrix is not None:
            return matrix
    raise AssertionError("dense matrices take any weights")


def workspace_needs(matrices: Iterable[Any]) -> dict[str, bool]:
    """Arguments of `WorkspaceSizes.of`: the optional regions that products with these matrices use."""
    needed = frozenset[str]().union(*(each.workspace_needs for each in _formats(matrices)))
    return {name: name in needed for name in ("quantized", "fp8", "sliced")}


def loading_bytes(matrices: Iterable[Any]) -> int:
    """Bytes of a device that loading these matrices takes beside them, until all are loaded."""
    return max((each.loading_bytes for each in _formats(matrices)), default=0)


def _formats(matrices: Iterable[Any]) -> set[MatrixFormat]:
    """The formats of these matrices; experts' matrices have none."""
    return {each for each in (_BY_MATRIX.get(type(matrix)) for matrix in matrices) if each is not None}


def n_fp8(matrix: Any) -> int:
    """Number of a matrix's weights that multiply FP8 activations."""
    each = _BY_MATRIX.get(type(matrix))
    return 0 if each is None else each.n_fp8(matrix)
