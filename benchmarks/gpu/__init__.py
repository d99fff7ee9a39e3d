"""`python -m benchmarks.gpu`: kernels, whole models and workloads on one CUDA device, beside vLLM where it is given."""
