"""The launcher for code, and for work on data, that is not ours: confined processes with limits."""
