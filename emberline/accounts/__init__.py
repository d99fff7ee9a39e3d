"""Who asks, and what they used: the root secret, authentication, the usage ledger."""
