"""Routes: what the server answers, who may ask, and in which dialect it says no.

Matching works on the path's raw bytes as the client sent them, so that a model id may hold slashes plain or as %2F, and
nothing but the path line decides which policy applies.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple
from urllib.parse import unquote

from emberline.api.http.call import Call, Reply
from emberline.api.http.errors import Dialect, MethodNotAllowed
from emberline.protocol.errors import NotFound

Endpoint = Callable[[Call], Awaitable[Reply | None]]

ACCOUNTS = "/client/v4/accounts/"
_ACCOUNT = "{account}"
_TAIL = "{model}"
_ID = "{id}"


class Policy(Enum):
    OPEN = "open"  # anyone who passes the guard
    KEY = "key"  # whoever the authenticator lets in


@dataclass(frozen=True, slots=True)
class Route:
    """A path may name its {account} after the accounts prefix, have one segment that is an {id}, or end in {model},
    which takes the whole rest."""

    method: str
    path: str
    policy: Policy
    dialect: Dialect
    endpoint: Endpoint
    summary: str
    body: type[Any] | None = None  # what the request's JSON must be; documentation, the endpoint decodes it
    query: Mapping[str, Any] | None = None  # JSON schemas of query parameters, all optional


class Match(NamedTuple):
    route: Route
    account: str | None
    tail: str


class Router:
    def __init__(self, routes: Iterable[Route]) -> None:
        self.routes = tuple(routes)
        self._exact: dict[str, dict[str, Route]] = {}
        self._prefixes: dict[str, dict[str, Route]] = {}
        self._collections = {route.path.partition(_ID)[0] for route in self.routes if _ID in route.path}
        for route in self.routes:
            table = self._prefixes if route.path.endswith(_TAIL) else self._exact
            methods = table.setdefault(route.path.removesuffix(_TAIL), {})
            assert route.method not in methods, f"two routes for {route.method} {route.path}"
            methods[route.method] = route

    def dialect(self, raw_path: bytes) -> Dialect:
        """In whose words to answer that path, whatever becomes of the request."""
        methods, _, _ = self._find(raw_path)
        if methods is not None:
            return next(iter(methods.values())).dialect
        return Dialect.NATIVE if raw_path.startswith(b"/client/") else Dialect.OPENAI

    def match(self, method: str, raw_path: bytes) -> Match:
        methods, account, tail = self._find(raw_path)
        if methods is None:
            raise NotFound("No route for that URI")
        route = methods.get("GET" if method == "HEAD" else method)
        if route is None:
            raise MethodNotAllowed(method, ", ".join(sorted(methods)))
        return Match(route, unquote(account) if account is not None else None, unquote(tail))

    def _find(self, raw_path: bytes) -> tuple[dict[str, Route] | None, str | None, str]:
        """The routes of a path by method, and what its {account} and its {id} or {model} stand for, still quoted."""
        shape, account = _without_account(raw_path.decode("latin-1"))
        methods, tail = self._exact.get(shape), ""
        if methods is None:
            methods, tail = self._by_id(shape)
        if methods is None:
            methods, tail = self._by_prefix(shape)
        return methods, account, tail

    def _by_id(self, shape: str) -> tuple[dict[str, Route] | None, str]:
        for collection in self._collections:
            if shape.startswith(collection):
                found, slash, rest = shape[len(collection) :].partition("/")
                return self._exact.get(f"{collection}{_ID}{slash}{rest}") if found else None, found
        return None, ""

    def _by_prefix(self, shape: str) -> tuple[dict[str, Route] | None, str]:
        for prefix, methods in self._prefixes.items():
            if shape.startswith(prefix) and len(shape) > len(prefix):
                return methods, shape[len(prefix) :]
        return None, ""


def _without_account(path: str) -> tuple[str, str | None]:
    """The path with its account's place taken by the placeholder, and the account."""
    if not path.startswith(ACCOUNTS):
        return path, None
    account, slash, rest = path[len(ACCOUNTS) :].partition("/")
    return f"{ACCOUNTS}{_ACCOUNT}{slash}{rest}", account
