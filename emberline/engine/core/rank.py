"""A rank executes plans. Rank 0 and its followers do it alike, and so does an engine with one rank.

A plan has rows, which the runner computes, and orders, which are for the features' executors: saves and fetches of KV
blocks, for instance. A plan without rows is legal: its orders are executed, and nothing is launched.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from emberline.engine.core.plan import Handle, Runner, StepPlan
from emberline.kv.notice_queue import NoticeQueue


class Executor(Protocol):
    """Hands of a feature on one rank. Its threads work; only `close` blocks."""

    @property
    def queue(self) -> NoticeQueue[Any]:
        """Notices of its threads, whose socket wakes the step loop."""

    def execute(self, orders: Sequence[Any]) -> None:
        """Begin what is ordered, in this order. The steps up to the plan's `after` have completed."""

    def reports(self) -> list[Any]:
        """Take what has become of orders since the last call."""

    def close(self) -> None:
        """End the threads, after they have written what must not be lost."""


class Rank:
    """The runner and the executors of one rank. `publish` sends plans to the followers, if there are any."""

    def __init__(
        self,
        runner: Runner,
        executors: Mapping[str, Executor] | None = None,
        publish: Callable[[StepPlan], None] | None = None,
    ) -> None:
        self.runner, self._executors, self._publish = runner, executors or {}, publish

    def run(self, plan: StepPlan) -> Handle | None:
        """Execute a plan. Returns None if it has no rows."""
        if self._publish is not None:
            self._publish(plan)
        for feature, orders in plan.orders.items():
            self._executors[feature].execute(orders)
        return self.runner.launch(plan) if plan.n_rows else None


class OrderBox:
    """Orders of features that wait for a plan, which takes them to every rank."""

    def __init__(self) -> None:
        self._orders: dict[str, list[Any]] = {}
        self._lock = threading.Lock()
        self.urgent = False  # some order should not wait for the next step

    def __bool__(self) -> bool:
        return bool(self._orders)

    def add(self, feature: str, order: Any) -> None:
        """Add an order, from any thread."""
        with self._lock:
            self._orders.setdefault(feature, []).append(order)
            self.urgent = self.urgent or order.urgent

    def take(self) -> dict[str, list[Any]]:
        """Orders by feature, each in the order in which they came."""
        if not self._orders:
            return {}
        with self._lock:
            taken, self._orders, self.urgent = self._orders, {}, False
        return taken
