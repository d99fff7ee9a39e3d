"""Llama 2 and 3, SmolLM2, Mistral: the plain decoder. Rope scaling and windows come with the configuration."""

from emberline.models.decoder import LayerTensorNames

LLAMA = LayerTensorNames()
