"""BERT, RoBERTa, XLM-RoBERTa and DistilBERT: embeddings, then layers with LayerNorm behind each block; and their head
for classification. They differ by positions, token types and the head's activation."""

import torch
import torch.nn.functional as F
from torch import Tensor

from emberline.kernels.backend import WeightSource
from emberline.models.decoder import CheckpointSource
from emberline.models.encoder import PackedTexts
from emberline.weights.encoder_checkpoint import EncoderConfig

Linear = tuple[Tensor, Tensor]  # weight [out, in], bias [out]; of a norm: weight, bias


class Bert:
    """Plain PyTorch, in float32."""

    backend = "torch"

    def __init__(self, source: CheckpointSource, device: str = "cpu") -> None:
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
        self._norm = pair("token_embd_norm")
        self._layers = [
            (
                stacked([f"blk.{n}.attn_{part}" for part in "qkv"]),
                *(pair(f"blk.{n}.{part}") for part in ("attn_output", "attn_output_norm", "ffn_up", "ffn_down")),
                pair(f"blk.{n}.layer_output_norm"),
            )
            for n in range(config.n_layers)
        ]
        self._head = (pair("cls.dense"), pair("cls.out")) if config.n_labels else None

    @torch.inference_mode()
    def hidden(self, texts: PackedTexts) -> Tensor:
        x = self._embed(texts)
        for qkv, output, attention_norm, up, down, norm in self._layers:
            attended = self._attend(F.linear(x, *qkv), texts.lens)
            x = self._layer_norm(F.linear(attended, *output).add_(x), attention_norm)
            x = self._layer_norm(F.linear(self._activate(F.linear(x, *up)), *down).add_(x), norm)
        return x

    @torch.inference_mode()
    def logits(self, first: Tensor) -> Tensor:
        assert self._head is not None, "the model has no classification head"
        dense, out = self._head
        activate = torch.relu if self._config.architecture == "distilbert" else torch.tanh
        return F.linear(activate(F.linear(first, *dense)), *out)

    def _embed(self, texts: PackedTexts) -> Tensor:
        x = self._tokens[texts.token_ids.to(self._device)]
        x += self._positions[texts.positions().to(self._device)]
        if self._types is not None:
            x += self._types[texts.token_types().clamp_(max=len(self._types) - 1).to(self._device)]
        return self._layer_norm(x, self._norm)

    def _attend(self, qkv: Tensor, lens: list[int]) -> Tensor:
        heads, dim = self._config.n_heads, self._config.head_dim
        out = qkv.new_empty(len(qkv), heads * dim)
        for text, to in zip(torch.split(qkv, lens), torch.split(out, lens), strict=True):
            q, k, v = text.view(1, len(text), 3, heads, dim).permute(2, 0, 3, 1, 4)
            to.view(len(text), heads, dim).copy_(F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1))
        return out

    def _activate(self, x: Tensor) -> Tensor:
        if self._config.activation == "relu":
            return torch.relu_(x)
        return F.gelu(x, approximate="tanh" if self._config.activation == "gelu_tanh" else "none")

    def _layer_norm(self, x: Tensor, norm: Linear) -> Tensor:
        return F.layer_norm(x, (x.shape[1],), *norm, self._config.norm_eps)
