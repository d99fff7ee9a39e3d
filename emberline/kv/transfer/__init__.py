"""KV pushed from the engine that computes a prompt into blocks that another owns (docs/design/transfer.md)."""
