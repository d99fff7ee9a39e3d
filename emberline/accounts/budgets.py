"""Budgets of keys and accounts: a core leases a part of each from the store and spends it in memory.

Before a request runs, the most it can cost is reserved; when it ends, what it did cost is spent and the rest is free
again. The store is asked only when a lease is used up, and every few seconds for all leases together. So the cost of
all usage rows never exceeds the cap, and a request is refused only if what is spent, what is reserved and its own worst
case do exceed it; `budget_leases.py` says why crashes change neither.
"""

import asyncio
import logging
import secrets
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial

import msgspec

from emberline.accounts import budget_leases
from emberline.accounts.account import BudgetPeriod
from emberline.accounts.budget_leases import BudgetKey, LeaseState, period_bounds, period_label
from emberline.net.periodic import every, stop
from emberline.protocol.errors import BudgetExceeded, BudgetReserved, EmberlineError
from emberline.protocol.price import format_amount
from emberline.store import Database
from emberline.store.clock import uptime_us

LEASE_S = 120.0  # how long a dead core's lease stays unused; a core stops using one it cannot renew after half of it
FORGET_S = 3600.0  # after which an unused lease ends
MAX_AGE_S = 6 * 3600.0  # of a lease, after which another begins: to fold one, all rows of its time are read
RESERVED_RETRY_S = 1.0
CHANNEL = "budgets"
_PER = {"total": "", "day": " a day", "month": " a month"}

log = logging.getLogger("emberline.budgets")


class LeaseLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on the parts of a budget that a core leases."""

    slices: int = 20  # a lease is extended by this part of the budget
    answer_wait_s: float = 2.0  # for other cores to give back what they do not use
    answer_poll_s: float = 0.03  # between two looks whether they have


LEASE_LIMITS = LeaseLimits()


class Budget(msgspec.Struct, frozen=True):
    """The budget of an account, or of one of its keys."""

    account: str
    key_id: str  # empty: the account's own
    name: str  # in messages: "this API key", "account acme"
    cap_pico: int
    period: BudgetPeriod


class Allowance:
    """The share of this core in one budget in one period. Transactions on it run one after another."""

    __slots__ = (
        *("cap_pico", "extending", "granted_pico", "is_lost", "key", "lease", "lock", "reserved_pico", "spent_pico"),
        *("usable_until_s", "used_s"),
    )

    def __init__(self, key: BudgetKey, lease: str) -> None:
        self.key = key
        self.lease = lease
        self.cap_pico = 0  # of the budget, when it was last extended
        self.granted_pico = 0  # by the store, in all
        self.spent_pico = 0  # of it: billed
        self.reserved_pico = 0  # of it: for running requests
        self.usable_until_s = 0.0
        self.used_s = 0.0
        self.is_lost = False
        self.lock = asyncio.Lock()
        self.extending: asyncio.Task[LeaseState] | None = None

    @property
    def is_extending(self) -> bool:
        return self.extending is not None and not self.extending.done()

    @property
    def free_pico(self) -> int:
        return self.granted_pico - self.spent_pico - self.reserved_pico


class Reservation(msgspec.Struct, frozen=True):
    """The most that one request may cost, reserved in each of its budgets."""

    allowances: tuple[Allowance, ...]
    amount_pico: int
    lease: str  # for its usage row


class Budgets:
    """Lives in the core's event loop. `start` it to renew leases; `core` names it in the store and must be new."""

    def __init__(
        self,
        store: Database,
        core: str = "",
        *,
        lease_s: float = LEASE_S,
        clock: Callable[[], float] = lambda: uptime_us() / 1e6,
        limits: LeaseLimits = LEASE_LIMITS,
    ) -> None:
        self._store = store
        self._core = core or secrets.token_hex(8)
        self._lease_s, self._limits = lease_s, limits
        self._clock = clock  # goes on while the machine is suspended
        self._epoch = 0
        self._began_s = clock()  # the current lease
        self._allowances: dict[BudgetKey, Allowance] = {}  # under the current lease
        self._ended: set[BudgetKey] = set()  # under the current lease: not to be begun again under it
        self._retired: list[Allowance] = []  # under earlier leases, while requests run
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def lease(self) -> str:
        """The id under which this core has leased, and its usage rows are found. Changed when one was lost."""
        return f"{self._core}.{self._epoch}"

    def start(self) -> None:
        renewing = every(self._lease_s / 6, self.renew, log, "leases of budgets are not renewed")
        self._tasks = [asyncio.create_task(renewing), asyncio.create_task(self._answer())]

    async def close(self, rows_stored: bool = True) -> None:
        """After all requests have ended, before the store closes. Where rows are still in the journal, the process that
        adopts it takes the leases over."""
        await stop(*self._tasks)
        if rows_stored and (self._allowances or self._retired):
            try:
                await self.recover([self._core])
            except EmberlineError as error:
                log.warning("leases of budgets are not given back until they expire: %s", error.message)

    # --- requests ----------------------------------------------------------------------------------------------------

    async def reserve(self, budgets: Sequence[Budget], amount_pico: int, at_us: int) -> Reservation:
        """Reserve the cost of a request that began at `at_us`. Raises BudgetExceeded or BudgetReserved; Unavailable
        without the store."""
        if not amount_pico:
            return Reservation((), 0, "")
        while True:
            now_s = self._clock()
            allowances = tuple(self._allowance(budget, at_us) for budget in budgets)
            if any(allowance.lease != self.lease for allowance in allowances):
                continue  # a later one has changed the lease, and one row has one lease
            for budget, allowance in zip(budgets, allowances, strict=True):
                is_usable = now_s < allowance.usable_until_s and allowance.cap_pico <= budget.cap_pico
                if not is_usable or allowance.free_pico < amount_pico:
                    await self._extend(budget, allowance, amount_pico)
                    break
            else:
                for allowance in allowances:
                    allowance.reserved_pico += amount_pico
                    allowance.used_s = now_s
                return Reservation(allowances, amount_pico, self.lease)

    def settle(self, reservation: Reservation, cost_pico: int) -> bool:
        """The request has ended and costs so much, at most what was reserved. False: its row may come late, after the
        lease was folded, and must be written with `insert_rows`."""
        now_s = self._clock()
        for allowance in reservation.allowances:
            allowance.reserved_pico -= reservation.amount_pico
            allowance.spent_pico += min(cost_pico, reservation.amount_pico)
            allowance.used_s = now_s
        return all(not a.is_lost and now_s < a.usable_until_s for a in reservation.allowances)

    def _allowance(self, budget: Budget, at_us: int) -> Allowance:
        key = BudgetKey(budget.account, budget.key_id, period_label(budget.period, at_us))
        allowance = self._allowances.get(key)
        if allowance is None:
            if key in self._ended:
                self._change_lease()
            allowance = self._allowances[key] = Allowance(key, self.lease)
        return allowance

    async def _extend(self, budget: Budget, allowance: Allowance, amount_pico: int) -> None:
        """Get more from the store, for all that wait for it; raise where that cannot be enough. What was granted may be
        gone again, to another request or another core: the caller looks, and comes back."""
        if allowance.extending is None or not allowance.is_extending:
            allowance.extending = asyncio.create_task(self._acquire(budget, allowance, amount_pico))
        state = await asyncio.shield(allowance.extending)
        if allowance.is_lost or state.is_renewed or allowance.free_pico >= amount_pico:
            return
        left_pico = budget.cap_pico - state.committed_pico + allowance.free_pico
        if left_pico < amount_pico:
            raise self._refusal(budget, allowance, state, amount_pico)

    async def _acquire(self, budget: Budget, allowance: Allowance, amount_pico: int) -> LeaseState:
        gives_up_s, asks = self._clock() + self._limits.answer_wait_s, True
        while True:
            async with allowance.lock:
                state = await self._transaction(budget, allowance, amount_pico, asks)
            if state.is_lost or allowance.free_pico >= amount_pico or not state.n_unanswered:
                return state
            if not asks and self._clock() >= gives_up_s:
                log.warning("a core does not give back what it does not use of a budget; its lease will expire")
                return state
            if asks:
                await self._store.notify(CHANNEL)
            asks = False
            await asyncio.sleep(self._limits.answer_poll_s)

    async def _transaction(self, budget: Budget, allowance: Allowance, amount_pico: int, asks: bool) -> LeaseState:
        if budget.cap_pico < allowance.cap_pico:  # what is not in use of the larger budget is given back
            allowance.granted_pico -= allowance.free_pico
        allowance.cap_pico = budget.cap_pico
        now_s = self._clock()
        work = partial(
            budget_leases.acquire,
            allowance.key,
            allowance.lease,
            cap_pico=budget.cap_pico,
            held_pico=allowance.granted_pico,
            spent_pico=allowance.spent_pico,
            need_pico=max(0, amount_pico - allowance.free_pico),
            slice_pico=budget.cap_pico // self._limits.slices,
            now_us=self._store.now_us(),
            lease_us=self._lease_us,
            asks=asks,
        )
        state = await self._store.run(work)
        if state.is_lost:
            self._lose(allowance)
        else:
            allowance.granted_pico = state.granted_pico
            if state.is_renewed:
                allowance.usable_until_s = now_s + self._lease_s / 2
        return state

    def _refusal(self, budget: Budget, allowance: Allowance, state: LeaseState, amount_pico: int) -> BudgetExceeded:
        unspent_pico = state.others_free_pico + allowance.granted_pico - allowance.spent_pico
        left_pico = max(0, budget.cap_pico - state.committed_pico + unspent_pico)
        cap = f"its budget of {format_amount(budget.cap_pico)}{_PER[budget.period]}"
        could_cost = f"this request could cost {format_amount(amount_pico)}"
        if left_pico >= amount_pico:
            return BudgetReserved(
                f"{budget.name} has {format_amount(left_pico)} left of {cap}, but running requests have reserved it, "
                f"and {could_cost}: retry when they have ended, or lower max_tokens",
                retry_after_s=RESERVED_RETRY_S,
            )
        if budget.period == "total":
            reset_s, remedy = None, "raise the budget"
        else:
            end_us = period_bounds(allowance.key.period)[1]
            reset_s = max(1.0, (end_us - self._store.now_us()) / 1e6)
            remedy = f"wait until it resets at {datetime.fromtimestamp(end_us // 1_000_000, UTC):%Y-%m-%dT%H:%M:%SZ}"
        return BudgetExceeded(
            f"{budget.name} has {format_amount(left_pico)} left of {cap}, and {could_cost}: "
            f"lower max_tokens, or {remedy}",
            retry_after_s=reset_s,
        )

    # --- leases ------------------------------------------------------------------------------------------------------

    @property
    def _lease_us(self) -> int:
        return int(self._lease_s * 1e6)

    def _lose(self, allowance: Allowance) -> None:
        """The lease was folded. Requests that run under it are billed late; new ones begin under another lease."""
        log.warning("a budget's lease has expired", extra={"account": allowance.key.account})
        allowance.is_lost = True
        if allowance.lease == self.lease:
            self._change_lease()

    def _change_lease(self) -> None:
        self._retired += self._allowances.values()
        self._allowances, self._ended = {}, set()
        self._epoch += 1
        self._began_s = self._clock()

    async def _give_back(self, allowance: Allowance, *, answers: int = 0, ends: bool = False) -> None:
        """Give back what is not in use. `answers`: how many times cores have asked for it. `ends`: nothing is in use,
        and the allowance is not used again under this lease."""
        async with allowance.lock:
            if allowance.is_lost or (ends and allowance.reserved_pico):
                return
            allowance.granted_pico -= allowance.free_pico  # before the store knows: it may be another's in a moment
            if ends and allowance.lease == self.lease:
                self._ended.add(allowance.key)
            now_s = self._clock()
            work = partial(
                budget_leases.give_back,
                allowance.key,
                allowance.lease,
                spent_pico=allowance.spent_pico,
                reserved_pico=allowance.reserved_pico,
                until_us=self._store.now_us() + self._lease_us,
                answers=answers,
                ends=ends,
            )
            try:
                still_ours = await self._store.run(work)
            except Exception:
                if ends:  # perhaps it did end
                    self._lose(allowance)
                raise
            allowance.usable_until_s = now_s + self._lease_s / 2
            if not still_ours:
                self._lose(allowance)
            elif ends:
                allowance.is_lost = True  # a request that waits for it begins another
                if self._allowances.get(allowance.key) is allowance:
                    del self._allowances[allowance.key]

    async def renew(self) -> None:
        """Extend the leases, and report what is spent: one transaction for all. End those not used for long."""
        now_s = self._clock()
        if self._allowances and now_s - self._began_s > MAX_AGE_S:
            self._change_lease()
        self._retired = [allowance for allowance in self._retired if not allowance.is_lost]
        for allowance in (*self._allowances.values(), *self._retired):
            # The row of the last request may not be in the store yet.
            idle_s = self._lease_s / 2 if allowance.lease != self.lease else FORGET_S
            if now_s - allowance.used_s > idle_s and not allowance.reserved_pico and not allowance.is_extending:
                await self._give_back(allowance, ends=True)
        by_lease: defaultdict[str, list[Allowance]] = defaultdict(list)
        for allowance in (*self._allowances.values(), *self._retired):
            if allowance.granted_pico and not allowance.is_lost:
                by_lease[allowance.lease].append(allowance)
        for lease, allowances in by_lease.items():
            now_s, until_us = self._clock(), self._store.now_us() + self._lease_us
            spent = [(allowance.key, allowance.spent_pico) for allowance in allowances]
            kept = await self._store.run(partial(budget_leases.renew, spent, lease, until_us))
            for allowance in allowances:
                if allowance.key in kept:
                    allowance.usable_until_s = now_s + self._lease_s / 2
                elif not allowance.is_lost:
                    self._lose(allowance)

    async def _answer(self) -> None:
        """Give back what is free where another core needs it."""
        async for _ in self._store.listen(CHANNEL):
            try:
                await self.answer()
            except EmberlineError as error:
                log.debug("requests for unused budget are not seen: %s", error.message)
            except Exception:
                log.exception("requests for unused budget are not seen")

    async def answer(self) -> None:
        allowances = (*self._allowances.values(), *self._retired)
        for lease in {allowance.lease for allowance in allowances}:
            rows = await self._store.read(budget_leases.ASKED, (lease,))
            asked = {BudgetKey(*map(str, key)): int(n_asked or 0) for *key, n_asked in rows}
            for allowance in allowances:
                if allowance.lease == lease and allowance.key in asked:
                    await self._give_back(allowance, answers=asked[allowance.key])

    async def recover(self, cores: Sequence[str]) -> None:
        """Cores that have ended, and whose usage rows are all in the store: what they did not spend is free again."""
        for core in cores:
            if n_leases := await self._store.run(partial(budget_leases.fold_core, core)):
                log.debug("%d leases of budgets are taken back", n_leases)
