"""`python -m benchmarks.gpu`: kernels, whole models and workloads on one CUDA device, optionally against vLLM."""
