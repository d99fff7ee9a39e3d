"""Rules for the package's source: which package may import which, no import cycles between modules, none new between
folders, what an engine host needs installed, and how a docstring may begin.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

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

# Folders of one package that import each other. The list may only shrink: remove a folder, or a group, that is no
# longer part of a cycle; never add one.
FOLDER_CYCLES = {
    "api": ["gateway workers_ai"],
    "engine": [". gpu grammar parallel scheduler speculation tiers transfer"],
    "kernels": [". cpu", "gpu gpu.mla"],
    "kv": [". tiers transfer"],
    "text": [". grammar grammar.json_schema tool_calls"],
    "upstream": [". providers"],
}
BANNED = "Of|That|Until|Whether|What|Who|Whom|Whose|Which|It|Its|This|These|Those|They|Them|Their|He|His"
# Docstrings per package that begin with a word of BANNED. The numbers may only fall.
BANNED_OPENINGS = {
    "": 2,
    "accounts": 31,
    "api": 45,
    "balancer": 34,
    "catalog": 10,
    "cli": 23,
    "engine": 141,
    "jobs": 12,
    "kernels": 56,
    "kv": 74,
    "models": 13,
    "protocol": 21,
    "service": 80,
    "simulator": 15,
    "store": 4,
    "supervisor": 49,
    "testing": 5,
    "text": 41,
    "upstream": 45,
    "weights": 20,
}


class Source(NamedTuple):
    """A module's imports, as `package.module[.symbol]`, and the docstrings of the module, its classes and functions."""

    imports: list[str]
    docstrings: list[tuple[int, str]]  # line and text


@cache
def read(path: Path) -> Source:
    """Parse a module once for all tests. Imports under TYPE_CHECKING and inside functions count as well."""
    source = Source([], [])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            source.imports.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            source.imports.extend(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                source.docstrings.append((node.body[0].lineno, text))
    return source


def imports(package: str) -> Iterator[tuple[Path, str]]:
    for path in (PACKAGE / package).rglob("*.py"):
        yield from ((path, name) for name in read(path).imports)


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def import_graph(package: str) -> dict[str, set[str]]:
    """The modules of the same package that each module of the package imports."""
    paths = {module_name(path): path for path in (PACKAGE / package).rglob("*.py")}
    graph: dict[str, set[str]] = {}
    for module, path in paths.items():
        found = ((name, name.rpartition(".")[0]) for name in read(path).imports)
        graph[module] = {name if name in paths else parent for name, parent in found if {name, parent} & paths.keys()}
    return graph


def folder_graph(package: str) -> dict[str, set[str]]:
    """The folders of the package that the modules of each folder import. `.` is the package's own folder."""

    def folder(module: str) -> str:
        path = PACKAGE.parent.joinpath(*module.split("."))
        name = module if path.is_dir() else module.rpartition(".")[0]
        return name.removeprefix(f"emberline.{package}").removeprefix(".") or "."

    graph: dict[str, set[str]] = {}
    for module, others in import_graph(package).items():
        graph.setdefault(folder(module), set()).update(folder(other) for other in others)
    return graph


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected components with more than one member (Tarjan's algorithm)."""
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


@pytest.mark.parametrize("package", sorted({*ALLOWED, "cli"}))
def test_no_new_import_cycles_between_folders(package: str) -> None:
    found = sorted(" ".join(folders) for folders in cycles(folder_graph(package)))
    allowed = FOLDER_CYCLES.get(package, [])
    assert found == allowed, (
        f"folders of {package} that import each other are {found}, FOLDER_CYCLES has {allowed}: "
        "undo an import that adds one, or shorten the list if the package has lost one"
    )


@pytest.mark.parametrize("folder", ["http", "common", "batches"])
def test_shared_api_modules_import_no_endpoints(folder: str) -> None:
    for path in (PACKAGE / "api" / folder).rglob("*.py"):
        for name in read(path).imports:
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


def begins_badly(docstring: str) -> bool:
    """True if the docstring begins without its subject: with a word of BANNED, or with "As `name`"."""
    return re.match(rf"(({BANNED})\b|As `)", docstring, re.IGNORECASE) is not None


def banned_openings() -> Mapping[str, list[str]]:
    """The place of every docstring that begins badly, by package; modules outside every package under an empty name."""
    found: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE)
        places = found.setdefault(name.parts[0] if len(name.parts) > 1 else "", [])
        places.extend(f"{name}:{line}: {text[:50]}" for line, text in read(path).docstrings if begins_badly(text))
    return found


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    for package, places in banned_openings().items():
        allowed = BANNED_OPENINGS.get(package, 0)
        assert len(places) <= allowed, (
            f"{len(places)} docstrings of {package or 'emberline'} begin with a pronoun, Of, What, Whether, …: "
            f"BANNED_OPENINGS allows {allowed}. Say who does what, as in CONTRIBUTING.md; one of these is new:\n"
            + "\n".join(places)
        )


def test_the_allowed_number_of_banned_openings_falls() -> None:
    # Only the sum is checked, with a margin, so that two branches which rewrite docstrings of one package both pass.
    counts = Counter({package: len(places) for package, places in banned_openings().items()})
    lower = {package: counts[package] for package, allowed in BANNED_OPENINGS.items() if counts[package] < allowed}
    margin = max(10, sum(BANNED_OPENINGS.values()) // 20)
    assert sum(BANNED_OPENINGS.values()) - counts.total() <= margin, f"lower the numbers in BANNED_OPENINGS: {lower}"


@pytest.mark.parametrize(
    ("docstring", "bad"),
    [
        ("Of one model.", True),
        ("Whether it runs.", True),
        ("As `RateLimiter`, for all cores.", True),
        ("whose blocks", True),
        ("Official names.", False),
        ("Itself", False),
        ("As many rows as fit.", False),
        ("True if the model runs.", False),
    ],
)
def test_banned_openings_are_found(docstring: str, bad: bool) -> None:
    assert begins_badly(docstring) is bad
