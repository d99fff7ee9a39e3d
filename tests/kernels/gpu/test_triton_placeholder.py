"""Without Triton, kernels can be imported and not launched; what was imported before comes back."""

import importlib
import sys

import pytest

from emberline.kernels.gpu.triton_placeholder import importable_kernels


def test_kernels_are_importable_without_triton() -> None:
    before = sys.modules.get("triton")
    with importable_kernels(is_installed=False):
        triton, tl = importlib.import_module("triton"), importlib.import_module("triton.language")
        assert triton.language is tl

        @triton.jit
        def kernel(x: tl.constexpr) -> None: ...

        @triton.jit(do_not_specialize=["x"])
        def other(x: tl.constexpr) -> None: ...

        assert tl.constexpr(16.0).value == 16.0
        for each in (kernel, other):
            with pytest.raises(RuntimeError, match="cannot be launched: Triton is not installed"):
                each[(1,)](1)
    assert sys.modules.get("triton") is before
