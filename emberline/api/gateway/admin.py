"""The API of gateways: settings, logs and the cache of the caller's account; an admin names any account."""

from typing import Any

import msgspec

from emberline.accounts.account import check_account_name
from emberline.api.http.body import read_json
from emberline.api.http.exchange import HttpExchange, Reply, json_reply
from emberline.gateway.log import LogFilter, row_body
from emberline.protocol.errors import BadInput, Forbidden
from emberline.protocol.gateway import GatewaySettings

_TEXT = {"type": "string"}
_NUMBER = {"type": "integer", "minimum": 0}
ACCOUNT = {"account": _TEXT}
LOG_QUERY = {
    **ACCOUNT,
    "log": _TEXT,
    "model": _TEXT,
    "provider": _TEXT,
    "status": {"enum": ["success", "error", "cancelled"]},
    "error": _TEXT,
    "cached": {"type": "boolean"},
    "event_id": _TEXT,
    "metadata": {"type": "string", "description": "key:value"},
    "text": _TEXT,
    "since_us": _NUMBER,
    "until_us": _NUMBER,
    "min_duration_ms": _NUMBER,
    "after": {"type": "string", "description": "the last row of the page before"},
    "limit": {"type": "integer", "minimum": 1, "maximum": 1000},
}
_MAX_US = (1 << 53) - 1


async def list_all(call: HttpExchange) -> Reply:
    account = _account(call)
    return json_reply(
        {"object": "list", "data": [_body(call, one) for one in call.gateways.settings.of_account(account)]}
    )


async def put(call: HttpExchange) -> Reply:
    """Create one, or replace all of its settings. What an admin creates is the operator's: the account can only add to
    it."""
    settings = await read_json(call, GatewaySettings)
    account = check_account_name(settings.account or call.principal.account)
    if account != call.principal.account and not call.principal.is_admin:
        raise Forbidden(f"this key belongs to account {call.principal.account}", param="account")
    settings = msgspec.structs.replace(settings, account=account)
    await call.gateways.settings.put(settings, by_operator=call.principal.is_admin)
    await _audit(call, "gateway.put", account, settings.name, msgspec.to_builtins(settings))
    return json_reply(_body(call, call.gateways.settings.find(account, settings.name)))


async def retrieve(call: HttpExchange) -> Reply:
    return json_reply(_body(call, call.gateways.settings.find(_account(call), call.path_param)))


async def delete(call: HttpExchange) -> Reply:
    account, name = _account(call), call.path_param
    await call.gateways.settings.delete(account, name, by_operator=call.principal.is_admin)
    await _audit(call, "gateway.delete", account, name)
    return json_reply({"name": name, "account": account, "deleted": True})


async def purge(call: HttpExchange) -> Reply:
    """Cached replies of all gateways of the account."""
    account = _account(call)
    call.gateways.settings.find(account, call.path_param)
    await call.gateways.cache.purge(account)
    return json_reply({"account": account, "purged": True})


async def logs(call: HttpExchange) -> Reply:
    account, name = _account(call), call.path_param
    query = call.query
    if unknown := [key for key in query if key not in LOG_QUERY]:
        raise BadInput(
            f"there is no filter `{unknown[0][:64]}`; there are {', '.join(LOG_QUERY)}", param=unknown[0][:64]
        )
    limit = call.int_param("limit", 100, 1, 1000)
    rows = await call.gateways.search_logs(
        account,
        name,
        LogFilter(
            log_id=query.get("log", ""),
            model=query.get("model", ""),
            provider=query.get("provider", ""),
            status=call.enum_param("status", ("success", "error", "cancelled"), "") if "status" in query else "",
            error=query.get("error", ""),
            cached=call.bool_param("cached") if "cached" in query else None,
            event_id=query.get("event_id", ""),
            since_us=_us(call, "since_us"),
            until_us=_us(call, "until_us"),
            min_duration_ms=call.int_param("min_duration_ms", 0, 0, 10**9) if "min_duration_ms" in query else None,
            metadata=_pair(query["metadata"]) if "metadata" in query else None,
            text=query.get("text", "")[:1000],
            before=_cursor(query["after"]) if "after" in query else None,
            limit=limit + 1,
        ),
    )
    if not rows:
        call.gateways.settings.find(account, name)  # one that was deleted has its rows still
    shown = rows[:limit]
    last = f"{shown[-1].created_us}-{shown[-1].id}" if shown else None
    body = {"object": "list", "data": [row_body(row) for row in shown], "has_more": len(rows) > limit, "last_id": last}
    return json_reply(body)


def _account(call: HttpExchange) -> str:
    named = call.query.get("account")
    if named is None or named == call.principal.account:
        return call.principal.account
    if not call.principal.is_admin:
        raise Forbidden(f"this key belongs to account {call.principal.account}", param="account")
    return check_account_name(named)


async def _audit(call: HttpExchange, act: str, account: str, name: str, details: Any = None) -> None:
    if call.has_accounts:
        await call.accounts.audit.record(call.actor(), act, f"{account}/{name}", details)


def _body(call: HttpExchange, settings: GatewaySettings) -> dict[str, Any]:
    """All settings, also those that are as if nothing were set."""
    fields = {name: getattr(settings, name) for name in GatewaySettings.__struct_fields__}
    body: dict[str, Any] = msgspec.to_builtins(fields)
    source = "config" if call.gateways.settings.is_configured(settings.account, settings.name) else "api"
    return body | {"source": source if settings.account or source == "config" else "built-in"}


def _us(call: HttpExchange, name: str) -> int | None:
    text = call.query.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 16 and int(text) <= _MAX_US):
        raise BadInput(f"`{name}` is a Unix time in microseconds", param=name)
    return int(text)


def _pair(text: str) -> tuple[str, str]:
    key, separator, value = text.partition(":")
    if not (separator and key):
        raise BadInput("`metadata` is key:value", param="metadata")
    return key[:64], value[:1000]


def _cursor(text: str) -> tuple[int, str]:
    at_us, _, log_id = text.partition("-")
    if not (at_us.isascii() and at_us.isdecimal() and len(at_us) <= 16 and log_id):
        raise BadInput("`after` is the `last_id` of a page", param="after")
    return int(at_us), log_id[:200]
