"""The layers of an encoder in C: `encoder.h`. Activations are float32; matrix products take their operands in half
precision where the processor multiplies halves, and add them up in float32."""

import ctypes
import os
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from emberline.kernels.encoder_layers import EncoderLayer, EncoderShape, Linear
from emberline.kernels.native_library import load_library

PANEL_ROWS = 16
MAX_HEAD_DIM = 256
_ACTIVATIONS = {"gelu": 0, "gelu_tanh": 1, "relu": 2}


class _Linear(ctypes.Structure):
    _fields_ = [("panels", c_void_p), ("bias", c_void_p), ("rows", c_int64), ("cols", c_int64)]


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, _Linear) for name in ("qkv", "output", "up", "down")),
        ("attention_norm", c_void_p * 2),
        ("norm", c_void_p * 2),
        ("eps", c_float),
        *((name, c_int32) for name in ("heads", "head_dim", "activation")),
    ]


def supports(hidden: int, mlp_size: int, shape: EncoderShape) -> bool:
    return not (hidden % PANEL_ROWS or mlp_size % PANEL_ROWS or shape.head_dim % PANEL_ROWS) and (
        shape.head_dim <= MAX_HEAD_DIM
    )


class NativeEncoderLayers:
    name = "native"

    def __init__(
        self, norm: Linear, layers: Sequence[EncoderLayer], shape: EncoderShape, threads: int | None = None
    ) -> None:
        self._lib = load_library()
        self._lib.em_encode.argtypes = [c_void_p, c_int64, c_void_p, c_float, c_int64, c_void_p, c_void_p]
        self._lib.em_pack_encoder.argtypes = [c_void_p, c_int64, c_int64, c_void_p]
        self._lib.em_encoder_operand_bytes.restype = c_int64
        self._lib.em_encode.restype = self._lib.em_pack_encoder.restype = None
        self._lib.em_threads(threads or len(os.sched_getaffinity(0)))
        self._dtype = torch.float16 if self._lib.em_encoder_operand_bytes() == 2 else torch.float32
        self._keep: list[Any] = []  # what the structs point into
        self._eps = shape.eps
        self._norm = self._pair(norm)
        self._structs = [self._layer(layer, shape) for layer in layers]
        self._layers = (c_void_p * len(layers))(*(ctypes.addressof(struct) for struct in self._structs))

    def run(self, x: Tensor, lens: list[int]) -> Tensor:
        starts = torch.tensor([0, *accumulate(lens)], dtype=torch.int32)
        x = x.contiguous()
        self._lib.em_encode(
            self._layers, len(self._structs), self._norm, self._eps, len(lens), starts.data_ptr(), x.data_ptr()
        )
        return x

    def _layer(self, layer: EncoderLayer, shape: EncoderShape) -> _Layer:
        return _Layer(
            *map(self._linear, (layer.qkv, layer.output, layer.up, layer.down)),
            self._pair(layer.attention_norm),
            self._pair(layer.norm),
            shape.eps,
            shape.heads,
            shape.head_dim,
            _ACTIVATIONS[shape.activation],
        )

    def _linear(self, linear: Linear) -> _Linear:
        weight, bias = (tensor.contiguous() for tensor in linear)
        panels = torch.empty(weight.numel(), dtype=self._dtype)
        self._lib.em_pack_encoder(weight.data_ptr(), *weight.shape, panels.data_ptr())
        self._keep += [panels, bias]
        return _Linear(panels.data_ptr(), bias.data_ptr(), *weight.shape)

    def _pair(self, norm: Linear) -> Any:
        tensors = [tensor.contiguous() for tensor in norm]
        self._keep += tensors
        return (c_void_p * 2)(*(tensor.data_ptr() for tensor in tensors))
