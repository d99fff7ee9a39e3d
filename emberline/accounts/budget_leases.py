"""Budgets in the store: how much of each is committed, and what of it is leased to which core.

`committed_pico` is what was billed plus what is leased: it never exceeds the cap. A core bills its requests against its
lease, in memory, and each usage row names the lease. A lease that is given back, or that has expired, is *folded*: only
what its usage rows cost stays committed. So a crash hides nothing, and loses nothing for longer than a lease.

A row that reaches the store after its lease was folded (from the journal of a dead core, or from one that was away for
long) has no cover any more: it is billed what the budget still has. Only the budgets that its key and its account have
now count: one that was removed, or had another period, limits no bill.
"""

from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import NamedTuple

import msgspec

from emberline.accounts.account import BudgetPeriod
from emberline.accounts.usage_row import UsageRow, insert_usage
from emberline.store import BulkQuery, Query, Transaction, Value
from emberline.store.database import Sql

PERIODS: tuple[BudgetPeriod, ...] = ("total", "day", "month")
_SECOND_US = 1_000_000
_DAY_US = 86_400 * _SECOND_US  # a lease's rows are not older than it by more: bounds what is read to fold it


class BudgetKey(NamedTuple):
    """One budget in one period, as in the store."""

    account: str
    key_id: str  # empty: the account's own budget
    period: str  # "total", or a UTC day or month: "2026-11-16", "2026-11"


class LeaseState(msgspec.Struct, frozen=True, kw_only=True):
    """Share of a budget that a core holds, and the share of the others."""

    granted_pico: int  # to this core; what it has spent included
    is_renewed: bool  # the lease begins again
    is_lost: bool = False  # the lease was folded: what it covered is committed to nobody
    committed_pico: int = 0  # of the whole budget
    others_free_pico: int = 0  # of it, leased to other cores that have not reported it as spent
    n_unanswered: int = 0  # cores that were asked to give back what they do not use, and have not answered yet


