"""Rules for the source: which package may import which, no import cycles between modules or between folders, what an
engine host needs installed, how a docstring may begin, and what tests may know of the package's insides.
"""

import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.source_rules import begins_badly, parse, patches, private_uses, read

PACKAGE = Path(__file__).parent.parent / "emberline"
STANDINS = "standins"  # a package beside it, for tests and benchmarks, that users do not install
ENGINE_SIDE = {"protocol", "kernels", "models", "weights", "kv", "engine"}
ALLOWED = {
    "protocol": set(),
    "weights": {"kernels", "protocol"},
    "kernels": {"protocol"},
    "models": {"kernels", "protocol", "weights"},
    "kv": {"protocol"},
    "engine": {"models", "kernels", "kv", "weights", "protocol"},
    "store": {"protocol"},
    "text": {"weights", "protocol"},
    "catalog": {"store", "text", "weights", "protocol"},
    "accounts": {"net", "protocol", "store"},
    "net": {"protocol"},
    "images": {"net", "protocol", "text"},
    "balancer": {"protocol"},
    "telemetry": {"accounts", "balancer", "protocol"},
    "upstream": {"balancer", "catalog", "net", "protocol", "text"},
    "cluster": {"accounts", "balancer", "catalog", "net", "protocol", "store", "text", "upstream"},
    "service": {
        *("accounts", "balancer", "catalog", "cluster", "images", "net", "protocol", "store", "telemetry", "text"),
        "upstream",
    },
    "gateway": {"accounts", "balancer", "catalog", "net", "protocol", "service", "store", "telemetry", "upstream"},
    "predictor": {"catalog", "engine", "net", "protocol", "supervisor"},
    "supervisor": {"balancer", "engine", "protocol"},
    "simulator": {"balancer", "engine", "kv", "protocol", "supervisor"},
    "jobs": {"accounts", "net", "protocol", "service", "store", "telemetry"},
    "api": {
        *("accounts", "catalog", "cluster", "gateway", "images", "jobs", "net", "protocol", "service", "telemetry"),
        "upstream",
    },
    "server": {
        *("accounts", "api", "balancer", "catalog", "cluster", "engine", "gateway", "images", "jobs", "net"),
        "protocol",
        *("predictor", "service", "store", "supervisor", "telemetry", "text", "upstream", "weights"),
    },
    STANDINS: {"engine", "kernels", "kv", "net", "protocol"},
}
ANYWHERE = {"config", "log", "__version__"}  # modules outside every package: configuration and log format
SPEECH = {"av", "faster_whisper"}  # of emberline[speech]: imported where a speech model is loaded, and nowhere else
ENGINE_HOST = {"torch", "numpy", "msgspec", "safetensors", "tokenizers", "triton", "llguidance", "zstandard"}

RATCHETS = tomllib.loads((Path(__file__).parent / "ratchets.toml").read_text())


def folder_of(package: str) -> Path:
    return PACKAGE.parent / STANDINS if package == STANDINS else PACKAGE / package


def imports(package: str) -> Iterator[tuple[Path, str]]:
    for path in folder_of(package).rglob("*.py"):
        for name, _, line in read(path).imports:
            assert not name.startswith("."), f"{path}:{line}: relative import"
            yield path, name


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def import_graph(package: str) -> dict[str, set[str]]:
    """The modules of the same package that each module of the package imports."""
    paths = {module_name(path): path for path in folder_of(package).rglob("*.py")}
    graph: dict[str, set[str]] = {}
    for module, path in paths.items():
        found = ((name, name.rpartition(".")[0]) for name, _, _ in read(path).imports)
        graph[module] = {name if name in paths else parent for name, parent in found if {name, parent} & paths.keys()}
    return graph


def folder_graph(package: str) -> dict[str, set[str]]:
    """The folders of the package that the modules of each folder import. `.` is the package's own folder."""

    def folder(module: str) -> str:
        path = PACKAGE.parent.joinpath(*module.split("."))
        name = module if path.is_dir() else module.rpartition(".")[0]
        return name.removeprefix(module_name(folder_of(package))).removeprefix(".") or "."

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
    assert packages == {*ALLOWED, "cli"} - {STANDINS}


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_run_downward(package: str) -> None:
    for path, name in imports(package):
        if name.startswith("emberline."):
            other = name.split(".")[1]
            assert other in ALLOWED[package] | {package} | ANYWHERE, (
                f"{path.relative_to(PACKAGE.parent)} imports {name}"
            )


