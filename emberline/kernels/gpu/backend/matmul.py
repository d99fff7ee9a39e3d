"""Every projection of a model: asks the matrix's format for its fastest kernels, and launches them in the workspace.

The tables of tile configs were measured on an H200 (docs/design/gpu-kernels.md); nothing is tuned at run time. The norm
before a projection and the gate or residual after it are fused where that pays, and are separate launches where it
does not.
"""

from typing import Any

from torch import Tensor

from emberline.kernels.gpu.backend.workspace import Workspace
from emberline.kernels.gpu.formats.matrix_format import Fusion, Launcher, Matrix
from emberline.kernels.gpu.formats.registry import format_of


class Matmul:
    """Launches products in the workspace's memory.

    deterministic: batch-invariant kernels only, so that a token's result does not depend on the rest of the batch.
    pdl: use programmatic dependent launch. For one token only the projection after attention starts early, while
    attention waits for the KV cache, and all that have quantized weights or small ones; for more tokens every kernel
    does, and lets its successor start once it has read.
    """

    def __init__(self, workspace: Workspace, deterministic: bool, pdl: bool) -> None:
        self._launcher = Launcher(workspace, deterministic, pdl)

    def __call__(
        self,
        x: Any,
        matrix: Matrix,
        out: Tensor,
        fusion: Fusion,
        after_attention: bool = False,
    ) -> None:
        """Compute out [m, n], contiguous, from x [m, k] or what `gated` returned; with a gate, n is half the rows.

        The kernels read x before they write out. With a norm, x may be columns of a wider tensor.
        """
        if not len(x):
            return
        if self._launcher.deterministic:
            format_of(matrix).unfused(self._launcher, x, matrix, out, fusion)
        else:
            format_of(matrix).multiply(self._launcher, x, matrix, out, fusion, after_attention)

    def gated(self, x: Tensor, matrix: Matrix, fusion: Fusion, consumer: Matrix) -> Any:
        """The gated product in the form that `consumer` reads: of FP8 matrices its activation may be quantized."""
        return format_of(matrix).gated(self._launcher, x, matrix, fusion, consumer)