def period_label(period: BudgetPeriod, at_us: int) -> str:
    return period if period == "total" else _label(period, at_us // _DAY_US)


@lru_cache(64)
def _label(period: BudgetPeriod, day: int) -> str:
    return datetime.fromtimestamp(day * 86_400, UTC).strftime("%Y-%m-%d" if period == "day" else "%Y-%m")


def period_bounds(label: str) -> tuple[int, int]:
    """Return the period's first microsecond of Unix time and the first one after it."""
    if label == "total":
        return 0, 1 << 62
    is_day = label.count("-") == 2
    start = datetime.fromisoformat(label if is_day else f"{label}-01").replace(tzinfo=UTC)
    end = start + timedelta(days=1) if is_day else (start + timedelta(days=32)).replace(day=1)
    return int(start.timestamp()) * _SECOND_US, int(end.timestamp()) * _SECOND_US


_WHICH = "account = ? AND key_id = ? AND period = ?"
_CREATE = (
    "INSERT INTO budgets (account, key_id, period, committed_pico, cap_pico, asked) VALUES (?, ?, ?, 0, ?, 0) "
    "ON CONFLICT DO NOTHING"
)
_SELECT = f"SELECT committed_pico, cap_pico, asked FROM budgets WHERE {_WHICH}"
_LOCK = Sql(_SELECT, postgres=f"{_SELECT} FOR UPDATE")
_SET = f"UPDATE budgets SET committed_pico = ?, cap_pico = ?, asked = ? WHERE {_WHICH}"
_COMMIT = f"UPDATE budgets SET committed_pico = committed_pico + ? WHERE {_WHICH}"
_LEASES = (
    f"SELECT lease, granted_pico, spent_pico, opened_us, until_us, answered FROM budget_leases WHERE {_WHICH} "
    "ORDER BY lease"
)
_OPEN = (
    "INSERT INTO budget_leases "
    "(account, key_id, period, lease, granted_pico, spent_pico, opened_us, until_us, answered) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
_CHANGE = (
    "UPDATE budget_leases SET granted_pico = ?, spent_pico = ?, until_us = ?, answered = ? "
    f"WHERE {_WHICH} AND lease = ?"
)
_RENEW = Sql(
    f"UPDATE budget_leases SET spent_pico = ?, until_us = ? WHERE {_WHICH} AND lease = ? "
    "RETURNING account, key_id, period"
)
_DROP = f"DELETE FROM budget_leases WHERE {_WHICH} AND lease = ?"
_LEASES_OF = "SELECT account, key_id, period, lease FROM budget_leases WHERE lease >= ? AND lease < ?"
ASKED = (
    "SELECT l.account, l.key_id, l.period, b.asked FROM budget_leases l "
    "JOIN budgets b ON b.account = l.account AND b.key_id = l.key_id AND b.period = l.period "
    "WHERE l.lease = ? AND l.answered < b.asked"
)
_TOTAL = "SELECT CAST(COALESCE(SUM(cost_pico), 0) AS BIGINT) FROM"
_BILLED = f"{_TOTAL} usage_daily WHERE account = ? AND day >= ? AND day < ?"  # a period is whole days
_BILLED_UNDER = f"{_TOTAL} usage WHERE account = ? AND created_us >= ? AND created_us < ? AND lease = ?"
_ROWS = "SELECT id FROM usage WHERE id = ?"
_OF_ACCOUNT = "SELECT budget_pico, budget_period FROM accounts WHERE id = ?"
_OF_KEY = "SELECT budget_pico, budget_period FROM api_keys WHERE id = ?"
_COVER = f"SELECT lease FROM budget_leases WHERE {_WHICH} AND lease = ?"


def acquire(
    key: BudgetKey,
    lease: str,
    *,
    cap_pico: int,
    held_pico: int,
    spent_pico: int,
    need_pico: int,
    slice_pico: int,
    now_us: int,
    lease_us: int,
    asks: bool,
) -> Transaction[LeaseState]:
    """Extend the lease, of which the core has `held_pico`, by at least `need_pico`, or by nothing.

    With plenty left it gets `slice_pico` more. Leases of others that have expired are folded. `asks`: where too little
    is left and others have leases, ask them to give back what they do not use. A lease that is larger in the store
    is cut: the core does not know of the rest, because it never saw the end of an earlier transaction.
    """
    yield Query(_CREATE, (*key, cap_pico))
    ((committed, old_cap, asked),) = yield Query(_LOCK, key)
    before = committed, old_cap, asked = _int(committed), _int(old_cap), _int(asked)
    opened_us, is_lost = None, held_pico > 0
    rivals, others_free, n_unanswered = 0, 0, 0
    for name, granted, spent, opened, until, answered in (yield Query(_LEASES, key)):
        if name == lease:
            opened_us = _int(opened)
            is_lost = _int(granted) < held_pico
            if _int(granted) > held_pico:
                committed -= _int(granted) - held_pico
                yield Query(_CHANGE, (held_pico, spent_pico, until, answered, *key, lease))
        elif _int(until) <= now_us:
            committed += (yield from _billed(key, str(name), _int(opened))) - _int(granted)
            yield Query(_DROP, (*key, name))
        else:
            rivals += 1
            others_free += max(0, _int(granted) - _int(spent))
            n_unanswered += _int(answered) < asked
    if opened_us is None and not rivals:  # then it is what was billed, also while there was no budget
        committed = yield from _billed(key)
    available, granted_pico, is_renewed = cap_pico - committed, held_pico, False
    if is_lost:
        granted_pico = 0
    elif need_pico <= max(0, available):
        extra = max(need_pico, min(need_pico + slice_pico, available // 4 if rivals else available))
        granted_pico += extra
        committed += extra
        is_renewed = True
        until_us = now_us + lease_us
        if opened_us is None:
            yield Query(_OPEN, (*key, lease, granted_pico, spent_pico, now_us, until_us, asked))
        else:
            yield Query(_CHANGE, (granted_pico, spent_pico, until_us, asked, *key, lease))
    elif asks and rivals:
        asked, n_unanswered = asked + 1, rivals
    if (committed, cap_pico, asked) != before:
        yield Query(_SET, (committed, cap_pico, asked, *key))
    return LeaseState(
        granted_pico=granted_pico,
        is_renewed=is_renewed,
        is_lost=is_lost,
        committed_pico=committed,
        others_free_pico=others_free,
        n_unanswered=n_unanswered,
    )


def give_back(
    key: BudgetKey, lease: str, *, spent_pico: int, reserved_pico: int, until_us: int, answers: int, ends: bool
) -> Transaction[bool]:
    """Reduce the lease to what is spent and reserved; or end it, when all of its rows are in the store. False: it was
    lost.

    `answers`: how many times cores had asked for unused budget when `reserved_pico` was read. Whoever has asked since
    still waits for what became free meanwhile.
    """
    rows = yield Query(_LOCK, key)
    own = [row for row in (yield Query(_LEASES, key)) if row[0] == lease]
    if not rows or not own:
        return False
    granted, opened_us = _int(own[0][1]), _int(own[0][3])
    kept = (yield from _billed(key, lease, opened_us)) if ends else spent_pico + reserved_pico
    if kept != granted:
        yield Query(_COMMIT, (kept - granted, *key))
    if ends:
        yield Query(_DROP, (*key, lease))
    else:
        yield Query(_CHANGE, (kept, spent_pico, until_us, answers, *key, lease))
    return True


def renew(spent: Sequence[tuple[BudgetKey, int]], lease: str, until_us: int) -> Transaction[set[BudgetKey]]:
    """Extend leases and report what is spent of them. Returns those that still exist."""
    # In the order in which other transactions lock them, so that none waits for another in a circle.
    rows = yield BulkQuery(_RENEW, [(amount, until_us, *key, lease) for key, amount in sorted(spent)])
    return {BudgetKey(str(account), str(key_id), str(period)) for account, key_id, period in rows}


def fold_core(core: str) -> Transaction[int]:
    """Fold all leases of a core that is dead and whose usage rows are all in the store. Returns how many it had."""
    found = yield Query(_LEASES_OF, (f"{core}.", f"{core}/"))  # "/" follows "." : all that begin with it
    for account, key_id, period, lease in sorted(found, key=str):
        key = BudgetKey(str(account), str(key_id), str(period))
        yield Query(_LOCK, key)
        for name, granted, _, opened, *_ in (yield Query(_LEASES, key)):
            if name == lease:
                yield Query(_COMMIT, ((yield from _billed(key, str(name), _int(opened))) - _int(granted), *key))
                yield Query(_DROP, (*key, name))
    return len(found)


def insert_rows(rows: Sequence[UsageRow]) -> Transaction[None]:
    """Insert usage rows that may come late: those whose lease is gone are billed what their budgets still have. Of
    several with one id the first stands."""
    groups: defaultdict[tuple[str, str, str, int], list[UsageRow]] = defaultdict(list)
    for row in {row.id: row for row in reversed(rows)}.values():
        day = row.created_us // _DAY_US if row.lease and row.cost_pico else -1
        groups[row.account, row.key_id, row.lease, day].append(row)
    inserted: list[UsageRow] = []
    for (account, key_id, lease, day), group in sorted(groups.items(), key=lambda item: item[0]):
        uncovered: dict[BudgetKey, int] = {}  # with what is left of them
        for owner in dict.fromkeys(("", key_id)) if day >= 0 else ():
            for cap, period in (yield Query(_OF_KEY, (owner,)) if owner else Query(_OF_ACCOUNT, (account,))):
                key = BudgetKey(account, owner, period_label(_to_period(period), day * _DAY_US))
                found = (yield Query(_LOCK, key)) if cap is not None else []
                if found and not (yield Query(_COVER, (*key, lease))):
                    uncovered[key] = _int(cap) - _int(found[0][0])
        inserted += group if not uncovered else (yield from _bill_late(group, uncovered))
    if inserted:
        inserts = [insert_usage(row) for row in inserted]
        yield BulkQuery(inserts[0].sql, [insert.params for insert in inserts])


def _bill_late(rows: Sequence[UsageRow], left: dict[BudgetKey, int]) -> Transaction[list[UsageRow]]:
    billed: list[UsageRow] = []
    for row in rows:
        if (yield Query(_ROWS, (row.id,))):
            continue  # it is in the store already
        cost_pico = min(row.cost_pico or 0, *(max(0, amount) for amount in left.values()))
        for key in left:
            left[key] -= cost_pico
            yield Query(_COMMIT, (cost_pico, *key))
        billed.append(msgspec.structs.replace(row, cost_pico=cost_pico))
    return billed


def _billed(key: BudgetKey, lease: str | None = None, opened_us: int = 0) -> Transaction[int]:
    """The cost of the budget's usage rows, or of those under one lease."""
    start_us, end_us = period_bounds(key.period)
    params: list[Value]
    if lease is None:
        sql, params = _BILLED, [key.account, start_us // _DAY_US, end_us // _DAY_US]
    else:
        sql, params = _BILLED_UNDER, [key.account, max(start_us, opened_us - _DAY_US), end_us, lease]
    if key.key_id:
        sql, params = f"{sql} AND key_id = ?", [*params, key.key_id]
    ((total,),) = yield Query(sql, params)
    return _int(total)


def _to_period(value: Value) -> BudgetPeriod:
    period: BudgetPeriod = msgspec.convert(value, BudgetPeriod)
    return period


def _int(value: Value) -> int:
    assert isinstance(value, int)
    return value
