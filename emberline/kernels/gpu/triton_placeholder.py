"""A placeholder for Triton on machines without it: lets the kernels' modules be imported, and launches no kernel.

`emberline plan` builds the GPU backend on torch's meta device, for the sizes of its tensors and the shapes of its
launches. Those are plain Python.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_MODULES = ("triton", "triton.language", "triton.language.extra", "triton.language.extra.cuda")


@contextmanager
def importable_kernels(is_installed: bool | None = None) -> Iterator[None]:
    """Import the modules of GPU kernels inside. Without Triton, the placeholder takes its name until the block ends.

    `is_installed`: True if Triton is; None: find out."""
    if find_spec("triton") is not None if is_installed is None else is_installed:
        yield
        return
    before = {name: sys.modules.pop(name, None) for name in _MODULES}
    sys.modules |= {name: _Module(name) for name in _MODULES}
    try:
        yield
    finally:
        for name, module in before.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module


class _Module(ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []  # a package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return sys.modules.get(f"{self.__name__}.{name}") or (_jit if name == "jit" else _Constant)


class _Constant:
    """A `tl.constexpr`, or any other name that kernels use when they run."""

    def __init__(self, value: object = None) -> None:
        self.value = value


class _Kernel:
    def __init__(self, function: Callable[..., Any]) -> None:
        self.__name__ = function.__name__

    def __getitem__(self, grid: object) -> Any:
        raise RuntimeError(f"{self.__name__} cannot be launched: Triton is not installed")


def _jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    return _Kernel if function is None else _Kernel(function)
