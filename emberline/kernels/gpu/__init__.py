"""Triton kernels. Imported only where a CUDA device is present, or under Triton's interpreter: Triton is optional."""
