"""KV transfer: connections, threads and transports that move blocks to another engine (docs/design/transfer.md)."""
