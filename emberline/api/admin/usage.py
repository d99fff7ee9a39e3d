"""The usage report: a key sees its own account, an admin all of them."""

import time

from emberline.accounts.usage_report import (
    DEFAULT_DAYS,
    DIMENSIONS,
    ReportQuery,
    comparison,
    format_day,
    parse_day,
    parse_dimensions,
    report_csv,
    total,
)
from emberline.api.http.exchange import HttpExchange, Reply, json_reply
from emberline.protocol.errors import BadInput, Forbidden
from emberline.protocol.price import Price

_DAY = {"type": "string", "description": "a day in UTC (2026-11-16), or 7d for seven days ago"}
QUERY = {
    "by": {"type": "string", "description": f"comma-separated: {', '.join(DIMENSIONS)}; default day,model"},
    "since": _DAY,
    "until": _DAY,
    "account": {"type": "string"},
    "key": {"type": "string", "description": "the id of an API key"},
    "model": {"type": "string"},
    "compare": {"type": "string", "description": "a model at whose prices the requests are reckoned, too"},
    "format": {"type": "string", "enum": ["json", "csv"]},
}


async def report(call: HttpExchange) -> Reply:
    query = _query(call)
    rows = await call.accounts.reports.report(query)
    if call.enum_param("format", ("json", "csv"), "json") == "csv":
        return Reply(200, report_csv(query.by, rows).encode(), b"text/csv; charset=utf-8")
    body = {
        "object": "list",
        "by": query.by,
        "since": format_day(query.since),
        "until": format_day(query.until),
        "data": [row.body() for row in rows],
        "total": (whole := total(rows)).body(),
        "folded_rows": whole.n_folded,
    }
    if (model := call.query.get("compare")) is not None:
        body["comparison"] = comparison(whole, model, _price(call, model))
    return json_reply(body)


def _price(call: HttpExchange, model: str) -> Price:
    """The price that a model has now, for callers who may use it."""
    card = call.service.models.find(model, call.principal.account)
    call.principal.check_model(card.id, card.aliases)
    price = call.accounts.prices.table.find(card.id, time.time_ns() // 1000)
    if price is None:
        raise BadInput(f"{card.id} has no price to compare with: `emberline price set` gives it one", param="compare")
    return price


def _query(call: HttpExchange) -> ReportQuery:
    given, principal = call.query, call.principal
    account = given.get("account")
    if not principal.is_admin:
        if account not in (None, principal.account):
            raise Forbidden("a key sees the usage of its own account only", param="account")
        account = principal.account
    today = call.accounts.reports.today()
    since = parse_day(given.get("since", f"{DEFAULT_DAYS - 1}d"), today, "since")
    until = parse_day(given.get("until", "0d"), today, "until")
    if until < since:
        raise BadInput("`until` is before `since`", param="until")
    return ReportQuery(
        by=parse_dimensions(given.get("by", "day,model")),
        since=since,
        until=until,
        account=account,
        key=given.get("key"),
        model=given.get("model"),
    )
