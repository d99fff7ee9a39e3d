"""Kernels run in Triton's interpreter, or compiled where there is a GPU."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported: before any kernel's module
