"""Gemma 3: head norms, a norm behind attention and MLP too, and five windowed layers to each that sees everything."""

from emberline.models.decoder import LayerTensorNames

GEMMA3 = LayerTensorNames(
    q_norm="attn_q_norm",
    k_norm="attn_k_norm",
    post_norm="post_attention_norm",
    mlp_post_norm="post_ffw_norm",
)
