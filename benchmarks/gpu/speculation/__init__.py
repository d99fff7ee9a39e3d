"""Speculative decoding on a GPU: `python -m benchmarks.gpu.speculation`."""
