"""Gemma 3: QK norms, norms after attention and MLP, and five sliding-window layers for each full-attention layer."""

from emberline.models.decoder import LayerTensorNames

GEMMA3 = LayerTensorNames(
    q_norm="attn_q_norm",
    k_norm="attn_k_norm",
    post_norm="post_attention_norm",
    mlp_post_norm="post_ffw_norm",
)
