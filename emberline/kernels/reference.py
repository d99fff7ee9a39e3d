"""The reference backend in plain PyTorch: it defines every operation, runs on any device and is the tests' oracle."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from emberline.kernels.backend import MLP, Attention, Layer, Rope, WeightSource
from emberline.protocol.block_hash import BLOCK_TOKENS, KVGroup


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    scaled = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return (scaled * weight.float()).to(x.dtype)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """RoPE of x: [tokens, heads, dim]; dimension i is paired with i + dim / 2. cosine, sine: [tokens, dim / 2]."""
    first, second = x.float().chunk(2, dim=-1)
    cosine, sine = cosine[:, None], sine[:, None]
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1).to(x.dtype)


def activate(name: str, x: Tensor) -> Tensor:
    return F.silu(x) if name == "silu" else F.gelu(x, approximate="tanh")


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, first: int, window: int | None) -> Tensor:
    """Causal attention of q [n, heads, dim] at positions first .. first + n - 1 over k, v [context, kv_heads, dim]."""
    n, heads, _ = q.shape
    group = heads // k.shape[1]
    k, v = (t.repeat_interleave(group, dim=1).float() for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    query = torch.arange(first, first + n, device=q.device)[:, None]
    key = torch.arange(k.shape[0], device=q.device)[None]
    visible = key <= query
    if window is not None:
        visible &= key > query - window
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)


@dataclass(frozen=True, slots=True)
class TorchMatrix:
    weight: Tensor  # [rows, cols]; of experts: [experts, rows, cols]
    bias: Tensor | None  # without cols


@dataclass(frozen=True, slots=True)
class TorchStep:
    step: Any
    kv: list[Tensor]
    ropes: list[tuple[Tensor, Tensor]]  # cosine, sine per KV group: [tokens, head_dim / 2]
    query_starts: list[int]
    context_lens: list[int]


class TorchBackend:
    name = "torch"
    kv_keys = "token"

    def __init__(self, device: str = "cpu", dtype: torch.dtype | None = None, *, row_by_row: bool = False) -> None:
        self.device = device
        self.dtype = dtype or (torch.bfloat16 if device.startswith("cuda") else torch.float32)
        self.kv_dtype = str(self.dtype).removeprefix("torch.")
        self._row_by_row = row_by_row  # deterministic mode: a library's results may depend on the number of rows

    def load_matrix(
        self, weights: list[WeightSource], bias: list[WeightSource] | None = None, *, gated: bool = False
    ) -> TorchMatrix:
        stacked = torch.cat([w.tensor(self.dtype, self.device) for w in weights])
        return TorchMatrix(
            stacked, None if bias is None else torch.cat([b.tensor(self.dtype, self.device) for b in bias])
        )

    def load_vector(self, weight: WeightSource) -> Tensor:
        return weight.tensor(torch.float32, self.device)

    def load_tensor(self, weight: WeightSource) -> Tensor:
        return weight.tensor(self.dtype, self.device)

    def load_experts(
        self, experts: list[list[WeightSource]], bias: list[list[WeightSource]] | None = None, *, gated: bool = False
    ) -> TorchMatrix:
        matrices = [self.load_matrix(weights, None if bias is None else bias[e]) for e, weights in enumerate(experts)]
        biases = [matrix.bias for matrix in matrices if matrix.bias is not None]
        return TorchMatrix(torch.stack([matrix.weight for matrix in matrices]), torch.stack(biases) if biases else None)

    def begin_step(self, step: Any, kv: list[Tensor], groups: tuple[KVGroup, ...], ropes: list[Rope]) -> TorchStep:
        tables = []
        for rope in ropes:
            angles = torch.outer(step.positions.float(), rope.inverse_frequencies.to(self.device))
            tables.append((angles.cos() * rope.scale, angles.sin() * rope.scale))
        return TorchStep(step, kv, tables, step.query_starts.tolist(), step.context_lens.tolist())

    def embed(self, matrix: TorchMatrix, ids: Tensor, factor: float) -> Tensor:
        return matrix.weight[ids.long()] * factor

    def run_layers(self, layers: Sequence[Layer], x: Tensor, context: TorchStep) -> None:
        for layer in layers:
            qkv = self.norm_linear(x, layer.qkv, layer.norm, layer.eps)
            attended = self.attention(qkv, layer.attention, context)
            self.linear_add(attended, layer.output, x, layer.post_norm, layer.eps)
            self.mlp(layer.mlp, x)

    def norm_linear(self, x: Tensor, matrix: TorchMatrix, norm: Tensor, eps: float) -> Tensor:
        return self._multiply(rms_norm(x, norm, eps), matrix)

    def linear_add(
        self, x: Tensor, matrix: TorchMatrix, residual: Tensor, post_norm: Tensor | None, eps: float
    ) -> None:
        out = self._multiply(x, matrix)
        residual += out if post_norm is None else rms_norm(out, post_norm, eps)

    def mlp(self, mlp: MLP, residual: Tensor) -> None:
        gate, up = self._multiply(rms_norm(residual, mlp.norm, mlp.eps), mlp.gate_up).chunk(2, dim=-1)
        self.linear_add(activate(mlp.activation, gate) * up, mlp.down, residual, mlp.post_norm, mlp.eps)

    def attention(self, qkv: Tensor, attention: Attention, context: TorchStep) -> Tensor:
        at, tokens = attention, qkv.shape[0]
        q, k, v = torch.split(qkv.view(tokens, -1, at.head_dim), [at.heads, at.kv_heads, at.kv_heads], dim=1)
        if at.q_norm is not None and at.k_norm is not None:
            q, k = rms_norm(q, at.q_norm, at.eps), rms_norm(k, at.k_norm, at.eps)
        q, k = (rotate(t, *context.ropes[at.kv_group]) for t in (q, k))
        pool = context.kv[at.kv_group][:, at.layer_index]  # [blocks, 2, kv_heads, BLOCK_TOKENS, head_dim]
        out = torch.empty_like(q)
        for row, context_len in enumerate(context.context_lens):
            new = slice(context.query_starts[row], context.query_starts[row + 1])
            table = context.step.block_tables[at.kv_group][row]
            positions = context.step.positions[new].long()
            slots = table[positions // BLOCK_TOKENS].long(), positions % BLOCK_TOKENS
            pool[slots[0], 0, :, slots[1]] = k[new].to(pool.dtype)
            pool[slots[0], 1, :, slots[1]] = v[new].to(pool.dtype)
            blocks = pool[table[: -(-context_len // BLOCK_TOKENS)].long()]  # [n, 2, kv_heads, BLOCK_TOKENS, head_dim]
            keys, values = blocks.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :context_len]
            n = 1 if self._row_by_row else new.stop - new.start
            for t in range(new.start, new.stop, n):
                end = context_len - new.stop + t + n
                out[t : t + n] = attend(q[t : t + n], keys[:end], values[:end], at.scale, end - n, at.window)
        return out.view(tokens, -1)

    def _multiply(self, x: Tensor, matrix: TorchMatrix) -> Tensor:
        if not self._row_by_row:
            return F.linear(x, matrix.weight, matrix.bias)
        out = x.new_empty(len(x), matrix.weight.shape[0])
        for row, to in zip(x, out, strict=True):
            to.copy_(F.linear(row, matrix.weight, matrix.bias))
        return out
