"""A schema document: its parts by number, and what its references mean. Nothing outside it is ever fetched."""

from dataclasses import dataclass
from typing import Any, NoReturn
from urllib.parse import unquote, urldefrag, urljoin

from emberline.protocol.errors import BadInput
from emberline.text.grammar.goals import FALSE, TRUE, Goal

MAX_NODES = 20_000
MAX_DEPTH = 100
MAX_WORK = 100_000  # about a second

_DATA = {"const", "enum", "default", "examples", "example"}  # values, in which nothing is a schema


class UnsupportedSchema(BadInput):
    """A keyword, or a use of one, that is beyond us; the message names it."""


@dataclass(slots=True)
class Node:
    schema: dict[str, Any]
    pointer: str
    base: str
    old: bool  # up to draft 7: `$ref` silences its neighbours


class Document:
    """Numbers the objects of a schema; counts the work spent on it."""

    def __init__(self, schema: Any, where: str) -> None:
        self.where = where
        self.nodes: list[Node] = []
        self._numbers: dict[int, int] = {}
        self._resources: dict[str, Any] = {}
        self._anchors: dict[tuple[str, str], Any] = {}
        self._dynamic: dict[str, list[Any]] = {}
        self._kept: list[Any] = [schema]  # numbers go by identity: what has one must stay
        self._work = 0
        self._n_seen = 0
        self.given_up: list[str] = []
        self._number({}, "", "", False)  # number 0 is never used: a goal's sign needs another
        self._number({}, "", "", False)  # number 1 is `true`
        self._resources[""] = schema
        self._walk(schema, "", "", False, 0)
        self.root = self.goal(schema)

    def spend(self, amount: int = 1) -> None:
        self._work += amount
        if self._work > MAX_WORK:
            raise BadInput("the schema is too complex: its combinations multiply. Simplify it", param=self.where)

    def fail(self, node: Node | None, message: str) -> NoReturn:
        place = "" if node is None else f" (at #{node.pointer or '/'})"
        raise BadInput(message + place, param=self.where)

    def refuse(self, node: Node, keyword: str, why: str = "") -> NoReturn:
        """An error that names the keyword and where it stands."""
        text = f"the schema keyword {keyword!r} at #{node.pointer}/{_token(keyword)} is not supported"
        raise UnsupportedSchema(text + (f": {why}" if why else ""), param=self.where)

    def unsupported(self, message: str) -> NoReturn:
        raise UnsupportedSchema(message, param=self.where)

    def give_up(self, node: Node, keyword: str) -> None:
        """Part of what the schema allows will never be generated; should nothing be left, this is why."""
        self.given_up.append(f"{keyword!r} at #{node.pointer}/{_token(keyword)}")

    def goal(self, schema: Any, node: Node | None = None, path: str = "") -> Goal:
        """The goal to satisfy one sub-schema."""
        if schema is True or schema == {}:
            return TRUE
        if schema is False:
            return FALSE
        if not isinstance(schema, dict):
            pointer = (node.pointer if node else "") + path
            raise BadInput(f"a schema must be an object or a boolean (at #{pointer or '/'})", param=self.where)
        number = self._numbers.get(id(schema))
        if number is None:  # made on the way, of parts of others
            base, pointer, old = (node.base, node.pointer + path, node.old) if node else ("", path, False)
            number = self._number(schema, pointer, base, old)
        return frozenset((number,))

    def node(self, number: int) -> Node:
        return self.nodes[abs(number)]

    def resolve(self, reference: Any, node: Node, keyword: str) -> Goal:
        if not isinstance(reference, str):
            self.fail(node, f"{keyword} must be a string")
        full = node.base.split("#")[0] + reference if reference.startswith("#") else urljoin(node.base, reference)
        uri, fragment = urldefrag(full)
        if uri not in self._resources:
            self.refuse(node, keyword, f"{reference!r} lies outside this schema, and nothing is fetched")
        target = self._resources[uri]
        if fragment.startswith("/"):
            target = self._follow(target, fragment, reference, node)
        elif fragment:
            if (uri, fragment) not in self._anchors:
                self.fail(node, f"{keyword} names {reference!r}, which does not exist")
            target = self._anchors[uri, fragment]
        return self.goal(target, node)

    def resolve_dynamic(self, reference: Any, node: Node) -> Goal:
        """As a plain reference, where only one anchor of that name exists: then the caller does not matter."""
        name = reference.rpartition("#")[2] if isinstance(reference, str) else ""
        if name and not name.startswith("/") and len(self._dynamic.get(name, ())) > 1:
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
                self.fail(node, f"$ref names {reference!r}, which does not exist")
        return target

    def _number(self, schema: dict[str, Any], pointer: str, base: str, old: bool) -> int:
        self._kept.append(schema)
        self._numbers[id(schema)] = len(self.nodes)
        self.nodes.append(Node(schema, pointer, base, old))
        return len(self.nodes) - 1

    def _walk(self, value: Any, pointer: str, base: str, old: bool, depth: int) -> None:
        """Numbers every object, in order, and notes ids and anchors on the way."""
        self._n_seen += 1
        if self._n_seen > MAX_NODES:
            raise BadInput(f"the schema has more than {MAX_NODES} parts: simplify it", param=self.where)
        if depth > MAX_DEPTH:
            raise BadInput(f"the schema is nested more than {MAX_DEPTH} deep: flatten it with $defs", param=self.where)
        if isinstance(value, list):
            for index, item in enumerate(value):
                self._walk(item, f"{pointer}/{index}", base, old, depth + 1)
        elif isinstance(value, dict):
            if isinstance(value.get("$schema"), str):
                old = any(f"draft-0{n}" in value["$schema"] for n in (3, 4, 6, 7))
            if not (old and "$ref" in value):
                base = self._identify(value, base)
            self._number(value, pointer, base, old)
            for key, item in value.items():
                if key not in _DATA or pointer.rpartition("/")[2] in {"properties", "$defs", "definitions"}:
                    self._walk(item, f"{pointer}/{_token(key)}", base, old, depth + 1)

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
                    self._dynamic.setdefault(schema[key], []).append(schema)
        return base


def _token(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
