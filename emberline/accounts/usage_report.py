"""Usage reports: requests, tokens and money by account, key, model, class and day, from sums that the store keeps.

A report reads sums by day, so that its time does not grow with the number of requests; only one by session reads the
rows of the requests themselves. Amounts are exact: they are added in two halves, because one database's sum of 64-bit
integers may not exceed 64 bits.
"""

import csv
import io
import re
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Any, Literal, get_args

import msgspec

from emberline.protocol.errors import BadInput
from emberline.protocol.price import MICRO, PICO, Price, format_amount
from emberline.store import Database, Value
from emberline.store.database import Row

Dimension = Literal["day", "account", "key", "model", "class", "session"]
DIMENSIONS: tuple[str, ...] = get_args(Dimension)
DEFAULT_DAYS = 30
MAX_ROWS = 10_000  # of a report; further groups are added up in one
OTHER = "other"  # the value of every dimension in that row
_COLUMN_OF = {"key": "key_id"}
_COUNTS = (
    *("n_requests", "n_failed", "n_cancelled", "n_unpriced", "input_tokens", "cached_tokens", "output_tokens"),
    *("reasoning_tokens", "images", "audio_ms", "session_cached_tokens", "compute_ms", "predictions"),
    "device_ms",
)
_AMOUNTS = ("cost_pico", "discount_pico", "session_discount_pico")
_SUMS = ", ".join(
    [
        *(f"COALESCE(SUM({name}), 0)" for name in _COUNTS),
        *(f"COALESCE(SUM({name} / {PICO}), 0), COALESCE(SUM({name} % {PICO}), 0)" for name in _AMOUNTS),
    ]
)
# The sums' columns for single requests, of which a report by session is made. The days bound what is read.
_DAY_US = 86_400_000_000
_REQUESTS = f"""(SELECT created_us / {_DAY_US} AS day, account, key_id, model, class, session, 1 AS n_requests,
    CASE status WHEN 'failed' THEN 1 ELSE 0 END AS n_failed,
    CASE status WHEN 'cancelled' THEN 1 ELSE 0 END AS n_cancelled,
    CASE WHEN cost_pico IS NULL THEN 1 ELSE 0 END AS n_unpriced, input_tokens, cached_tokens, output_tokens,
    reasoning_tokens, images, audio_ms, CASE session WHEN '' THEN 0 ELSE cached_tokens END AS session_cached_tokens,
    compute_ms, predictions, device_ms, COALESCE(cost_pico, 0) AS cost_pico, discount_pico,
    CASE session WHEN '' THEN 0 ELSE discount_pico END AS session_discount_pico
    FROM usage WHERE created_us >= {{since_us}} AND created_us < {{until_us}}) AS requests"""
# Groups with the highest cost come first, then those with the most requests.
_RANK = f"COALESCE(SUM(cost_pico / {PICO}), 0) DESC, COALESCE(SUM(n_requests), 0) DESC"
_EPOCH = date(1970, 1, 1)
_RELATIVE = re.compile(r"([0-9]{1,4})d")


class ReportQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Days are counted from 1970 in UTC, both included. None: all."""

    by: tuple[str, ...] = ("day", "model")
    since: int
    until: int
    account: str | None = None
    key: str | None = None
    model: str | None = None


class ReportRow(msgspec.Struct, frozen=True, kw_only=True):
    """The sums of one group; `group` has a value per dimension of the report."""

    group: dict[str, str]
    n_folded: int = 0  # groups that the row adds up, where there were too many to list
    n_requests: int
    n_failed: int
    n_cancelled: int
    n_unpriced: int  # requests of models that had no price: they are not in `cost_pico`
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int
    images: int
    audio_ms: int
    session_cached_tokens: int  # of requests that named a session
    compute_ms: int  # of predictors
    predictions: int
    device_ms: int
    cost_pico: int
    discount_pico: int  # what cached input would have cost more
    session_discount_pico: int  # the part of it in requests that named a session, which affinity keeps on one worker

    def body(self) -> dict[str, Any]:
        """Amounts are exact decimals, as text. The cost is null where no request had a price."""
        is_priced = self.n_unpriced < self.n_requests or not self.n_requests
        return {
            **self.group,
            "requests": self.n_requests,
            "failed": self.n_failed,
            "cancelled": self.n_cancelled,
            "without_price": self.n_unpriced,
            "input_tokens": self.input_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "reasoning_tokens": self.reasoning_tokens,
            "images": self.images,
            "audio_seconds": format_amount(self.audio_ms, 1000),
            "predictions": self.predictions,
            "compute_seconds": format_amount(self.compute_ms, 1000),
            "cost": format_amount(self.cost_pico) if is_priced else None,
            "cache_savings": format_amount(self.discount_pico),
            "affinity_tokens": self.session_cached_tokens,
            "affinity_savings": format_amount(self.session_discount_pico),
            "device_seconds": format_amount(self.device_ms, 1000),
        }


class UsageReports:
    def __init__(self, store: Database, max_rows: int = MAX_ROWS) -> None:
        self._store = store
        self._max_rows = max_rows

    def today(self) -> int:
        return self._store.now_us() // 86_400_000_000

    async def report(self, query: ReportQuery) -> list[ReportRow]:
        """One row per group, in order, which add up to all usage.

        Beyond `max_rows` groups, those that cost the least are added up in a last row: clients name models at will.
        """
        columns = [_COLUMN_OF.get(name, name) for name in query.by]
        grouped = f"GROUP BY {', '.join(columns)} LIMIT {self._max_rows + 1}" if columns else ""
        where, params = _where(query)
        groups: dict[Row, list[int]] = {}
        for since, until in await self._spans(query):
            table = _table(query, since, until)
            sql = f"SELECT {', '.join([*columns, _SUMS])} FROM {table} WHERE {where} {grouped}"
            for row in await self._store.report(sql, (since, until, *params)):
                sums = [int(value or 0) for value in row[len(columns) :]]
                known = groups.get(row[: len(columns)])
                groups[row[: len(columns)]] = sums if known is None else [*map(int.__add__, known, sums)]
            if len(groups) > self._max_rows:
                return await self._folded(query, columns)
        return [_row(query.by, group, sums) for group, sums in sorted(groups.items())]

    async def _folded(self, query: ReportQuery, columns: Sequence[str]) -> list[ReportRow]:
        """The groups that cost the most, and the sum of all others. Read in one piece, so that every row is whole."""
        where, params = _where(query)
        usage, names = f"FROM {_table(query, query.since, query.until)} WHERE {where}", ", ".join(columns)
        values = (query.since, query.until, *params)
        top = f"SELECT {names}, {_SUMS} {usage} GROUP BY {names} ORDER BY {_RANK}, {names} LIMIT {self._max_rows}"
        listed = await self._store.report(top, values)
        ((n_groups,),) = await self._store.report(
            f"SELECT COUNT(*) FROM (SELECT 1 {usage} GROUP BY {names}) AS found", values
        )
        (rest,) = (
            [int(value or 0) for value in row] for row in await self._store.report(f"SELECT {_SUMS} {usage}", values)
        )
        rows: list[ReportRow] = []
        for row in sorted(listed, key=lambda row: row[: len(columns)]):
            sums = [int(value or 0) for value in row[len(columns) :]]
            rest = [*map(int.__sub__, rest, sums)]
            rows.append(_row(query.by, row[: len(columns)], sums))
        other = msgspec.structs.replace(
            _row((), (), rest), group=dict.fromkeys(query.by, OTHER), n_folded=int(n_groups or 0) - len(listed)
        )
        return [*rows, other]

    async def _spans(self, query: ReportQuery) -> list[tuple[int, int]]:
        """The days to read together. Those of all accounts one by one, so that other reads need not wait for all."""
        ((first, last),) = await self._store.report("SELECT MIN(day), MAX(day) FROM usage_daily")
        if first is None or last is None:
            return []
        since, until = max(query.since, int(first)), min(query.until, int(last))
        if query.account is not None:
            return [(since, until)]
        return [(day, day) for day in range(since, until + 1)]


def total(rows: Sequence[ReportRow]) -> ReportRow:
    """The sum of a report's rows."""
    sums = {name: sum(getattr(row, name) for row in rows) for name in (*_COUNTS, *_AMOUNTS)}
    return ReportRow(group={}, n_folded=sum(row.n_folded for row in rows), **sums)


