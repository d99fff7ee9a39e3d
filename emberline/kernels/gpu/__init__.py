"""Triton kernels. Imported only where there is a CUDA device, or under Triton's interpreter: Triton is optional."""
