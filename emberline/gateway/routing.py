"""Routing of a gateway: the models that it tries for a request, in order, by dynamic routes and fallback chains.

Settings are checked when they are written, so that no chain loops and every route that is named exists. The same is
checked again for each request, because aliases may have changed since.
"""

from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import NamedTuple, Protocol

from emberline.protocol.errors import BadInput
from emberline.protocol.gateway import DYNAMIC, Condition, GatewaySettings, MetadataValue, RouteRule

OURS = "workers-ai/"  # may begin the name of a model of this server, as of Cloudflare's
MAX_STEPS = 10  # models that one request may try
_OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
}

Metadata = Mapping[str, MetadataValue]


class Counter(NamedTuple):
    """A count that a rule limits: requests, or pico-units of cost, in windows of `per_s`."""

    name: str
    per_s: int
    limit: int


class Counters(Protocol):
    def has_room(self, counter: Counter) -> bool:
        """True if less than its limit was counted in its current window."""


class Plan(NamedTuple):
    models: tuple[str, ...]
    caller: str = ""  # for whom an alias of several models is resolved
    rates: tuple[Counter, ...] = ()  # that this request counts for
    budgets: tuple[Counter, ...] = ()


class _NoLimits:
    def has_room(self, counter: Counter) -> bool:
        return True


def plan(
    settings: GatewaySettings, model: str, metadata: Metadata, caller: str, counters: Counters | None = None
) -> Plan:
    """`caller` is the same for requests that `percent` must treat alike: a session, or the request where there is
    none. BadInput: there is no such route, or the chain loops."""
    found = _Expansion(settings, metadata, caller, counters or _NoLimits())
    found.add(model, ())
    return Plan(tuple(found.models[:MAX_STEPS]), caller, tuple(found.rates), tuple(found.budgets))


class _Expansion:
    def __init__(self, settings: GatewaySettings, metadata: Metadata, caller: str, counters: Counters) -> None:
        self.models: list[str] = []
        self.rates: list[Counter] = []
        self.budgets: list[Counter] = []
        self._settings = settings
        self._fallbacks = {name.lower(): chain for name, chain in settings.fallbacks.items()}
        self._metadata = metadata
        self._caller = caller
        self._counters = counters

    def add(self, model: str, path: tuple[str, ...]) -> None:
        """The model, or what its route chooses, and then its fallbacks. `path` leads here."""
        model = model.removeprefix(OURS)
        name = model.lower()
        if name in path:
            raise BadInput(f"the fallback chain loops: {' → '.join((*path, name))}", param="model")
        path = (*path, name)
        if len(self.models) >= MAX_STEPS:
            return
        if name.startswith(DYNAMIC):
            for chosen in self._choose(model[len(DYNAMIC) :]):
                self.add(chosen, path)
        elif name not in (known.lower() for known in self.models):
            self.models.append(model)
        for fallback in self._fallbacks.get(name, ()):
            self.add(fallback, path)

    def _choose(self, route: str) -> tuple[str, ...]:
        rules = self._settings.routes.get(route)
        if rules is None:
            known = ", ".join(f"{DYNAMIC}{name}" for name in self._settings.routes) or "none"
            raise BadInput(
                f"gateway {self._settings.name} has no route {route[:64]!r}; its routes: {known}", param="model"
            )
        for number, rule in enumerate(rules):
            if not all(holds(condition, self._metadata) for condition in rule.when):
                continue
            name = f"{route}#{number}"
            if rule.percent is not None and share(f"{name}/{self._caller}") * 100 >= rule.percent:
                continue
            rate, budget = self._limits(name, rule)
            if all(self._counters.has_room(counter) for counter in (*rate, *budget)):
                self.rates += rate
                self.budgets += budget
                return rule.models
        raise BadInput(f"no rule of the route {route!r} takes this request: give it a last rule without conditions")

    def _limits(self, name: str, rule: RouteRule) -> tuple[list[Counter], list[Counter]]:
        rate, budget = rule.rate, rule.budget
        return (
            [] if rate is None else [Counter(self._counter(f"{name}/rate", rate.by), rate.per_s, rate.requests)],
            []
            if budget is None
            else [Counter(self._counter(f"{name}/budget", budget.by), budget.per_s, int(budget.amount * 1e12))],
        )

    def _counter(self, name: str, by: str) -> str:
        if not by:
            return name
        value = str(self._metadata.get(by, "")).encode("utf-8", "surrogatepass")
        return f"{name}/{blake2b(value, digest_size=12).hexdigest()}"


def share(key: str) -> float:
    """Map the key to a number from 0 to 1, always the same for the same key."""
    digest = blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8, person=b"emberline.route").digest()
    return int.from_bytes(digest, "little") / 2**64


def holds(condition: Condition, metadata: Metadata) -> bool:
    value, wanted = metadata.get(condition.key), condition.value
    if condition.op == "exists":
        return (value is not None) == bool(wanted)
    if condition.op == "ne":
        return value is None or not _equal(value, wanted)
    if value is None:
        return False
    if condition.op == "eq":
        return _equal(value, wanted)
    if condition.op == "in":
        return any(_equal(value, one) for one in (wanted if isinstance(wanted, tuple) else (wanted,)))
    try:
        assert not isinstance(wanted, tuple)
        return _OPERATORS[condition.op](float(value), float(wanted))
    except (ValueError, OverflowError):
        return False


def _equal(value: MetadataValue, wanted: object) -> bool:
    """Headers and JSON may write a number or a boolean as text."""
    return _text(value) == _text(wanted)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# --- when settings are written ----------------------------------------------------------------------------------------


def check_chains(settings: GatewaySettings) -> None:
    """BadInput where a chain of fallbacks and routes loops, a route that is named does not exist, or a condition can
    never be evaluated."""
    edges: dict[str, list[str]] = {}
    for name, chain in settings.fallbacks.items():
        edges.setdefault(name.lower(), []).extend(chain)
    for name, rules in settings.routes.items():
        models = [model for rule in rules for model in rule.models]
        edges.setdefault(f"{DYNAMIC}{name}".lower(), []).extend(models)
        for rule in rules:
            for condition in rule.when:
                _check_condition(condition, name)
    routes = {f"{DYNAMIC}{name}".lower() for name in settings.routes}
    if len(routes) < len(settings.routes):
        raise BadInput("two routes have the same name in different cases of letters", param="routes")
    for model in (*edges, *(target for chain in edges.values() for target in chain)):
        if model.lower().startswith(DYNAMIC) and model.lower() not in routes:
            raise BadInput(f"there is no route {model}", param="routes")
    _check_acyclic(edges)


def _check_condition(condition: Condition, route: str) -> None:
    if condition.op in _OPERATORS:
        try:
            assert not isinstance(condition.value, tuple)
            float(condition.value)
        except (ValueError, OverflowError, AssertionError):
            raise BadInput(f"route {route}: `{condition.op}` compares with a number", param="routes") from None
    elif condition.op != "in" and isinstance(condition.value, tuple):
        raise BadInput(f"route {route}: a list of values needs the operator `in`", param="routes")


def _check_acyclic(edges: Mapping[str, list[str]]) -> None:
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            raise BadInput(f"the fallback chain loops: {' → '.join((*path, name))}", param="fallbacks")
        if name in done or len(path) > 1000:
            return
        for target in edges.get(name, ()):
            visit(target.lower(), (*path, name))
        done.add(name)

    for name in edges:
        visit(name, ())
