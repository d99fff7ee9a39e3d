"""Llama 2 and 3, SmolLM2, Mistral: the plain decoder. RoPE scaling and sliding windows come from the configuration."""

from emberline.models.decoder import LayerTensorNames

LLAMA = LayerTensorNames()
