"""The blocks that vision towers share: patches of tiles, linear layers, norms, 2-D RoPE, and transformer blocks.

Patches of a tile stand in the order of the squares that the projector merges, row by row, and row by row within a
square. The squares of a tile are then consecutive: merging is a view.

In a rank group each rank has some heads and some of each MLP's width, as in the language model. The outputs of all
ranks add up to the layer's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from emberline.kernels.collectives import Collectives, NoCollectives
from emberline.weights.model_config import BadCheckpoint
from emberline.weights.tensors import Weight
from emberline.weights.vision_config import TowerConfig

Grid = tuple[int, int]  # rows and columns of patches
MLP_UNIT = 16  # columns of an MLP are divided in runs of so many: matrix products want aligned rows


class Linear(NamedTuple):
    weight: Tensor  # [out, in]
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Norm(NamedTuple):
    """LayerNorm, or RMSNorm without a bias."""

    weight: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class DividedMLP(NamedTuple):
    """An MLP of two layers, or three with a gate, of which a rank has some of the inner width."""

    up: Linear
    gate: Linear | None
    down: Linear
    activation: str  # of `activate`
    group: Collectives

    def __call__(self, x: Tensor) -> Tensor:
        if x.is_cuda and self.activation == "gelu_tanh" and self.gate is None and self.up.bias is not None:
            # cuBLAS applies the activation before it writes.
            inner = torch._addmm_activation(self.up.bias, x, self.up.weight.T, use_gelu=True)
        else:
            inner = activate(self.activation, (self.gate or self.up)(x))
        return total(self.down(inner * self.up(x) if self.gate is not None else inner), self.group)


def total(x: Tensor, group: Collectives) -> Tensor:
    """Replace x by its sum over all ranks, and return it."""
    if group.size > 1:
        group.all_reduce(x)
    return x


class TowerWeights:
    """The tower's tensors on a device. Each is taken once, by canonical name and shape; a rank of a group takes its
    share of some."""

    def __init__(
        self,
        tensors: Mapping[str, Weight],
        device: torch.device | str,
        dtype: torch.dtype,
        group: Collectives | None = None,
    ) -> None:
        """group: of the ranks that divide the tower; None: one rank has all of it."""
        self.device, self.dtype, self.group = device, dtype, group or NoCollectives()
        self.n_bytes = 0  # of what has been taken
        self._left = dict(tensors)

    def has(self, name: str) -> bool:
        """True if the checkpoint has a tensor of this name."""
        return name in self._left

    def share(self, size: int, unit: int = 1) -> slice:
        """Divide a dimension among the ranks, in runs of `unit`. No rank's part is larger than the last rank's."""
        n, rank, of = -(-size // unit), self.group.rank, self.group.size
        return slice(unit * (n * rank // of), min(size, unit * (n * (rank + 1) // of)))

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Read a tensor. Raises BadCheckpoint if it is missing or has another shape."""
        return self._count(self._read(name, shape, dtype or self.dtype))

    def take_rows(self, name: str, *shape: int, rows: Sequence[slice]) -> Tensor:
        """Read some rows of a tensor."""
        whole = self._read(name, shape, self.dtype)
        return self._count(whole if self.group.size == 1 else torch.cat([whole[part] for part in rows]))

    def linear(self, name: str, n_out: int, n_in: int, *, bias: bool = True) -> Linear:
        """Read a linear layer."""
        return self.rows(name, n_out, n_in, [slice(0, n_out)], bias=bias)

    def rows(self, name: str, n_out: int, n_in: int, rows: Sequence[slice], *, bias: bool = True) -> Linear:
        """Read some outputs of a linear layer."""
        weight = self.take_rows(f"{name}.weight", n_out, n_in, rows=rows)
        return Linear(weight, self.take_rows(f"{name}.bias", n_out, rows=rows) if bias else None)

    def columns(self, name: str, n_out: int, n_in: int, columns: slice, *, bias: bool = True) -> Linear:
        """Read some inputs of a linear layer. Rank 0 has the bias, which the sum of all ranks has once."""
        weight = self._read(f"{name}.weight", (n_out, n_in), self.dtype)
        own = self._count(weight if self.group.size == 1 else weight[:, columns].contiguous())
        added = self.take(f"{name}.bias", n_out) if bias else None
        return Linear(own, None if self.group.rank else added)

    def mlp(
        self, up: str, gate: str, down: str, widths: tuple[int, int, int], activation: str, *, bias: bool = True
    ) -> DividedMLP:
        """Read an MLP. widths: in, inner and out. gate: empty if it has none."""
        n_in, inner, n_out = widths
        own = self.share(inner, MLP_UNIT)
        return DividedMLP(
            self.rows(up, inner, n_in, [own], bias=bias),
            self.rows(gate, inner, n_in, [own], bias=bias) if gate else None,
            self.columns(down, n_out, inner, own, bias=bias),
            activation,
            self.group,
        )

    def norm(self, name: str, width: int, eps: float, *, bias: bool = True) -> Norm:
        """Read a LayerNorm, or an RMSNorm without a bias."""
        return Norm(self.take(f"{name}.weight", width), self.take(f"{name}.bias", width) if bias else None, eps)

    def patches(self, config: TowerConfig, *, bias: bool = True) -> Linear:
        """Read the convolution over patches as a linear layer over their pixels [row, column, channel]."""
        patch = config.processor.patch
        weight = self.take("v.patch_embd.weight", config.width, 3, patch, patch)
        rows = weight.permute(0, 2, 3, 1).reshape(config.width, -1).contiguous()
        return Linear(rows, self.take("v.patch_embd.bias", config.width) if bias else None)

    def _read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        weight = self._left.pop(name, None)
        if weight is None:
            raise BadCheckpoint(f"tensor {name!r} of the vision tower is missing")
        if weight.shape != shape:
            raise BadCheckpoint(
                f"tensor {name!r} of the vision tower has shape {weight.shape}, but its configuration implies {shape}"
            )
        return weight.tensor(dtype, self.device)

    def _count(self, tensor: Tensor) -> Tensor:
        self.n_bytes += tensor.nbytes
        return tensor

    def check_all_taken(self) -> None:
        """Raise BadCheckpoint if tensors are left over: without them the tower would give wrong rows."""
        if self._left:
            some = ", ".join(repr(name) for name in list(self._left)[:4])
            raise BadCheckpoint(f"the vision tower has no use for {len(self._left)} of its tensors: {some}")


