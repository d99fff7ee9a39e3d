"""A schema document: its sub-schemas by number, and its references. Nothing outside the document is ever fetched.

A `Conjunction` is a set of numbered sub-schemas that one value must satisfy at once; a negative number stands for a
negated sub-schema. Each conjunction becomes one nonterminal of the grammar.
"""

from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias
from urllib.parse import unquote, urldefrag, urljoin

from emberline.protocol.errors import BadInput

MAX_NODES = 20_000
MAX_DEPTH = 100
MAX_WORK = 100_000  # about a second

_DATA_KEYWORDS = {"const", "enum", "default", "examples", "example"}  # their values contain no schemas

Conjunction: TypeAlias = frozenset[int]

TRUE: Conjunction = frozenset()
FALSE: Conjunction = frozenset((-1,))  # number 1 is the schema `true`


def negations(schemas: Conjunction) -> list[Conjunction]:
    """The conjunctions of which at least one holds where `schemas` does not (De Morgan)."""
    return [frozenset((-number,)) for number in sorted(schemas, key=abs)]


def contradictory(schemas: Conjunction) -> bool:
    return -1 in schemas or any(-number in schemas for number in schemas if number > 0)


class UnsupportedSchema(BadInput):
    """A keyword, or a use of one, that the compiler does not support; the message names it."""


@dataclass(slots=True)
class Node:
    """One sub-schema that is an object."""

    schema: dict[str, Any]
    pointer: str  # JSON pointer
    base: str  # base URI
    ref_overrides: bool  # up to draft 7, `$ref` disables its sibling keywords


