"""Qwen 2 and 2.5 add biases to q, k and v; Qwen 3 drops them and adds QK norms. Qwen3-MoE has experts besides."""

from emberline.kernels.backend import Layer
from emberline.models.attention import grouped_query_attention
from emberline.models.feed_forward import feed_forward
from emberline.models.layer_weights import LayerWeights


def qwen2(layer: LayerWeights) -> Layer:
    return Layer(grouped_query_attention(layer, qkv_bias=True), feed_forward(layer))


def qwen3(layer: LayerWeights) -> Layer:
    return Layer(grouped_query_attention(layer, qk_norm=True), feed_forward(layer))
