"""The interface of a weight format on a GPU: how its matrices are loaded, multiplied and decoded, and what that needs.

A format overrides what its kernels do better than the default, which launches norm, product and gate one after the
other and decodes the matrix in pieces for the library. Nothing outside `formats` asks which format a matrix has.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from emberline.kernels.backend import WeightSource
from emberline.kernels.gpu.elementwise import add_norm, gated_activation
from emberline.kernels.gpu.gemm import batch_invariant_matmul
from emberline.kernels.gpu.launch import cdiv

GATES = ("", "silu", "gelu_tanh")
DEQUANTIZED_BYTES = 32 << 20  # of a matrix, decoded at a time for cuBLAS
SLICED_BYTES = 64 << 20  # the same where MLPs are computed in slices; or partial sums
SLICE_ROWS = 4096  # of gate and up, decoded at a time where an MLP is computed in slices of its neurons


class WorkspaceMemory(Protocol):
    """The part of `backend.workspace.Workspace` that products use."""

    matmul: Tensor  # float32 partial sums of split-K
    counters: Tensor

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor: ...


class Matrix(Protocol):
    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def bias(self) -> Tensor | None: ...


@dataclass(frozen=True, slots=True)
class Fusion:
    """Operations that are fused with a product: out = rms_norm(x) · matrixᵀ + bias, then gated, or added to out."""

    norm: Tensor | None = None
    eps: float = 0.0
    gate: int = 0  # index into GATES
    add: bool = False


@dataclass(frozen=True, slots=True)
class Launcher:
    """The arguments that all products are launched with, and the launches that formats share.

    deterministic: batch-invariant kernels only, so that a token's result does not depend on the rest of the batch.
    pdl: use programmatic dependent launch.
    """

    workspace: WorkspaceMemory
    deterministic: bool
    pdl: bool

    def normed(self, x: Tensor, fusion: Fusion) -> Tensor:
        if fusion.norm is None:
            return x
        normed = self.workspace.take("normed", *x.shape)
        add_norm(x, None, fusion.norm, normed, fusion.eps, pdl=self.pdl)
        return normed

    def library(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, add: bool) -> None:
        """Multiply by cuBLAS, or by the batch-invariant matmul in deterministic mode."""
        if self.deterministic:
            batch_invariant_matmul(x, weight, bias, out, add, pdl=self.pdl)
        elif out.dtype != x.dtype:
            torch.ops.aten.mm.dtype_out(x, weight.T, out.dtype, out=out)
            if bias is not None:
                out.add_(bias)
        elif add:
            out.addmm_(x, weight.T)
            if bias is not None:
                out.add_(bias)
        elif bias is not None:
            torch.addmm(bias, x, weight.T, out=out)
        else:
            torch.mm(x, weight.T, out=out)


class MatrixFormat:
    """One format. `x` of a product is [m, k], or what the format's own `gated` has returned."""

    matrix: ClassVar[type[Any]]  # the class of its matrices
    workspace_needs: ClassVar[frozenset[str]] = frozenset({"quantized"})  # see `workspace.WorkspaceSizes`
    loading_bytes: ClassVar[int] = 0  # that loading takes beside the matrices, while steps are prepared already
    sliced: ClassVar[bool] = False  # all tokens of a step are multiplied by some rows of gate and up at a time
    beside_experts: ClassVar[bool] = False  # few tokens are multiplied on a second stream, with memory of its own

    def load(
        self, weights: Sequence[WeightSource], bias: Tensor | None, dtype: torch.dtype, device: str
    ) -> Matrix | None:
        """Weights stacked by rows in the format's layout. Returns None if they are of another format."""
        raise NotImplementedError

    def write_rows(
        self, matrix: Any, out: Tensor, *, ids: Tensor | None = None, first: int = 0, factor: float = 1.0
    ) -> None:
        """out [rows, k] = `factor` times the rows `ids` of the matrix, or the rows from `first` on."""
        raise NotImplementedError

    def embed(self, matrix: Any, ids: Tensor, factor: float, out: Tensor, first: int | None) -> None:
        """Embedding lookup. first: of several ranks, the number of the matrix's first row; rows of others are zero."""
        if first is None:
            self.write_rows(matrix, out, ids=ids, factor=factor)
            return
        own = ids - first
        exists = (own >= 0) & (own < matrix.shape[0])
        self.write_rows(matrix, out, ids=own * exists, factor=factor)
        out.mul_(exists[:, None])

    def multiply(
        self, on: Launcher, x: Any, matrix: Any, out: Tensor, fusion: Fusion, after_attention: bool = False
    ) -> None:
        """Compute out [m, n] from x by the fastest kernels. Called in fast mode only."""
        self.unfused(on, x, matrix, out, fusion)

    def gated(self, on: Launcher, x: Tensor, matrix: Any, fusion: Fusion, consumer: Matrix) -> Any:
        """The gated product, in the form that the product with `consumer` reads."""
        activated = on.workspace.take("activated", len(x), consumer.shape[1])
        if on.deterministic:
            self.unfused(on, x, matrix, activated, fusion)
        else:
            self.multiply(on, x, matrix, activated, fusion)
        return activated

    def n_fp8(self, matrix: Any) -> int:
        """Number of the matrix's weights that multiply FP8 activations."""
        return 0

    def unfused(self, on: Launcher, x: Tensor, matrix: Any, out: Tensor, fusion: Fusion) -> None:
        """Launch norm, product and gate one after the other."""
        x = on.normed(x, fusion)
        if not fusion.gate:
            self.product(on, x, matrix, out, fusion.add)
            return
        gate_up = on.workspace.take("gate_up", len(x), matrix.shape[0])
        self.product(on, x, matrix, gate_up, False)
        gated_activation(gate_up, GATES[fusion.gate], out, pdl=on.pdl)

    def product(self, on: Launcher, x: Tensor, matrix: Any, out: Tensor, add: bool) -> None:
        """Multiply by the library, the matrix decoded in pieces."""
        n, k = matrix.shape
        rows = rows_at_once(n, k * x.element_size(), SLICED_BYTES if self.sliced else DEQUANTIZED_BYTES)
        for first in range(0, n, rows):
            weight = on.workspace.take("dequantized", min(rows, n - first), k)
            self.write_rows(matrix, weight, first=first)
            bias = None if matrix.bias is None else matrix.bias[first : first + rows]
            on.library(x, weight, bias, out[:, first : first + rows], add)


def rows_at_once(n: int, row_bytes: int, room: int) -> int:
    """Rows of a matrix of n that are decoded at a time: equal pieces, as cuBLAS wastes time on small ones."""
    most = room // row_bytes // 128 * 128
    return min(most, cdiv(cdiv(n, cdiv(n, most)), 128) * 128)
