"""A placeholder for Triton on machines that cannot import it. The kernels' modules can be imported, and launch nothing.

`emberline plan` builds the GPU backend on torch's meta device, for the sizes of its tensors and the shapes of its
launches. Those are plain Python.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import Any

# All that kernels import of Triton, and the packages on the way. Not more: torch, too, looks what Triton has.
_MODULES = (
    *("triton", "triton.language", "triton.language.extra", "triton.language.extra.cuda"),
    *("triton.tools", "triton.tools.tensor_descriptor"),
)


@contextmanager
def importable_kernels(is_installed: bool | None = None) -> Iterator[None]:
    """Import the modules of GPU kernels inside. Without Triton, the placeholder takes its name until the block ends.

    `is_installed`: True if Triton is, and can be imported; None: find out."""
    if _is_importable() if is_installed is None else is_installed:
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


def _is_importable() -> bool:
    """True if Triton is installed and its libraries load: they may be built for another machine."""
    if find_spec("triton") is None:
        return False
    try:
        importlib.import_module("triton.language")
    except ImportError:
        return False
    return True


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
        raise RuntimeError(f"{self.__name__} cannot be launched: Triton cannot be imported")


def _jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    return _Kernel if function is None else _Kernel(function)
