"""Authentication, the root secret, and the usage ledger."""
