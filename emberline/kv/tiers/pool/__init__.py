"""The pool tier: one Mooncake Store for all workers of a cluster."""