@pytest.mark.parametrize("package", sorted({*ALLOWED, "cli"} - {STANDINS}))
def test_nothing_that_is_not_installed_is_imported(package: str) -> None:
    for path, name in imports(package):
        assert name.partition(".")[0] not in (STANDINS, "tests", "benchmarks"), f"{path} imports {name}"


@pytest.mark.parametrize("package", sorted({*ALLOWED, "cli"}))
def test_no_import_cycles_inside_a_package(package: str) -> None:
    found = cycles(import_graph(package))
    assert not found, f"{package} has import cycles: " + "; ".join(" <-> ".join(modules) for modules in found)


@pytest.mark.parametrize("package", sorted({*ALLOWED, "cli"}))
def test_no_import_cycles_between_folders(package: str) -> None:
    found = [" <-> ".join(folders) for folders in cycles(folder_graph(package))]
    assert not found, f"folders of {package} import each other: {found}"


@pytest.mark.parametrize("folder", ["core", "grammar", "speculation", "tiers", "transfer"])
def test_the_engine_core_imports_no_feature_and_features_import_the_core_alone(folder: str) -> None:
    folders = {path.name for path in (PACKAGE / "engine").iterdir() if path.is_dir()}
    for path in (PACKAGE / "engine" / folder).rglob("*.py"):
        for name, _, line in read(path).imports:
            package, other = [*name.removeprefix("emberline.").split("."), ""][:2]
            known = package != "engine" or other in (folder, "core") or (folder != "core" and other not in folders)
            known = known and (package != "kv" or other not in ("tiers", "transfer") or other == folder)
            assert known, f"{path.relative_to(PACKAGE)}:{line} imports {name}"


@pytest.mark.parametrize("folder", ["http", "common", "batches"])
def test_shared_api_modules_import_no_endpoints(folder: str) -> None:
    for path in (PACKAGE / "api" / folder).rglob("*.py"):
        for name, _, _ in read(path).imports:
            other = name.removeprefix("emberline.api.").split(".")[0]
            imports_endpoints = name.startswith("emberline.api.") and other not in ("http", "common", "batches")
            assert not imports_endpoints, f"{path.relative_to(PACKAGE)} imports {name}"


def test_endpoints_return_responses_and_only_the_app_sends() -> None:
    for path in (PACKAGE / "api").rglob("*.py"):
        if path.parent.name != "http" and path.name != "app.py":
            found = re.search(r"\b(call|exchange)\.(send|start|start_stream|reply)\b", path.read_text())
            assert found is None, f"{path.relative_to(PACKAGE)} sends by itself: {found[0]}; return a Response"


def test_a_module_name_is_in_three_folders_at_most() -> None:
    found = Counter(path.name for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")
    assert not {name: n for name, n in found.items() if n > 3}, "rename one: a search by name should lead to the module"


def test_cycles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"a"}}
    assert cycles(graph) == [["b", "c"]]


@pytest.mark.parametrize("package", sorted(ENGINE_SIDE))
def test_an_engine_host_needs_few_libraries(package: str) -> None:
    for path, name in imports(package):
        top = name.partition(".")[0]
        known = top in sys.stdlib_module_names or top in ENGINE_HOST or top == "emberline"
        known = known or (top in SPEECH and path == PACKAGE / "engine" / "encoders" / "speech.py")
        # Only ranks on several machines import it, which say so where it is missing.
        known = known or (top == "cryptography" and path == PACKAGE / "engine" / "ranks" / "tls.py")
        assert known, f"{path.relative_to(PACKAGE)} imports {name}"


def by_folder(top: Path) -> Iterator[tuple[str, Path]]:
    """The modules under `top`, each with the name of the first-level folder that it is in, or `.`."""
    for path in sorted(top.rglob("*.py")):
        parts = path.relative_to(top).parts
        yield parts[0] if len(parts) > 1 else ".", path


