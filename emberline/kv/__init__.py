"""Paged KV: which sequence references which block, and which content is cached. The bytes belong to the runner."""
