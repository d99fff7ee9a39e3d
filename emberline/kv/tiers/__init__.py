"""KV cache tiers below the device pool: host memory, disk and a shared pool, behind one protocol (`tier.py`)."""
