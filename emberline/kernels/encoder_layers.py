"""The layers of an encoder in plain PyTorch: the definition, the fallback, and the tests' oracle.

`cpu.native_encoder` computes the same in C.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

Linear = tuple[Tensor, Tensor]  # float32: weight [out, in], bias [out]; of a norm: weight, bias


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    qkv: Linear
    output: Linear
    attention_norm: Linear
    up: Linear
    down: Linear
    norm: Linear


@dataclass(frozen=True, slots=True)
class EncoderShape:
    heads: int
    head_dim: int
    eps: float
    activation: str  # "gelu", "gelu_tanh" or "relu"


class EncoderLayers(Protocol):
    name: str

    def run(self, x: Tensor, lens: list[int]) -> Tensor:
        """Hidden states [tokens, hidden] of texts of these lengths, from their embeddings, which may be overwritten."""
        ...


class TorchEncoderLayers:
    name = "torch"

    def __init__(self, norm: Linear, layers: Sequence[EncoderLayer], shape: EncoderShape) -> None:
        self._norm, self._layers, self._shape = norm, layers, shape

    @torch.inference_mode()
    def run(self, x: Tensor, lens: list[int]) -> Tensor:
        x = self._layer_norm(x, self._norm)
        for layer in self._layers:
            attended = self._attend(F.linear(x, *layer.qkv), lens)
            x = self._layer_norm(F.linear(attended, *layer.output).add_(x), layer.attention_norm)
            inner = self._activate(F.linear(x, *layer.up))
            x = self._layer_norm(F.linear(inner, *layer.down).add_(x), layer.norm)
        return x

    def _attend(self, qkv: Tensor, lens: list[int]) -> Tensor:
        heads, dim = self._shape.heads, self._shape.head_dim
        out = qkv.new_empty(len(qkv), heads * dim)
        for text, to in zip(torch.split(qkv, lens), torch.split(out, lens), strict=True):
            q, k, v = text.view(1, len(text), 3, heads, dim).permute(2, 0, 3, 1, 4)
            to.view(len(text), heads, dim).copy_(F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1))
        return out

    def _activate(self, x: Tensor) -> Tensor:
        if self._shape.activation == "relu":
            return torch.relu_(x)
        return F.gelu(x, approximate="tanh" if self._shape.activation == "gelu_tanh" else "none")

    def _layer_norm(self, x: Tensor, norm: Linear) -> Tensor:
        return F.layer_norm(x, (x.shape[1],), *norm, self._shape.eps)
