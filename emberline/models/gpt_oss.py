"""GPT-OSS: attention sinks, every other layer with a sliding window, experts with biases and a clamped SwiGLU."""

from emberline.kernels.backend import Layer
from emberline.models.attention import grouped_query_attention
from emberline.models.feed_forward import feed_forward
from emberline.models.layer_weights import LayerWeights


def gpt_oss(layer: LayerWeights) -> Layer:
    return Layer(grouped_query_attention(layer, sinks=True), feed_forward(layer))