def comparison(whole: ReportRow, model: str, price: Price) -> dict[str, Any]:
    """Cost of the reported requests as it is, without the prefix cache, and at another model's prices (of the default
    class), with the arithmetic in one sentence."""
    body, n_computed = whole.body(), whole.input_tokens - whole.cached_tokens
    at_price = price.cost_pico(
        "default",
        input_tokens=whole.input_tokens,
        cached_tokens=whole.cached_tokens,
        output_tokens=whole.output_tokens,
        images=whole.images,
        audio_ms=whole.audio_ms,
    )
    parts = [
        f"{n:,} {name} tokens × {format_amount(rate, MICRO)}"
        for n, name, rate in (
            (n_computed, "uncached input", price.input),
            (whole.cached_tokens, "cached input", price.cached_input),
            (whole.output_tokens, "output", price.output),
        )
        if n
    ]
    without_cache = None if body["cost"] is None else format_amount(whole.cost_pico + whole.discount_pico)
    own = f"cost {body['cost']}, without the prefix cache {without_cache}" if without_cache else "have no price"
    arithmetic = f" = {' + '.join(parts)} per million" if parts and not (whole.images or whole.audio_ms) else ""
    cost = format_amount(at_price)
    sentence = f"{whole.n_requests:,} requests {own}; at the prices of {model} {cost}{arithmetic}."
    return {"model": model, "cost": cost, "cost_without_cache": without_cache, "sentence": sentence}


def _table(query: ReportQuery, since: int, until: int) -> str:
    """The table that the report reads: sums by day, or for sessions the requests of these days."""
    if "session" not in query.by:
        return "usage_daily"
    least, most = max(since, 0), min(until, 10**6)  # days: what a client names stays within 64 bits of microseconds
    return _REQUESTS.format(since_us=least * _DAY_US, until_us=(most + 1) * _DAY_US)


def _where(query: ReportQuery) -> tuple[str, list[Value]]:
    """Return the WHERE clause of a report, and its parameters, which start with the first and the last day."""
    conditions, params = ["day >= ?", "day <= ?"], list[Value]()
    for column, value in (("account", query.account), ("key_id", query.key), ("model", query.model)):
        if value is not None:
            conditions.append(f"{column} = ?")
            params.append(value)
    return " AND ".join(conditions), params


def _row(by: Sequence[str], group: Row, sums: Sequence[int]) -> ReportRow:
    named = {
        name: format_day(int(value or 0)) if name == "day" else str(value)
        for name, value in zip(by, group, strict=True)
    }
    halves = sums[len(_COUNTS) :]
    amounts = {name: halves[2 * n] * PICO + halves[2 * n + 1] for n, name in enumerate(_AMOUNTS)}
    return ReportRow(group=named, **dict(zip(_COUNTS, sums, strict=False)), **amounts)


def parse_dimensions(text: str) -> tuple[str, ...]:
    """ "day,model" """
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in DIMENSIONS:
            raise BadInput(f"`by` is a list of {', '.join(DIMENSIONS)}; {name[:40]!r} is none of them", param="by")
    if len(set(names)) < len(names):
        raise BadInput("`by` names something twice", param="by")
    return names


def parse_day(text: str, today: int, param: str) -> int:
    """ "2026-11-16", or "7d" for seven days ago; in days since 1970."""
    if (match := _RELATIVE.fullmatch(text)) is not None:
        return today - int(match[1])
    try:
        return (datetime.strptime(text[:20], "%Y-%m-%d").replace(tzinfo=UTC).date() - _EPOCH).days
    except ValueError:
        raise BadInput(f"`{param}` is a day such as 2026-11-16, or 7d for seven days ago", param=param) from None


def format_day(day: int) -> str:
    try:
        return (_EPOCH + timedelta(days=day)).isoformat()
    except OverflowError:
        return str(day)


def report_csv(by: Sequence[str], rows: Sequence[ReportRow]) -> str:
    """With a heading. An unknown cost is empty."""
    empty = ReportRow(
        group=dict.fromkeys(by, ""),
        **dict.fromkeys((*_COUNTS, *_AMOUNTS), 0),
    )
    out = io.StringIO()
    writer = csv.DictWriter(out, list(empty.body()), lineterminator="\r\n")
    writer.writeheader()
    writer.writerows(row.body() for row in rows)
    return out.getvalue()
