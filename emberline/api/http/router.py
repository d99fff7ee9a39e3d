"""Routing: which endpoint serves a path, who may call it, and the format of its errors.

Matching works on the raw bytes of the path as the client sent them, so that a model id may hold slashes plain or as
%2F, and nothing but the path decides which policy applies.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

from emberline.api.http.errors import Dialect, MethodNotAllowed
from emberline.api.http.exchange import HttpExchange
from emberline.api.http.streaming import Response
from emberline.protocol.errors import Forbidden, NotFound
from emberline.protocol.request import Principal

Endpoint = Callable[[HttpExchange], Awaitable[Response]]

ACCOUNTS = "/client/v4/accounts/"
_ACCOUNT = "{account}"
_REST = ("{model}", "{asset}")  # the rest of the path
_ID = "{id}"
GATEWAY = "/v1/{account}/{gateway}"  # begins the paths of gateways
ANY_API = "*"  # of a route that leads to several APIs: its endpoint checks which


# What a key's scope names: the API of a route by the first word of its path.
APIS = {
    "chat": "chat",
    "completions": "chat",
    "tokenize": "chat",
    "detokenize": "chat",
    "tokenizer_info": "chat",
    "responses": "responses",
    "messages": "messages",
    "run": "run",
    "embeddings": "embeddings",
    "rerank": "rerank",
    "audio": "audio",
    "images": "images",
    "models": "models",
    "tasks": "models",
    "authors": "models",
    "files": "files",
    "batches": "batches",
    "queue": "batches",
    "events": "webhooks",
    "webhook_endpoints": "webhooks",
    "subscriptions": "webhooks",
    "usage": "usage",
    "prices": "models",
    "providers": "providers",
    "generate": "chat",  # Ollama's, as those below
    "embed": "embeddings",
    "tags": "models",
    "show": "models",
    "ps": "models",
    "pull": "models",
    "version": "models",
    "ai-gateway": "run",  # of the binding, as those below
    "ai-api": "models",
    "binding": "run",
    "gateways": "gateways",
    "cache": "cache",
    "chats": "chat",
    "push": "push",  # the routes that change pushed models: no key that may list models has them by that
}
API_NAMES = tuple(dict.fromkeys(APIS.values()))


class Policy(Enum):
    """The callers of a route. Every route has a policy; one that is not OPEN needs a principal (see `authorize`)."""

    OPEN = "open"  # everyone
    KEY = "key"  # every key whose scope includes the route's API; the endpoint shows only its account's objects
    ADMIN = "admin"  # admin keys


@dataclass(frozen=True, slots=True)
class Route:
    """A path may have an {account} after the accounts prefix, one segment {id}, or end in {model} or {asset}, which
    match the whole rest of the path."""

    method: str
    path: str
    policy: Policy
    dialect: Dialect
    endpoint: Endpoint
    summary: str
    body: type[Any] | None = None  # the struct of the JSON body, for the OpenAPI document; the endpoint decodes it
    query: Mapping[str, Any] | None = None  # JSON schemas of query parameters, all optional
    api: str = ""  # that a key's scope names; set for every route with the policy KEY
    opens_websocket: bool = False


def check_api(principal: Principal, api: str) -> None:
    """Raise Forbidden unless the principal may use the API."""
    if principal.apis and not principal.is_admin and api not in principal.apis:
        raise Forbidden(f"this key may not use the API {api!r}; it may use {', '.join(principal.apis)}")


def authorize(principal: Principal, route: Route) -> None:
    """Raise Forbidden unless the principal may call the route."""
    if principal.is_admin:
        return
    if route.policy is not Policy.KEY:
        raise Forbidden("this needs an admin key")
    if route.api != ANY_API:
        check_api(principal, route.api)


@dataclass(frozen=True, slots=True)
class Match:
    """The routes of a path by method, and the values of its placeholders."""

    methods: Mapping[str, Route]
    account: str | None
    path_param: str
    dialect: Dialect  # also of paths without a route
    path: str
    gateway: str = ""
    nearest: str = ""  # the route most like a path without one; empty if none is

    def route(self, method: str) -> Route:
        if not self.methods:
            raise NotFound(_missing(self.path, self.nearest))
        route = self.methods.get("GET" if method == "HEAD" else method)
        if route is None:
            raise MethodNotAllowed(method, ", ".join(sorted(self.methods)))
        return route


class Router:
    def __init__(self, routes: Iterable[Route]) -> None:
        self.routes = tuple(routes)
        self._exact: dict[str, dict[str, Route]] = {}
        self._prefixes: dict[str, dict[str, Route]] = {}
        self._gateway: dict[bool, dict[str, Route]] = {False: {}, True: {}}  # by whether more of the path follows
        static = (route.path.split("/")[2] for route in self.routes if route.path.startswith("/v1/"))
        self._static = {*static, *_MISSING} - {_ACCOUNT}  # what a path behind /v1/ begins with that is no account's
        self._paths = tuple({route.path: None for route in self.routes})
        self._collections = {route.path.partition(_ID)[0] for route in self.routes if _ID in route.path}
        for route in self.routes:
            if route.path.startswith(GATEWAY):
                self._gateway[route.path != GATEWAY][route.method] = route
                continue
            start, _, rest = route.path.rpartition("/")
            table, key = (self._prefixes, f"{start}/") if rest in _REST else (self._exact, route.path)
            methods = table.setdefault(key, {})
            assert route.method not in methods, f"two routes for {route.method} {route.path}"
            methods[route.method] = route

    def find(self, raw_path: bytes) -> Match:
        path, account = raw_path.decode("latin-1"), None
        if path.startswith(ACCOUNTS):
            path, account = _split_account(path)
        methods, path_param = self._exact.get(path), ""
        if methods is None:
            methods, path_param = self._by_id(path)
        if methods is None:
            methods, path_param = self._by_prefix(path)
        gateway = ""
        if not methods and path.startswith("/v1/"):
            methods, account, gateway, path_param = self._of_gateway(path)
        if methods:
            dialect = next(iter(methods.values())).dialect
        else:
            dialect = _unrouted_dialect(path)
        found = unquote(account) if account is not None else None
        nearest = "" if methods else _nearest(path, self._paths)
        return Match(methods or {}, found, unquote(path_param), dialect, path, unquote(gateway), nearest)

    def _by_id(self, path: str) -> tuple[dict[str, Route] | None, str]:
        for collection in self._collections:
            if path.startswith(collection):
                found, slash, rest = path[len(collection) :].partition("/")
                return self._exact.get(f"{collection}{_ID}{slash}{rest}") if found else None, found
        return None, ""

    def _of_gateway(self, path: str) -> tuple[dict[str, Route], str | None, str, str]:
        """Routes, account, gateway and the rest of the path, which no other route has."""
        _, _, account, *more = path.split("/", 4)
        if account in self._static or not account or not more or not more[0]:
            return {}, None, "", ""
        rest = more[1] if len(more) > 1 else ""
        return self._gateway[bool(rest)], account, more[0], rest

    def _by_prefix(self, path: str) -> tuple[dict[str, Route] | None, str]:
        for prefix, methods in self._prefixes.items():
            if path.startswith(prefix) and len(path) > len(prefix):
                return methods, path[len(prefix) :]
        return None, ""


_V1 = f"{ACCOUNTS}{_ACCOUNT}/ai/v1/"
_MISSING = {
    "score": "scoring; `/v1/rerank` scores documents",
    "audio": "speech synthesis",
    "images": "image generation",
    "videos": "video generation",
    "moderations": "moderation",
    "realtime": "realtime sessions",
    "fine_tuning": "fine-tuning",
    "assistants": "assistants; the Responses API replaces them",
    "threads": "threads; the Responses API replaces them",
    "vector_stores": "vector stores",
    "conversations": "conversations; send `previous_response_id`",
}


_SHOWN_CHARS = 100  # of a client's path
_OLLAMA = ("/api/create", "/api/push", "/api/copy", "/api/delete", "/api/blobs/")  # without routes


@lru_cache(256)
def _nearest(path: str, paths: tuple[str, ...]) -> str:
    """The one of the routes' paths that is most like `path`; empty if none is."""
    start = f"{ACCOUNTS}{_ACCOUNT}/"
    prefix = start if path.startswith(start) else ""  # not compared: that would take milliseconds
    known = [one.removeprefix(prefix) for one in paths if one.startswith(start) == bool(prefix)]
    found = get_close_matches(path[len(prefix) :][:_SHOWN_CHARS], known, 1, cutoff=0.75)
    return prefix + found[0] if found else ""


