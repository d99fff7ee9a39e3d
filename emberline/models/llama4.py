"""Llama 4, text only: layers with RoPE attend within chunks, the others to everything; a shared and a routed expert."""

from emberline.kernels.backend import Layer, QueryTemperature
from emberline.models.attention import grouped_query_attention
from emberline.models.feed_forward import feed_forward
from emberline.models.layer_weights import LayerWeights


def llama4(layer: LayerWeights) -> Layer:
    config = layer.config
    rope, tuning = layer.number not in config.nope_layers, config.query_temperature
    temperature = None if rope or tuning is None else QueryTemperature(tuning.scale, tuning.floor_tokens)
    attention = grouped_query_attention(layer, rope=rope, l2_norm=rope and config.qk_l2_norm, temperature=temperature)
    return Layer(attention, feed_forward(layer))
