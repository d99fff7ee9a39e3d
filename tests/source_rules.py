"""What `test_architecture.py` reads from source files: imports, docstrings, private uses and patches, found by AST."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

BANNED = "Of|That|Until|Whether|What|Who|Whom|Whose|Which|It|Its|This|These|Those|They|Them|Their|He|His"
OURS = (
    "emberline",
    "standins",
    "benchmarks",
)  # packages whose private names tests should not use, and whose code not patch
TESTS = ("tests", "")  # a relative import has an empty first part
NAMED_TUPLE = {"_replace", "_asdict", "_fields", "_make", "_field_defaults"}  # public despite the underscore
PATCHING = {"setattr", "delattr", "setitem", "delitem"}  # methods of pytest's monkeypatch
MOCKING = {"patch", "object", "dict"}  # functions of unittest.mock
Function = ast.FunctionDef | ast.AsyncFunctionDef
DEFINITIONS = {ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef}
WANTED = {ast.Attribute, ast.Call, ast.Assign, ast.Import, ast.ImportFrom, *DEFINITIONS}  # that rules are about
LEAVES = {ast.Name, ast.Constant, ast.Load, ast.Store, ast.Pass, ast.alias}  # most nodes; none contains a wanted one


@dataclass(slots=True)
class Source:
    """The parts of a module that rules are about. Those inside functions and under TYPE_CHECKING count as well."""

    imports: list[tuple[str, str, int]] = field(default_factory=list)  # `package.module[.symbol]`, name here, line
    docstrings: list[tuple[int, str]] = field(default_factory=list)  # line and text
    classes: set[str] = field(default_factory=set)
    functions: set[str] = field(default_factory=set)
    methods: set[str] = field(default_factory=set)
    private_attributes: list[ast.Attribute] = field(default_factory=list)
    calls: list[ast.Call] = field(default_factory=list)  # those that may patch something
    assignments: list[tuple[ast.Attribute, ast.expr]] = field(default_factory=list)  # to attributes

    def names_from(self, *packages: str) -> set[str]:
        """The names in this module of everything that it imports from these packages."""
        return {name for path, name, _ in self.imports if path.partition(".")[0] in packages}

    @property
    def foreign(self) -> set[str]:
        """The names in this module that stand for libraries."""
        return {name for _, name, _ in self.imports} - self.names_from(*OURS, *TESTS)


@cache
def read(path: Path) -> Source:
    """Parse a file once for all tests."""
    return parse(path.read_text())


def parse(text: str) -> Source:
    """Collect what rules are about in one pass over a module."""
    source = Source()
    for node in walk(ast.parse(text)):
        if isinstance(node, ast.Attribute):
            if is_private(node.attr):
                source.private_attributes.append(node)
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and node.func.attr in PATCHING | MOCKING and node.args:
                source.calls.append(node)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Attribute):
                    source.assignments.append((target, node.value))
                elif isinstance(target, ast.Name) and root(node.value) == "pytest":  # pytest.importorskip("torch")
                    source.imports.append(("pytest", target.id, node.lineno))
        elif isinstance(node, ast.Import):
            source.imports.extend(
                (alias.name, alias.asname or alias.name.partition(".")[0], node.lineno) for alias in node.names
            )
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            source.imports.extend(
                (f"{module}.{alias.name}", alias.asname or alias.name, node.lineno) for alias in node.names
            )
        elif isinstance(node, ast.Module | ast.ClassDef | Function):
            docstring = ast.get_docstring(node, clean=False)
            if docstring:
                source.docstrings.append((node.body[0].lineno, docstring.lstrip()))
            if isinstance(node, Function):
                source.functions.add(node.name)
            elif isinstance(node, ast.ClassDef):
                source.classes.add(node.name)
                source.methods.update(child.name for child in node.body if isinstance(child, Function))
    return source


def walk(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of the types in WANTED, in no particular order. Takes a third of the time of `ast.walk`."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if type(node) in WANTED:
            yield node
        for value in vars(node).values():
            if isinstance(value, list):
                waiting += [item for item in value if isinstance(item, ast.AST) and type(item) not in LEAVES]
            elif isinstance(value, ast.AST) and type(value) not in LEAVES:
                waiting.append(value)


def begins_badly(docstring: str) -> bool:
    """True if the docstring begins without its subject: with a word of BANNED, or with "As `name`"."""
    return re.match(rf"(({BANNED})\b|As `)", docstring, re.IGNORECASE) is not None


def is_private(name: str) -> bool:
    """True if the name begins with one underscore and is not part of the interface of named tuples."""
    return name.startswith("_") and not name.startswith("__") and name not in NAMED_TUPLE


def root(node: ast.expr) -> str:
    """The name that an expression such as `a.b().c[0]` begins with; empty if it begins with none."""
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript | ast.Await):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def private_uses(source: Source) -> Iterator[int]:
    """The line of every use of `x._name` in a test module, and of every import of a private name or module of ours.

    `self._name` and `cls._name` are the test's own, `os._exit` is a library's. Each link of `a._b._c` counts.
    """
    foreign = source.foreign
    for node in source.private_attributes:
        is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        if not is_own and root(node.value) not in foreign:
            yield node.lineno
    for path, _, line in source.imports:
        parts = path.split(".")
        if parts[0] in OURS + TESTS and any(is_private(part) for part in parts):
            yield line


def patches(source: Source, methods: set[str]) -> Iterator[int]:
    """The line of every place in a test module that replaces a part of our own code.

    Three forms count: pytest's monkeypatch and `unittest.mock.patch`; an assignment to an attribute of a module or
    class that is imported from the package; and a function of the test assigned over one of `methods`, the methods of
    the package. Libraries and what the tests define themselves (fakes, scripted servers) may be patched.
    """
    allowed = source.foreign | source.classes | source.names_from(*TESTS) | {"", "self", "__import__"}
    ours = source.names_from(*OURS)
    for node in source.calls:
        called, target = node.func, node.args[0]
        assert isinstance(called, ast.Attribute)
        is_fixture = called.attr in PATCHING and isinstance(called.value, ast.Name)
        if not is_fixture and not (called.attr in MOCKING and root(called) in ("mock", "patch")):
            continue
        if isinstance(target, ast.Constant):
            is_ours = str(target.value).partition(".")[0] in OURS
        else:
            is_ours = root(target) not in allowed
        if is_ours:
            yield node.lineno
    for attribute, value in source.assignments:
        if is_private(attribute.attr):
            continue  # a private use already
        is_function = isinstance(value, ast.Lambda) or (isinstance(value, ast.Name) and value.id in source.functions)
        replaces_method = is_function and attribute.attr in methods and root(attribute) not in allowed
        if replaces_method or (isinstance(attribute.value, ast.Name) and attribute.value.id in ours):
            yield attribute.lineno
