"""Text and token ids: tokenizers, chat templates, detokenizing, stop strings, prompts."""
