"""Budgets under every schedule: cores that come and die, requests, late rows, lost answers of the store, expiry."""

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from emberline.accounts import budget_leases
from emberline.accounts.budgets import Budget, Budgets, LeaseLimits, Reservation
from emberline.accounts.usage_row import UsageRow, insert_usage
from emberline.protocol.errors import BudgetExceeded, Unavailable
from emberline.store import Database
from emberline.store.database import T, Transaction
from tests.accounts.test_budgets import record
from tests.databases import DatabaseLocation
from tests.examples import n_examples

LEASE_S = 100.0
LIMITS = LeaseLimits(slices=4, answer_wait_s=0.0, answer_poll_s=0.0)  # others answer at once
START_US = 1_800_000_000_000_000
CAP, KEY_CAP = 1000, 600
_numbers = itertools.count()


class World:
    """The time, and a store whose answers can get lost. Cores that are asked for what they do not use reply at once."""

    def __init__(self, store: Database) -> None:
        self.store = store
        self.now_s = 0.0
        self.fault = ""  # of the next transaction: "before" or "after" its commit
        self.cores: list[Core] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def now_us(self) -> int:
        return START_US + int(self.now_s * 1e6)

    async def run(self, work: Callable[[], Transaction[T]]) -> T:
        fault, self.fault = self.fault, ""
        if fault == "before":
            raise Unavailable("away")
        result = await self.store.run(work)
        if fault == "after":
            raise Unavailable("the answer was lost")
        return result

    async def notify(self, channel: str, payload: str = "") -> None:
        for core in self.cores:
            await core.budgets.answer()


class Core:
    def __init__(self, world: World) -> None:
        self.name = f"core{next(_numbers)}"
        self.budgets = Budgets(world, self.name, lease_s=LEASE_S, clock=lambda: world.now_s, limits=LIMITS)
        self.running: list[tuple[Reservation, str]] = []  # with the key
        self.spooled: list[UsageRow] = []


