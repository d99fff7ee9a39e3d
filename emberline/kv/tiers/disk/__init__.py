"""The disk tier: KV blocks on a drive, verified before use and there again after a restart."""
