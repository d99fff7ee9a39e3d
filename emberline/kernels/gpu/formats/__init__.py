"""Formats of weight matrices on a GPU: each module has one's loading, kernels and tile configs. See `registry`."""
