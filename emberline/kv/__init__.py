"""Paged KV: who owns which block, and which content is still in one. Bookkeeping only; the bytes are the runner's."""