@cache
def places(rule: str) -> dict[str, list[str]]:
    """The places that break a rule of `ratchets.toml`, as `path:line`, by first-level folder."""
    found: dict[str, list[str]] = {}
    if rule == "banned_docstring_openings":
        for folder, path in (*by_folder(PACKAGE), *((STANDINS, path) for _, path in by_folder(folder_of(STANDINS)))):
            lines = (line for line, text in read(path).docstrings if begins_badly(text))
            found.setdefault(folder, []).extend(f"{path.relative_to(PACKAGE.parent)}:{line}" for line in lines)
        return found
    tests = list(by_folder(Path(__file__).parent))
    fakes: dict[str, set[str]] = {}
    for folder, path in tests:
        fakes.setdefault(folder, set()).update(read(path).methods)
    methods = {name for path in PACKAGE.rglob("*.py") for name in read(path).methods}
    for folder, path in tests:
        source = read(path)
        lines = private_uses(source) if rule == "private_uses" else patches(source, methods - fakes[folder])
        found.setdefault(folder, []).extend(f"{path.relative_to(PACKAGE.parent)}:{line}" for line in lines)
    return found


@pytest.mark.parametrize("rule", RATCHETS)
def test_a_ratchet_never_rises(rule: str) -> None:
    for folder, found in places(rule).items():
        allowed = RATCHETS[rule].get(folder, 0)
        assert len(found) <= allowed, (
            f"{len(found)} {rule} in {folder}, ratchets.toml allows {allowed}: mend the new ones instead of raising "
            "the number (CONTRIBUTING.md says how). One or more of these are new:\n" + "\n".join(found)
        )


@pytest.mark.parametrize("rule", RATCHETS)
def test_a_ratchet_follows_what_was_mended(rule: str) -> None:
    # Only the sum is checked, and with a margin, so that two branches that both mend a little do not fail each other.
    found, allowed = places(rule), RATCHETS[rule]
    spare = sum(allowed.values()) - sum(map(len, found.values()))
    lower = {folder: len(found.get(folder, [])) for folder in allowed if len(found.get(folder, [])) < allowed[folder]}
    assert spare <= max(10, sum(allowed.values()) // 20), f"lower the numbers in ratchets.toml, [{rule}]: {lower}"


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


TEST_MODULE = """
import os
import emberline.kv.cache as cache_module
from emberline.service import core
from emberline.service import request_run as run_module
from emberline.service.service import Service, _secret
from tests.fakes import FakeCore
torch = pytest.importorskip("torch")

def spy(): ...

def test(self, monkeypatch, service):
    {}
"""


@pytest.mark.parametrize(
    ("line", "n_private", "n_patches"),
    [
        ("pass", 0, 0),
        ("service._core", 1, 0),
        ("service.core._usage._store", 2, 0),
        ("open()._core = 1", 1, 0),
        ("self._own; os._exit(1); torch._C._cuda; point._replace(x=1); service.__class__", 0, 0),
        ("self.service._running", 1, 0),
        ("from emberline.cli._private import name", 1, 0),
        ("monkeypatch.setattr(core, 'WAIT_S', 1)", 0, 1),
        ("monkeypatch.setattr('emberline.service.core.WAIT_S', 1)", 0, 1),
        ("monkeypatch.setattr(service.core, 'admit', spy)", 0, 1),
        ("monkeypatch.delattr(Service, 'run'); monkeypatch.setitem(core.TABLE, 'a', 1)", 0, 2),
        ("mock.patch('emberline.service.core.WAIT_S', 1); mock.patch.object(core, 'WAIT_S', 1)", 0, 2),
        ("monkeypatch.setattr(os, 'open', spy); monkeypatch.setattr('os.open', spy)", 0, 0),
        ("monkeypatch.setattr(torch.cuda, 'Event', spy); monkeypatch.setattr(FakeCore, 'find', spy)", 0, 0),
        ("monkeypatch.setenv('HOME', '/'); client.patch('/path', json=1)", 0, 0),
        ("core.WAIT_S = 1", 0, 1),
        ("service.core.admit = spy", 0, 1),
        ("server.talk = spy; service.limit = 3", 0, 0),
    ],
)
def test_private_uses_and_patches_are_found(line: str, n_private: int, n_patches: int) -> None:
    source = parse(TEST_MODULE.format(line))
    assert len(list(private_uses(source))) == 1 + n_private  # with the import of `_secret`
    assert len(list(patches(source, {"admit", "run"}))) == n_patches
