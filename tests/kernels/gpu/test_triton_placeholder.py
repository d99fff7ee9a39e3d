"""Without Triton, kernels can be imported and not launched; what was imported before comes back."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import emberline
from emberline.kernels.gpu.triton_placeholder import importable_kernels

PACKAGE = Path(emberline.__file__).parent
PLANNED_WITH = ("emberline.kernels.gpu.backend.triton_backend", "emberline.engine.planning.layout_search")


def imported(names: tuple[str, ...]) -> set[str]:
    """The names of all modules, or of what is in them, that these modules import when they are imported."""
    found: set[str] = set()
    left = list(names)
    while left:
        name = left.pop()
        path = PACKAGE.parent.joinpath(*name.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if name in found or not path.is_file():
            found.add(name)
            continue
        found.add(name)
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                left += [each.name for each in node.names]
            elif isinstance(node, ast.ImportFrom):
                left += [str(node.module), *(f"{node.module}.{each.name}" for each in node.names)]
    return found


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
            with pytest.raises(RuntimeError, match="cannot be launched: Triton cannot be imported"):
                each[(1,)](1)
    assert sys.modules.get("triton") is before


def test_every_import_of_a_plan_has_its_placeholder() -> None:
    """A plan itself is made without Triton in a slow test of `tests/cli/test_plan.py`."""
    names = {name for name in imported(PLANNED_WITH) if name.startswith("triton.")}
    assert "triton.language.extra.cuda" in names
    with importable_kernels(is_installed=False):
        for name in sorted(names):
            package, _, attribute = name.rpartition(".")
            assert hasattr(importlib.import_module(package), attribute)


def test_kernels_are_importable_beside_a_triton_that_is_not(tmp_path: Path) -> None:
    """As when its libraries were built for another machine."""
    (tmp_path / "triton.py").write_text("raise ImportError('libtriton.so: cannot open shared object file')")
    path = f"import sys; sys.path.insert(0, {str(tmp_path)!r})"
    asked = "from emberline.kernels.gpu.triton_placeholder import importable_kernels\nwith importable_kernels():"
    code = f"{path}\n{asked}\n import triton.language as tl\n print(tl.constexpr(2).value)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "2\n", done.stderr
