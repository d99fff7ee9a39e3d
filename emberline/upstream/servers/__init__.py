"""The operator's other inference servers: connections, load, KV events, disaggregation."""
