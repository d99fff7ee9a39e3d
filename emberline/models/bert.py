"""BERT, RoBERTa, XLM-RoBERTa and DistilBERT: embeddings, then layers with LayerNorm behind each block; and their head
for classification. They differ by positions, token types and the head's activation."""

import logging

import torch
import torch.nn.functional as F
from torch import Tensor

from emberline.kernels.backend import WeightSource
from emberline.kernels.cpu import native_encoder
from emberline.kernels.encoder_layers import EncoderLayer, EncoderLayers, EncoderShape, Linear, TorchEncoderLayers
from emberline.kernels.native_library import BuildError
from emberline.models.encoder import PackedTexts
from emberline.models.layer_weights import CheckpointSource
from emberline.weights.encoder_checkpoint import EncoderConfig

_log = logging.getLogger("emberline.models")


class Bert:
    def __init__(
        self, source: CheckpointSource, device: str = "cpu", threads: int | None = None, *, native: bool = True
    ) -> None:
        """`native`: with the C kernels, on a CPU and where they support the model."""
        config: EncoderConfig = source.config
        self._config, self._device = config, device

        def tensor(weight: WeightSource) -> Tensor:
            return weight.tensor(torch.float32, device)

        def pair(name: str) -> Linear:
            return tensor(source.weight(f"{name}.weight")), tensor(source.weight(f"{name}.bias"))

        def stacked(names: list[str]) -> Linear:
            weights, biases = zip(*map(pair, names), strict=True)
            return torch.cat(weights), torch.cat(biases)

        self._tokens = tensor(source.weight("token_embd.weight"))
        self._positions = tensor(source.weight("position_embd.weight"))[config.position_offset :]
        self._types = tensor(source.weight("token_types.weight")) if config.n_token_types else None
        self._head = (pair("cls.dense"), pair("cls.out")) if config.n_labels else None
        layers = [
            EncoderLayer(
                qkv=stacked([f"blk.{n}.attn_{part}" for part in "qkv"]),
                output=pair(f"blk.{n}.attn_output"),
                attention_norm=pair(f"blk.{n}.attn_output_norm"),
                up=pair(f"blk.{n}.ffn_up"),
                down=pair(f"blk.{n}.ffn_down"),
                norm=pair(f"blk.{n}.layer_output_norm"),
            )
            for n in range(config.n_layers)
        ]
        self._layers = _select(config, pair("token_embd_norm"), layers, native and device == "cpu", threads)
        self.backend = self._layers.name

    @torch.inference_mode()
    def hidden(self, texts: PackedTexts) -> Tensor:
        x = self._tokens[texts.token_ids.to(self._device)]
        x += self._positions[texts.positions().to(self._device)]
        if self._types is not None:
            x += self._types[texts.token_types().clamp_(max=len(self._types) - 1).to(self._device)]
        return self._layers.run(x, texts.lens)

    @torch.inference_mode()
    def logits(self, first: Tensor) -> Tensor:
        assert self._head is not None, "the model has no classification head"
        dense, out = self._head
        activate = torch.relu if self._config.architecture == "distilbert" else torch.tanh
        return F.linear(activate(F.linear(first, *dense)), *out)


def _select(
    config: EncoderConfig, norm: Linear, layers: list[EncoderLayer], native: bool, threads: int | None
) -> EncoderLayers:
    shape = EncoderShape(config.n_heads, config.head_dim, config.norm_eps, config.activation)
    if native and native_encoder.supports(config.hidden_size, config.mlp_size, shape):
        try:
            return native_encoder.NativeEncoderLayers(norm, layers, shape, threads)
        except (BuildError, OSError) as error:
            _log.warning("%s; falling back to PyTorch, slower", error)
    return TorchEncoderLayers(norm, layers, shape)
