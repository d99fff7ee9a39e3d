"""Qwen 2 and 2.5 add biases to q, k and v; Qwen 3 drops them and adds QK norms."""

from emberline.kernels.backend import Layer
from emberline.models.attention import grouped_query_attention
from emberline.models.feed_forward import mlp
from emberline.models.layer_weights import LayerWeights


def qwen2(layer: LayerWeights) -> Layer:
    return Layer(grouped_query_attention(layer, qkv_bias=True), mlp(layer))


def qwen3(layer: LayerWeights) -> Layer:
    return Layer(grouped_query_attention(layer, qk_norm=True), mlp(layer))
