"""Qwen 2 and 2.5 add biases to q, k and v; Qwen 3 drops them and adds QK norms."""

from emberline.models.decoder import LayerTensorNames

QWEN2 = LayerTensorNames(qkv_bias=True)
QWEN3 = LayerTensorNames(q_norm="attn_q_norm", k_norm="attn_k_norm")