class Document:
    """Numbers the sub-schemas, resolves references, and bounds the work spent on the whole schema."""

    def __init__(self, schema: Any, param: str, lenient: bool = False) -> None:
        """lenient: keywords that JSON Schema does not define are annotations, as it says, and no error."""
        self.param = param
        self.lenient = lenient
        self.nodes: list[Node] = []
        self._numbers: dict[int, int] = {}
        self._resources: dict[str, Any] = {}
        self._anchors: dict[tuple[str, str], Any] = {}
        self._dynamic_anchors: dict[str, list[Any]] = {}
        self._kept_alive: list[Any] = [schema]  # numbers are looked up by object identity
        self._work = 0
        self._n_visited = 0
        self.dropped: list[str] = []  # keywords of which part of the allowed values is never generated
        self._number({}, "", "", False)  # number 0 is never used: it has no negative
        self._number({}, "", "", False)  # number 1 is `true`
        self._resources[""] = schema
        self._walk(schema, "", "", False, 0)
        self.root = self.conjunction(schema)

    def spend(self, amount: int = 1) -> None:
        self._work += amount
        if self._work > MAX_WORK:
            raise BadInput("the schema is too complex: its combinations multiply. Simplify it", param=self.param)

    def fail(self, node: Node | None, message: str) -> NoReturn:
        place = "" if node is None else f" (at #{node.pointer or '/'})"
        raise BadInput(message + place, param=self.param)

    def refuse(self, node: Node, keyword: str, why: str = "") -> NoReturn:
        """Raises an error that names the keyword and its location."""
        text = f"the schema keyword {keyword!r} at #{node.pointer}/{_pointer_token(keyword)} is not supported"
        raise UnsupportedSchema(text + (f": {why}" if why else ""), param=self.param)

    def unsupported(self, message: str) -> NoReturn:
        raise UnsupportedSchema(message, param=self.param)

    def count(self, node: Node, keyword: str, value: Any) -> int:
        """The value of a keyword that must be a whole number of at least 0."""
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != value // 1:
            self.fail(node, f"{keyword!r} must be a whole number, 0 or more")
        return int(value)

    def note_dropped(self, node: Node, keyword: str) -> None:
        """Part of what the keyword allows will never be generated; if no value is left, the error names it."""
        self.dropped.append(f"{keyword!r} at #{node.pointer}/{_pointer_token(keyword)}")

    def conjunction(self, schema: Any, node: Node | None = None, path: str = "") -> Conjunction:
        """The conjunction of one sub-schema; `node` and `path` locate one that is not part of the document."""
        if schema is True or schema == {}:
            return TRUE
        if schema is False:
            return FALSE
        if not isinstance(schema, dict):
            pointer = (node.pointer if node else "") + path
            raise BadInput(f"a schema must be an object or a boolean (at #{pointer or '/'})", param=self.param)
        number = self._numbers.get(id(schema))
        if number is None:  # synthesized from parts of others
            base, pointer, overrides = (
                (node.base, node.pointer + path, node.ref_overrides) if node else ("", path, False)
            )
            number = self._number(schema, pointer, base, overrides)
        return frozenset((number,))

    def node(self, number: int) -> Node:
        return self.nodes[abs(number)]

    def resolve(self, reference: Any, node: Node, keyword: str) -> Conjunction:
        if not isinstance(reference, str):
            self.fail(node, f"{keyword} must be a string")
        full = node.base.split("#")[0] + reference if reference.startswith("#") else urljoin(node.base, reference)
        uri, fragment = urldefrag(full)
        if uri not in self._resources:
            self.refuse(node, keyword, f"{reference!r} is outside this schema, and nothing is fetched")
        target = self._resources[uri]
        if fragment.startswith("/"):
            target = self._follow(target, fragment, reference, node)
        elif fragment:
            if (uri, fragment) not in self._anchors:
                self.fail(node, f"{keyword} refers to {reference!r}, which does not exist")
            target = self._anchors[uri, fragment]
        return self.conjunction(target, node)

    def resolve_dynamic(self, reference: Any, node: Node) -> Conjunction:
        """Resolved like `$ref` where only one anchor of that name exists: then the dynamic scope does not matter."""
        name = reference.rpartition("#")[2] if isinstance(reference, str) else ""
        if name and not name.startswith("/") and len(self._dynamic_anchors.get(name, ())) > 1:
            self.refuse(node, "$dynamicRef", f"several $dynamicAnchor {name!r} exist")
        return self.resolve(reference, node, "$dynamicRef")

    def _follow(self, target: Any, fragment: str, reference: str, node: Node) -> Any:
        for raw in fragment[1:].split("/"):
            key = unquote(raw).replace("~1", "/").replace("~0", "~")
            if isinstance(target, dict) and key in target:
                target = target[key]
            elif isinstance(target, list) and key.isdigit() and int(key) < len(target):
                target = target[int(key)]
            else:
                self.fail(node, f"$ref refers to {reference!r}, which does not exist")
        return target

    def _number(self, schema: dict[str, Any], pointer: str, base: str, overrides: bool) -> int:
        self._kept_alive.append(schema)
        self._numbers[id(schema)] = len(self.nodes)
        self.nodes.append(Node(schema, pointer, base, overrides))
        return len(self.nodes) - 1

    def _walk(self, value: Any, pointer: str, base: str, overrides: bool, depth: int) -> None:
        """Numbers every object in document order and registers ids and anchors."""
        self._n_visited += 1
        if self._n_visited > MAX_NODES:
            raise BadInput(f"the schema has more than {MAX_NODES} parts: simplify it", param=self.param)
        if depth > MAX_DEPTH:
            raise BadInput(f"the schema is nested more than {MAX_DEPTH} deep: flatten it with $defs", param=self.param)
        if isinstance(value, list):
            for index, item in enumerate(value):
                self._walk(item, f"{pointer}/{index}", base, overrides, depth + 1)
        elif isinstance(value, dict):
            if isinstance(value.get("$schema"), str):
                overrides = any(f"draft-0{n}" in value["$schema"] for n in (3, 4, 6, 7))
            if not (overrides and "$ref" in value):
                base = self._identify(value, base)
            self._number(value, pointer, base, overrides)
            for key, item in value.items():
                if key not in _DATA_KEYWORDS or pointer.rpartition("/")[2] in {"properties", "$defs", "definitions"}:
                    self._walk(item, f"{pointer}/{_pointer_token(key)}", base, overrides, depth + 1)

    def _identify(self, schema: dict[str, Any], base: str) -> str:
        for key in ("$id", "id"):
            name = schema.get(key)
            if not isinstance(name, str) or (
                key == "id" and "$schema" not in schema and not name.startswith(("#", "http"))
            ):
                continue
            if name.startswith("#"):
                self._anchors.setdefault((base, name[1:]), schema)
            else:
                base = urldefrag(urljoin(base, name))[0]
                self._resources.setdefault(base, schema)
        for key in ("$anchor", "$dynamicAnchor"):
            if isinstance(schema.get(key), str):
                self._anchors.setdefault((base, schema[key]), schema)
                if key == "$dynamicAnchor":
                    self._dynamic_anchors.setdefault(schema[key], []).append(schema)
        return base


def _pointer_token(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