def _missing(path: str, nearest: str) -> str:
    """The message for a path without a route. If other servers have that API, the message names it."""
    if path.startswith(_OLLAMA):
        return "models are added and removed by `emberline pull` and `emberline rm`, not over Ollama's API"
    start = next((start for start in (_V1, "/v1/") if path.startswith(start)), None)
    what = None if start is None else _MISSING.get(path[len(start) :].partition("/")[0])
    if what is None:
        hint = f"did you mean `{nearest}`?" if nearest else "`GET /openapi.json` lists the routes."
        return f"No route for that URI: {ascii(path[:_SHOWN_CHARS])[1:-1]}; {hint}"
    return f"This server has no {what}. `GET /openapi.json` lists what there is."


def _unrouted_dialect(path: str) -> Dialect:
    if path.startswith(_V1):
        return Dialect.OPENAI_ENVELOPED
    if path.startswith(_OLLAMA):
        return Dialect.OLLAMA
    return Dialect.NATIVE if path.startswith("/client/") else Dialect.OPENAI


def _split_account(path: str) -> tuple[str, str]:
    """The path with its account replaced by the placeholder, and the account."""
    account, slash, rest = path[len(ACCOUNTS) :].partition("/")
    return f"{ACCOUNTS}{_ACCOUNT}{slash}{rest}", account
