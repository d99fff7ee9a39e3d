"""KV cache tiers as the scheduler sees them: which blocks to save, which sequences wait for a fetch."""
