"""The plan of the house: which room may import which, and what an engine host must not need."""

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
    "upstream": {"accounts", "balancer", "catalog", "protocol", "service", "text"},
    "service": {"accounts", "catalog", "text", "balancer", "store", "protocol", "upstream"},
    "supervisor": {"balancer", "engine", "protocol"},
    "simulator": {"balancer", "engine", "kv", "protocol"},
    "testing": {"balancer", "upstream", "engine", "kv", "kernels", "protocol"},
    "jobs": {"service", "accounts", "store", "protocol"},
    "api": {"jobs", "service", "accounts", "catalog", "upstream", "protocol"},
}
ANYWHERE = {"config", "log", "__version__"}  # modules of no room: the configuration and the log's form
ENGINE_HOST = {"torch", "numpy", "msgspec", "safetensors", "tokenizers", "triton", "llguidance"}


def imports(room: str) -> Iterator[tuple[Path, str]]:
    for path in (PACKAGE / room).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from ((path, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: relative import"
                if node.module == "emberline":
                    yield from ((path, f"emberline.{alias.name}") for alias in node.names)
                else:
                    yield path, node.module or ""


def test_every_room_is_in_the_plan() -> None:
    rooms = {folder.name for folder in PACKAGE.iterdir() if (folder / "__init__.py").exists()}
    assert rooms == {*ALLOWED, "cli"}


@pytest.mark.parametrize("room", ALLOWED)
def test_imports_run_downward(room: str) -> None:
    for path, name in imports(room):
        if name.startswith("emberline."):
            other = name.split(".")[1]
            assert other in ALLOWED[room] | {room} | ANYWHERE, f"{path.relative_to(PACKAGE)} imports {name}"


@pytest.mark.parametrize("room", sorted(ENGINE_SIDE))
def test_an_engine_host_needs_little(room: str) -> None:
    for path, name in imports(room):
        top = name.partition(".")[0]
        known = top in sys.stdlib_module_names or top in ENGINE_HOST or top == "emberline"
        assert known, f"{path.relative_to(PACKAGE)} imports {name}"
