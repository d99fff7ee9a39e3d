"""Fairness between accounts: who has had how much, in tokens."""

from collections.abc import Iterator

CACHED = 0.1  # of a cached prompt token, against one that is computed
OUTPUT = 2.0  # of a token drawn
_MOST_IDLE = 10_000  # accounts remembered although they have nothing open


class Tenant:
    __slots__ = ("account", "counter", "n_open")

    def __init__(self, account: str) -> None:
        self.account = account
        self.counter = 0.0  # virtual tokens
        self.n_open = 0  # requests that wait or run


class Tenants:
    """The one with the lowest counter goes first. Who comes back from idleness brings no claim on the time it was away:
    its counter is lifted to the lowest of those who are there, or to that of the last who left."""

    def __init__(self) -> None:
        self._tenants: dict[str, Tenant] = {}
        self._there: set[Tenant] = set()
        self._last = 0.0

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._tenants.values())

    def enter(self, account: str) -> Tenant:
        tenant = self._tenants.get(account)
        if tenant is None:
            self._trim()
            tenant = self._tenants[account] = Tenant(account)
        if tenant.n_open == 0:
            floor = min((other.counter for other in self._there), default=self._last)
            tenant.counter = max(tenant.counter, floor)
            self._there.add(tenant)
        tenant.n_open += 1
        return tenant

    def leave(self, tenant: Tenant) -> None:
        tenant.n_open -= 1
        assert tenant.n_open >= 0
        if tenant.n_open == 0:
            self._there.discard(tenant)
            self._last = max(self._last, tenant.counter)

    def _trim(self) -> None:
        if len(self._tenants) - len(self._there) > _MOST_IDLE:
            self._tenants = {tenant.account: tenant for tenant in self._there}


def prompt_cost(uncached_tokens: int, cached_tokens: int) -> float:
    return uncached_tokens + CACHED * cached_tokens
