"""Orders of features on their way to every rank: with a plan's rows, or in a plan without rows."""

from functools import partial
from typing import ClassVar

import msgspec

from emberline.engine.core.feature import Feature
from emberline.engine.core.limits import Limits
from emberline.engine.core.plan import StepPlan
from emberline.engine.core.rank import Rank
from emberline.engine.core.scheduler import Scheduler
from emberline.engine.core.step_loop import StepLoop
from emberline.kv.cache import KVCache
from tests.engine.fakes import EOS, FULL, VOCAB, FakeRunner, LateRunner, request


class Note(msgspec.Struct):
    text: str
    urgent: ClassVar[bool] = False


class Cry(msgspec.Struct):
    text: str
    urgent: ClassVar[bool] = True


class Orders(Feature):
    """Gives an order at the end of each step."""

    name = "tiers"

    def __init__(self, kind):
        self.kind, self.n_steps, self.executor = kind, 0, Tiers()

    def catch_up(self):
        """Order something."""
        self.n_steps += 1
        self.core.order("tiers", self.kind(f"step {self.n_steps}"))


class Tiers:
    """In place of tiers: an executor that keeps what it is ordered."""

    def __init__(self):
        self.orders = []

    def execute(self, orders):
        self.orders += [order.text for order in orders]


def loop_with(feature, runner, steps_in_flight, published):
    cache = KVCache([FULL], [32], chunk=32)
    limits = Limits(200, VOCAB, (EOS,), 4, 32)
    scheduler = Scheduler(cache, limits, "fake", [feature])
    loop = StepLoop(scheduler, runner(cache), steps_in_flight, publish=published.append)
    return loop, feature.executor


def test_a_rank_publishes_a_plan_executes_its_orders_and_launches_its_rows():
    seen, plan = [], StepPlan(orders={"tiers": [Note("a")]})

    class Runner:
        launch = partial(seen.append)

    tiers = Tiers()
    rank = Rank(Runner(), {"tiers": tiers}, lambda plan: seen.append((plan, list(tiers.orders))))
    assert rank.run(plan) is None
    assert (seen, tiers.orders) == ([(plan, [])], ["a"]), "a plan without rows is not launched"
    plan.others = ["row"]
    rank.run(plan)
    assert seen[1:] == [(plan, ["a"]), plan]


def test_an_order_that_can_wait_leaves_with_the_next_plan():
    published = []
    loop, tiers = loop_with(Orders(Note), LateRunner, 2, published)
    loop.submit(request("a", [1, 2, 3], max_tokens=8), 0.0)
    loop.step(0.0)
    assert tiers.orders == [], "a step is in flight: another plan follows"
    loop.step(0.0)
    assert tiers.orders == ["step 1"]
    assert [(len(plan.rows), len(plan.orders)) for plan in published] == [(1, 0), (1, 1)]
    assert published[1].after == 0
    loop.step(0.0)
    assert published[2].after == published[0].number, "the first step was absorbed"


def test_an_urgent_order_leaves_in_the_same_step():
    published = []
    loop, tiers = loop_with(Orders(Cry), LateRunner, 2, published)
    loop.submit(request("a", [1, 2, 3], max_tokens=8), 0.0)
    loop.step(0.0)
    assert tiers.orders == ["step 1"]
    assert [(len(plan.rows), len(plan.orders)) for plan in published] == [(1, 0), (0, 1)]


def test_orders_leave_though_nothing_is_computed():
    published = []
    loop, tiers = loop_with(Orders(Note), FakeRunner, 1, published)
    assert not loop.busy
    loop.scheduler.order("tiers", Note("purge"))
    assert loop.busy
    assert not loop.blocked
    loop.step(0.0)
    assert tiers.orders == ["purge", "step 1"]
    assert not loop.busy
    assert [plan.rows for plan in published] == [[]]