class BudgetMachine(RuleBasedStateMachine):
    store: Database  # set by the test
    loop: asyncio.AbstractEventLoop

    def __init__(self) -> None:
        super().__init__()
        self.world = World(self.store)
        self.account = f"account{next(_numbers)}"
        self.dead: list[Core] = []
        self.world.cores = [Core(self.world), Core(self.world)]
        for budget in self.budgets_of("k1") + self.budgets_of("k2"):
            self.wait(record(self.store, budget))

    def budgets_of(self, key: str) -> list[Budget]:
        return [
            Budget(self.account, key, "this API key", KEY_CAP, "total"),
            Budget(self.account, "", "the account", CAP, "month"),
        ]

    def wait(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    def core(self, number: int) -> Core:
        return self.world.cores[number % len(self.world.cores)]

    def row(self, reservation: Reservation, key: str, cost: int) -> UsageRow:
        return UsageRow(
            id=f"r{next(_numbers)}",
            account=self.account,
            key_id=key,
            model="m",
            model_version="",
            status="finished",
            created_us=START_US,
            finished_us=START_US + 1,
            cost_pico=cost,
            lease=reservation.lease,
        )

    def read(self, sql: str, *params: Any) -> list[Any]:
        return self.wait(self.store.read(sql, params))  # type: ignore[no-any-return]

    def billed(self) -> Counter[str]:
        """By key; of the account under the empty one."""
        rows = self.read("SELECT key_id, SUM(cost_pico) FROM usage WHERE account = ? GROUP BY key_id", self.account)
        return Counter({"": sum(int(cost) for _, cost in rows), **{key: int(cost) for key, cost in rows}})

    def unused_by_the_dead(self) -> Counter[str]:
        """Of their leases, by key."""
        unused: Counter[str] = Counter()
        for key, lease, granted in self.read(
            "SELECT key_id, lease, granted_pico FROM budget_leases WHERE account = ?", self.account
        ):
            if any(lease.startswith(f"{core.name}.") for core in self.dead):
                sql = "SELECT COALESCE(SUM(cost_pico), 0) FROM usage WHERE account = ? AND lease = ?"
                of_key = (" AND key_id = ?", key) if key else ("",)
                ((spent,),) = self.read(sql + of_key[0], self.account, lease, *of_key[1:])
                unused[key] += int(granted) - int(spent)
        return unused

    # --- what happens ------------------------------------------------------------------------------------------------

    @rule(number=st.integers(0, 2), key=st.sampled_from(["k1", "k2"]), amount=st.integers(1, 400))
    def request(self, number: int, key: str, amount: int) -> None:
        core = self.core(number)
        limits = self.budgets_of(key)
        disturbed = bool(self.world.fault)
        try:
            reservation = self.wait(core.budgets.reserve(limits, amount, START_US))
        except Unavailable:
            assert disturbed
            return
        except BudgetExceeded:
            assert not self.fits(key, amount)
            return
        core.running.append((reservation, key))

    def fits(self, key: str, amount: int) -> bool:
        """Whether what is spent, reserved and asked for is within both caps, and not with what dead cores keep."""
        used = self.billed() + self.unused_by_the_dead()
        for core in self.world.cores:
            for reservation, owner in core.running:
                used.update({"": reservation.amount_pico, owner: reservation.amount_pico})
            for row in core.spooled:
                used.update({"": row.cost_pico, row.key_id: row.cost_pico})
        return used[""] + amount <= CAP and used[key] + amount <= KEY_CAP

    @rule(number=st.integers(0, 2), which=st.integers(0, 5), share=st.floats(0, 1), spools=st.booleans())
    def end(self, number: int, which: int, share: float, spools: bool) -> None:
        core = self.core(number)
        if not core.running:
            return
        reservation, key = core.running.pop(which % len(core.running))
        row = self.row(reservation, key, int(reservation.amount_pico * share))
        in_time = core.budgets.settle(reservation, row.cost_pico or 0)
        if spools:
            core.spooled.append(row)
        elif in_time:
            self.wait(self.store.write(*insert_usage(row)))
        else:
            self.wait(self.store.run(lambda: budget_leases.insert_rows([row])))

    @rule(number=st.integers(0, 2))
    def forward(self, number: int) -> None:
        core = self.core(number)
        rows, core.spooled = core.spooled, []
        self.wait(self.store.run(lambda: budget_leases.insert_rows(rows)))

    @precondition(lambda self: len(self.world.cores) > 1)
    @rule(number=st.integers(0, 2), share=st.floats(0, 1))
    def kill(self, number: int, share: float) -> None:
        """What its running requests had used was checkpointed, and is in its journal."""
        core = self.core(number)
        self.world.cores.remove(core)
        self.dead.append(core)
        core.spooled += [
            self.row(reservation, key, int(reservation.amount_pico * share)) for reservation, key in core.running
        ]

    @precondition(lambda self: len(self.world.cores) < 3)
    @rule()
    def start(self) -> None:
        self.world.cores.append(Core(self.world))

    @precondition(lambda self: self.dead)
    @rule(which=st.integers(0, 2), at_once=st.booleans())
    def adopt_journal(self, which: int, at_once: bool) -> None:
        """Of a dead core; its leases are folded with that, or some time later when they have expired."""
        core = self.dead[which % len(self.dead)]
        rows, core.spooled = core.spooled, []
        self.wait(self.store.run(lambda: budget_leases.insert_rows(rows)))
        if at_once:
            with contextlib.suppress(Unavailable):
                self.wait(self.core(0).budgets.recover([core.name]))
                self.dead.remove(core)

    @rule(seconds=st.sampled_from([10.0, LEASE_S / 2, LEASE_S + 1]))
    def pass_time(self, seconds: float) -> None:
        self.world.now_s += seconds

    @rule(number=st.integers(0, 2), key=st.sampled_from(["k1", "k2"]), amount=st.integers(100, 600))
    def outlive(self, number: int, key: str, amount: int) -> None:
        """One core goes on after the leases of all others have expired."""
        self.world.now_s += LEASE_S * 0.9
        self.renew(number)
        self.world.now_s += LEASE_S * 0.2
        self.request(number, key, amount)

    @rule(number=st.integers(0, 2))
    def renew(self, number: int) -> None:
        with contextlib.suppress(Unavailable):
            self.wait(self.core(number).budgets.renew())

    @rule(fault=st.sampled_from(["before", "after"]))
    def disturb(self, fault: str) -> None:
        self.world.fault = fault

    # --- what holds --------------------------------------------------------------------------------------------------

    @invariant()
    def never_over_the_cap(self) -> None:
        billed = self.billed()
        assert billed[""] <= CAP
        assert max(billed["k1"], billed["k2"]) <= KEY_CAP
        committed = self.read("SELECT committed_pico, cap_pico FROM budgets WHERE account = ?", self.account)
        assert all(committed <= cap for committed, cap in committed)

    def teardown(self) -> None:
        """When all requests have ended and all rows are in, exactly what was billed is committed."""
        self.world.fault = ""
        for core in self.world.cores:
            while core.running:
                self.end(self.world.cores.index(core), 0, 0.5, False)
        for core in (*self.world.cores, *self.dead):
            rows = core.spooled
            self.wait(self.store.run(lambda rows=rows: budget_leases.insert_rows(rows)))
            self.wait(core.budgets.recover([core.name]))
        self.never_over_the_cap()
        billed = self.billed()
        for key, committed in self.read("SELECT key_id, committed_pico FROM budgets WHERE account = ?", self.account):
            assert committed == billed[key]


async def test_budgets_hold_in_every_schedule(database: DatabaseLocation) -> None:
    """One store for all examples: each has an account of its own."""
    store = await database.open()
    machine = type("Machine", (BudgetMachine,), {"store": Bridge(store, asyncio.get_running_loop())})

    def run() -> None:
        with asyncio.Runner() as runner:
            machine.loop = runner.get_loop()
            run_state_machine_as_test(
                machine, settings=settings(max_examples=n_examples(25), stateful_step_count=40, deadline=None)
            )

    try:
        await asyncio.to_thread(run)
    finally:
        await store.close()


class Bridge:
    """The store, which belongs to the test's event loop, for the machine's."""

    def __init__(self, store: Database, loop: asyncio.AbstractEventLoop) -> None:
        self._store = store
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        async def call(*args: Any) -> Any:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(method(*args), self._loop))

        return call
