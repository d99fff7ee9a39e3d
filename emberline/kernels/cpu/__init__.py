"""C kernels for CPUs, compiled for the host's processor at first use."""
