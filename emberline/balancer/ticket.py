"""A request between its offer and its end."""

from itertools import count
from typing import TYPE_CHECKING

from emberline.balancer.ask import Ask
from emberline.balancer.route import Route
from emberline.balancer.tenants import Tenant
from emberline.protocol.errors import EmberlineError
from emberline.protocol.request import Priority

if TYPE_CHECKING:
    from emberline.balancer.worker import Worker

_numbers = count()


class Ticket:
    """Handed out once by `dispatch`: with a route, or with the error that ends it."""

    __slots__ = (
        "arrived_s",
        "ask",
        "checked_s",
        "deadline_s",
        "error",
        "give_up_s",
        "held_on",
        "number",
        "priority",
        "rank_s",
        "route",
        "tenant",
        "waiting",
    )

    def __init__(self, ask: Ask, tenant: Tenant, arrived_s: float, now_s: float) -> None:
        self.number = next(_numbers)
        self.ask = ask
        self.tenant = tenant
        self.priority = Priority[ask.priority.upper()]
        self.arrived_s = arrived_s
        self.deadline_s = None if ask.deadline_s is None else now_s + ask.deadline_s
        self.give_up_s = now_s + ask.wait_s  # where no endpoint is connected
        self.rank_s: float | None = (
            None  # its arrival, plus the seconds of its prompt: for so long a shorter one passes
        )
        self.held_on: Worker | None = None  # the endpoint it waits for; None while it waits for any at all
        self.waiting = True
        self.checked_s = now_s
        self.route: Route | None = None
        self.error: EmberlineError | None = None

    @property
    def order(self) -> tuple[int, float, float, int]:
        return self.priority, self.tenant.counter, self.rank_s or self.arrived_s, self.number
