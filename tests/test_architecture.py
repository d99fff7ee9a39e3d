"""Import rules: which package may import which, no import cycles, and what an engine host needs installed."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "emberline"
ENGINE_SIDE = {"protocol", "kernels", "models", "weights", "kv", "engine"}
ALLOWED = {
    "protocol": set(),
    "weights": {"protocol"},
    "kernels": {"protocol"},
    "models": {"kernels", "protocol", "weights"},
    "kv": {"protocol"},
    "engine": {"models", "kernels", "kv", "weights", "protocol"},
    "store": {"protocol"},
    "text": {"weights", "protocol"},
    "catalog": {"store", "text", "weights", "protocol"},
    "accounts": {"store", "protocol"},
    "balancer": {"protocol"},
    "upstream": {"balancer", "catalog", "protocol", "text"},
    "service": {"accounts", "catalog", "text", "balancer", "store", "protocol", "upstream"},
    "supervisor": {"balancer", "engine", "protocol"},
    "simulator": {"balancer", "engine", "kv", "protocol", "supervisor"},
    "testing": {"balancer", "upstream", "engine", "kv", "kernels", "protocol"},
    "jobs": {"service", "accounts", "store", "protocol"},
    "api": {"jobs", "service", "accounts", "catalog", "upstream", "protocol"},
}
ANYWHERE = {"config", "log", "__version__"}  # modules outside every package: configuration and log format
SPEECH = {"av", "faster_whisper"}  # of emberline[speech]: imported where a speech model is loaded, and nowhere else
ENGINE_HOST = {"torch", "numpy", "msgspec", "safetensors", "tokenizers", "triton", "llguidance"}


def imported_names(path: Path) -> Iterator[str]:
    """Every name that a module imports, also under TYPE_CHECKING and inside functions, as `package.module[.symbol]`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports(package: str) -> Iterator[tuple[Path, str]]:
    for path in (PACKAGE / package).rglob("*.py"):
        yield from ((path, name) for name in imported_names(path))


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def import_graph(package: str) -> dict[str, set[str]]:
    """For each module of the package, the modules of the same package that it imports."""
    paths = {module_name(path): path for path in (PACKAGE / package).rglob("*.py")}
    graph: dict[str, set[str]] = {}
    for module, path in paths.items():
        found = ((name, name.rpartition(".")[0]) for name in imported_names(path))
        graph[module] = {name if name in paths else parent for name, parent in found if {name, parent} & paths.keys()}
    return graph


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected components with more than one module (Tarjan's algorithm)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    components: list[list[str]] = []

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        stack.append(module)
        for other in graph[module]:
            if other not in order:
                visit(other)
            if other in stack:
                lowest[module] = min(lowest[module], lowest[other])
        if lowest[module] == order[module]:
            at = stack.index(module)
            component = stack[at:]
            del stack[at:]
            if len(component) > 1:
                components.append(sorted(component))

    for module in graph:
        if module not in order:
            visit(module)
    return components


def test_every_package_has_an_import_rule() -> None:
    packages = {folder.name for folder in PACKAGE.iterdir() if (folder / "__init__.py").exists()}
    assert packages == {*ALLOWED, "cli"}


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_run_downward(package: str) -> None:
    for path, name in imports(package):
        if name.startswith("emberline."):
            other = name.split(".")[1]
            assert other in ALLOWED[package] | {package} | ANYWHERE, f"{path.relative_to(PACKAGE)} imports {name}"


@pytest.mark.parametrize("package", sorted({*ALLOWED, "cli"}))
def test_no_import_cycles_inside_a_package(package: str) -> None:
    found = cycles(import_graph(package))
    assert not found, f"{package} has import cycles: " + "; ".join(" <-> ".join(modules) for modules in found)


@pytest.mark.parametrize("folder", ["http", "common", "batches"])
def test_shared_api_modules_import_no_endpoints(folder: str) -> None:
    for path in (PACKAGE / "api" / folder).rglob("*.py"):
        for name in imported_names(path):
            other = name.removeprefix("emberline.api.").split(".")[0]
            imports_endpoints = name.startswith("emberline.api.") and other not in ("http", "common", "batches")
            assert not imports_endpoints, f"{path.relative_to(PACKAGE)} imports {name}"


def test_cycles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"a"}}
    assert cycles(graph) == [["b", "c"]]


@pytest.mark.parametrize("package", sorted(ENGINE_SIDE))
def test_an_engine_host_needs_few_libraries(package: str) -> None:
    for path, name in imports(package):
        top = name.partition(".")[0]
        known = top in sys.stdlib_module_names or top in ENGINE_HOST or top == "emberline"
        known = known or (top in SPEECH and path == PACKAGE / "engine" / "speech.py")
        assert known, f"{path.relative_to(PACKAGE)} imports {name}"