class OutlineWeights(TowerWeights):
    """Tensors of every name and shape, without memory: to count the bytes of a tower that is not here."""

    def __init__(self, dtype: torch.dtype, group: Collectives | None = None) -> None:
        super().__init__({}, "meta", dtype, group)

    def _read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")


class Patches:
    """Pixels of tiles, normalized, as one row for each patch."""

    def __init__(self, config: TowerConfig, device: torch.device | str, dtype: torch.dtype) -> None:
        self._patch, self._merge = config.processor.patch, config.processor.merge
        self._device, self._dtype = device, dtype
        self._mean = torch.tensor(config.processor.mean, device=device) * 255
        self._scale = 1 / (torch.tensor(config.processor.std, device=device) * 255)

    def grid(self, tile: Tensor) -> Grid:
        """Rows and columns of a tile's patches."""
        height, width, _ = tile.shape
        return height // self._patch, width // self._patch

    def cut(self, tile: Tensor) -> Tensor:  # [patches, 3 * patch * patch]
        """The patches of a tile, in the order of squares."""
        rows, columns = self.grid(tile)
        patch, merge = self._patch, self._merge
        pixels = tile.to(self._device).float().sub_(self._mean).mul_(self._scale).to(self._dtype)
        squares = pixels.view(rows // merge, merge, patch, columns // merge, merge, patch, 3)
        return squares.permute(0, 3, 1, 4, 2, 5, 6).reshape(rows * columns, -1)


def square_order(grid: Grid, merge: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Row and column of each patch of a grid, in the order of squares: int64 [patches] each."""
    rows, columns = grid
    numbers = torch.arange(rows * columns, device=device).view(rows // merge, merge, columns // merge, merge)
    order = numbers.transpose(1, 2).reshape(-1)
    return order // columns, order % columns


class Rotation(NamedTuple):
    """Cosines and sines of RoPE, float32 [patches, 1, 1, head_dim / 2], for dimension i and i + head_dim / 2."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def by(cls, angles: Tensor) -> "Rotation":
        """The rotation by angles, float32 [patches, head_dim / 2]."""
        return cls(angles.cos()[:, None, None], angles.sin()[:, None, None])

    def __call__(self, x: Tensor) -> Tensor:  # [patches, 2, heads, head_dim]: q and k
        """Rotate in float32, in few passes over memory: on a GPU their bytes are what a rotation costs."""
        first, second = x.chunk(2, -1)
        turned = torch.empty_like(x, memory_format=torch.contiguous_format)
        out_first, out_second = turned.chunk(2, -1)
        torch.addcmul(first * self.cos, second, self.sin, value=-1, out=out_first)
        torch.addcmul(second * self.cos, first, self.sin, out=out_second)
        return turned


def frequencies(theta: float, dim: int, device: torch.device | str) -> Tensor:
    """Frequencies of RoPE over `dim` dimensions: float32 [dim / 2]."""
    return 1 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)


@dataclass(frozen=True, slots=True)
class Block:
    """A pre-norm transformer block with bidirectional attention within each tile, or a rank's share of one."""

    head_dim: int
    norm: Norm
    qkv: Linear
    out: Linear
    mlp_norm: Norm
    mlp: DividedMLP
    group: Collectives

    @classmethod
    def read(
        cls, weights: TowerWeights, number: int, config: TowerConfig, *, fused: bool = False, plain: bool = False
    ) -> "Block":
        """Read a block. `fused`: one matrix makes q, k and v; `plain`: RMSNorm, a gated MLP, and no biases."""
        name, width, bias = f"v.blk.{number}", config.width, not plain
        own = weights.share(width, config.head_dim)
        if fused:
            rows = [slice(n * width + own.start, n * width + own.stop) for n in range(3)]
            qkv = weights.rows(f"{name}.attn_qkv", 3 * width, width, rows)
        else:
            parts = [weights.rows(f"{name}.attn_{part}", width, width, [own], bias=bias) for part in "qkv"]
            biases = [part.bias for part in parts if part.bias is not None]
            qkv = Linear(torch.cat([part.weight for part in parts]), torch.cat(biases) if biases else None)
        names = f"{name}.ffn_up", f"{name}.ffn_gate" if plain else "", f"{name}.ffn_down"
        return cls(
            head_dim=config.head_dim,
            norm=weights.norm(f"{name}.ln1", width, config.norm_eps, bias=bias),
            qkv=qkv,
            out=weights.columns(f"{name}.attn_out", width, width, own, bias=bias),
            mlp_norm=weights.norm(f"{name}.ln2", width, config.norm_eps, bias=bias),
            mlp=weights.mlp(*names, (width, config.mlp_size, width), config.activation, bias=bias),
            group=weights.group,
        )

    def with_qkv(self, qkv: Linear) -> "Block":
        """The block with another matrix for q, k and v."""
        return replace(self, qkv=qkv)

    def attention(self, y: Tensor, kernels: "TowerKernels", runs: Sequence["Run"], rotation: Rotation | None) -> Tensor:
        """The attention of normed patches [patches, width], to be added to them."""
        qkv = self.qkv(y)
        n_heads = qkv.shape[1] // (3 * self.head_dim)  # none on a rank of a group with more ranks than heads
        attended = kernels.attend(qkv.view(len(y), 3, n_heads, self.head_dim), runs if n_heads else (), rotation)
        return total(self.out(attended.flatten(1)), self.group)


class Run(NamedTuple):
    """Consecutive tiles with as many patches each, which one call of the attention takes: patches start .. stop - 1."""

    start: int
    stop: int
    n_tiles: int

    @property
    def n_patches(self) -> int:
        """Patches of each tile."""
        return (self.stop - self.start) // self.n_tiles


def runs_of(grids: Sequence[Grid]) -> list[Run]:
    """The runs of consecutive tiles with grids of as many patches."""
    runs: list[Run] = []
    n_last = at = 0
    for rows, columns in grids:
        n = rows * columns
        if runs and n == n_last:
            runs[-1] = Run(runs[-1].start, at + n, runs[-1].n_tiles + 1)
        else:
            runs.append(Run(at, at + n, 1))
        at, n_last = at + n, n
    return runs


class TowerKernels:
    """Norms and attention of the blocks, in torch."""

    def add_norm(self, x: Tensor, added: Tensor | None, norm: Norm) -> Tensor:
        """Add to x in place, and return the norm of the sum."""
        return norm(x if added is None else x.add_(added))

    def attend(self, qkv: Tensor, runs: Sequence[Run], rotation: Rotation | None) -> Tensor:
        """Rotate q and k of qkv [patches, 3, heads, head_dim], and attend within each tile: [patches, heads, head_dim].
        Overwrites q and k."""
        v = qkv[:, 2]
        q, k = (qkv[:, :2] if rotation is None else rotation(qkv[:, :2])).unbind(1)
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
        for start, stop, n_tiles in runs:
            queries, keys, values = (x[start:stop].view(n_tiles, -1, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
            attended = F.scaled_dot_product_attention(queries, keys, values)  # [tiles, heads, patches, dim]
            out[start:stop] = attended.transpose(1, 2).flatten(0, 1)
        return out


class TritonTowerKernels(TowerKernels):
    """Norms and attention on a CUDA device, in Triton."""

    def add_norm(self, x: Tensor, added: Tensor | None, norm: Norm) -> Tensor:
        """Add to x in place, and return the norm of the sum, in one pass over memory."""
        from emberline.kernels.gpu.elementwise import add_tower_norm

        return add_tower_norm(x, added, *norm)

    def attend(self, qkv: Tensor, runs: Sequence[Run], rotation: Rotation | None) -> Tensor:
        """Rotate q and k in place, and attend within each tile."""
        from emberline.kernels.gpu.tower_attention import attend_tiles, rotate_queries_and_keys, supports

        if rotation is not None and runs:
            rotate_queries_and_keys(qkv, rotation.cos, rotation.sin)
        if not all(supports(qkv.shape[-1], run.n_patches) for run in runs):
            with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
                return super().attend(qkv, runs, None)  # cuDNN would plan each new size, for 0.4 s
        out = torch.empty_like(qkv[:, 2], memory_format=torch.contiguous_format)
        for run in runs:
            attend_tiles(qkv, out, run.start, run.n_patches, run.n_tiles)
        return out


def kernels_for(device: torch.device | str, dtype: torch.dtype) -> TowerKernels:
    """Choose the Triton kernels where they are, otherwise torch."""
    usable = torch.device(device).type == "cuda" and dtype is torch.bfloat16 and find_spec("triton") is not None
    return TritonTowerKernels() if usable else TowerKernels()


def activate(name: str, x: Tensor) -> Tensor:
    """Apply an activation of `TowerConfig`."""
    if name == "silu":
        return F.silu(x)
    if name == "gelu_quick":
        return x * torch.sigmoid(1.702 * x)
    return F.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")
