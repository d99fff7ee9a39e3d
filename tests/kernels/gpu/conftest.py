"""Kernels run interpreted on a CPU, where Triton is installed, and compiled where there is a GPU."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported: before any kernel's module
