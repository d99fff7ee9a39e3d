"""The operations models are made of: a plain-PyTorch reference, C kernels for CPUs and Triton kernels for GPUs."""
