"""The Triton backend: it computes the blocks of a model by the GPU kernels, in one workspace."""
