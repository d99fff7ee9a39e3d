"""Gemma 3: QK norms, norms after attention and MLP, and five sliding-window layers for each full-attention layer."""

from emberline.kernels.backend import Layer
from emberline.models.attention import grouped_query_attention
from emberline.models.feed_forward import mlp
from emberline.models.layer_weights import LayerWeights


def gemma3(layer: LayerWeights) -> Layer:
    attention = grouped_query_attention(layer, qk_norm=True, post_norm="post_attention_norm")
    return Layer(attention, mlp(layer, post_norm="post_ffw_norm"))
