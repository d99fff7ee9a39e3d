"""Llama 2 and 3, SmolLM2, Mistral and Mixtral: the plain decoder, with experts where the configuration has them.

RoPE scaling and sliding windows come from the configuration.
"""

from emberline.kernels.backend import Layer
from emberline.models.attention import grouped_query_attention
from emberline.models.feed_forward import feed_forward
from emberline.models.layer_weights import LayerWeights


def llama(layer: LayerWeights) -> Layer:
    return Layer(grouped_query_attention(layer), feed_forward(layer))
