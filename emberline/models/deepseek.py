"""DeepSeek-V3, Kimi K2 and K2.5, GLM-4.7-Flash: latent attention (MLA), then an MLP or shared and routed experts."""

from emberline.kernels.backend import Layer
from emberline.models.attention import latent_attention
from emberline.models.feed_forward import feed_forward
from emberline.models.layer_weights import LayerWeights


def deepseek(layer: LayerWeights) -> Layer:
    return Layer(latent_attention(layer), feed_forward(layer))
