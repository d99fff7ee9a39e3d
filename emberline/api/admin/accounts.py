"""Endpoints for operators: accounts and API keys."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from emberline.accounts.account import Account, BudgetPeriod, Limits, Rate, parse_budget
from emberline.accounts.account_service import MAX_OVERLAP_S, MAX_PAGE, MAX_SCOPE, OVERLAP_S, IssuedKey, KeyGrant
from emberline.accounts.api_key import ApiKey, Role
from emberline.api.http.body import read_json
from emberline.api.http.errors import HeaderList, NoBody
from emberline.api.http.exchange import HttpExchange, Reply, json_reply, list_reply
from emberline.api.http.router import API_NAMES
from emberline.protocol.errors import BadInput
from emberline.protocol.price import format_amount

NO_STORE: HeaderList = [(b"cache-control", b"no-store")]
PAGE = {"after": {"type": "string"}, "limit": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE}}
KEY_PAGE = {**PAGE, "account": {"type": "string"}}

Amount = Annotated[str, Meta(max_length=40)]  # decimal, such as "12.50"
Names = Annotated[list[str], Meta(max_length=MAX_SCOPE)]


class LimitFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """null removes a limit. `budget` is an amount of money as a decimal string."""

    requests_per_minute: Rate | UnsetType | None = UNSET
    tokens_per_minute: Rate | UnsetType | None = UNSET
    concurrency: Rate | UnsetType | None = UNSET
    budget: Amount | UnsetType | None = UNSET
    budget_period: BudgetPeriod | UnsetType = UNSET

    def limit_changes(self) -> dict[str, Any]:
        fields = ("requests_per_minute", "tokens_per_minute", "concurrency", "budget_period")
        changes = {name: value for name in fields if (value := getattr(self, name)) is not UNSET}
        if self.budget is not UNSET:
            changes["budget_pico"] = None if self.budget is None else parse_budget(self.budget)
        return changes


class NewAccount(LimitFields, kw_only=True):
    id: str


class AccountChange(LimitFields, kw_only=True):
    disabled: bool | UnsetType = UNSET


class KeyChange(LimitFields, kw_only=True):
    """`models`, `apis`: empty lists allow everything. `expires_at` is a Unix time or an ISO 8601 time; null: never."""

    name: str | UnsetType = UNSET
    models: Names | UnsetType = UNSET
    apis: Names | UnsetType = UNSET
    expires_at: int | str | UnsetType | None = UNSET

    def changes(self) -> dict[str, Any]:
        changes = self.limit_changes()
        if self.name is not UNSET:
            changes["name"] = self.name
        if self.models is not UNSET:
            changes["models"] = tuple(self.models)
        if self.apis is not UNSET:
            changes["apis"] = _checked_apis(self.apis)
        if self.expires_at is not UNSET:
            changes["expires_us"] = None if self.expires_at is None else _time_us(self.expires_at)
        return changes


class NewKeyRequest(KeyChange, kw_only=True):
    """An account that does not exist is created."""

    account: str
    role: Role = "user"


class RotateKeyRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Rotation of a key. The old key stays valid for `overlap_s` seconds."""

    overlap_s: Annotated[int, Meta(ge=0, le=MAX_OVERLAP_S)] = OVERLAP_S


# --- accounts --------------------------------------------------------------------------------------------------------


async def create_account(call: HttpExchange) -> Reply:
    body = await read_json(call, NewAccount)
    account = await call.accounts.create_account(call.actor(), body.id, Limits(**body.limit_changes()))
    return json_reply(account_body(account))


async def list_accounts(call: HttpExchange) -> Reply:
    limit = call.int_param("limit", 100, 1, MAX_PAGE)
    found = await call.accounts.accounts(after=call.query.get("after", ""), limit=limit + 1)
    return list_reply([account_body(account) for account in found[:limit]], has_more=len(found) > limit)


async def retrieve_account(call: HttpExchange) -> Reply:
    return json_reply(account_body(await call.accounts.account(call.path_param)))


async def update_account(call: HttpExchange) -> Reply:
    body = await read_json(call, AccountChange)
    disabled = None if body.disabled is UNSET else body.disabled
    account = await call.accounts.update_account(call.actor(), call.path_param, body.limit_changes(), disabled)
    return json_reply(account_body(account))


# --- keys ------------------------------------------------------------------------------------------------------------


async def create_key(call: HttpExchange) -> Reply:
    """Only this response contains the key."""
    body = await read_json(call, NewKeyRequest)
    issued = await call.accounts.create_key(call.actor(), body.account, _grant(body.role, body.changes()))
    return _issued_reply(issued)


async def list_keys(call: HttpExchange) -> Reply:
    limit = call.int_param("limit", 100, 1, MAX_PAGE)
    account, after = call.query.get("account"), call.query.get("after", "")
    found = await call.accounts.keys(account, after=after, limit=limit + 1)
    return list_reply([key_body(key) for key in found[:limit]], has_more=len(found) > limit)


async def retrieve_key(call: HttpExchange) -> Reply:
    return json_reply(key_body(await call.accounts.key(call.path_param)))


async def update_key(call: HttpExchange) -> Reply:
    body = await read_json(call, KeyChange)
    return json_reply(key_body(await call.accounts.update_key(call.actor(), call.path_param, body.changes())))


async def rotate_key(call: HttpExchange) -> Reply:
    """Only this response contains the new key."""
    try:
        body = await read_json(call, RotateKeyRequest)
    except NoBody:
        body = RotateKeyRequest()
    return _issued_reply(await call.accounts.rotate_key(call.actor(), call.path_param, body.overlap_s))


async def revoke_key(call: HttpExchange) -> Reply:
    return json_reply(key_body(await call.accounts.revoke_key(call.actor(), call.path_param)))


def _grant(role: Role, changes: Mapping[str, Any]) -> KeyGrant:
    limits = {name: value for name, value in changes.items() if name in Limits.__struct_fields__}
    rest = {name: value for name, value in changes.items() if name not in limits}
    return KeyGrant(role=role, limits=Limits(**limits), **rest)


def _checked_apis(apis: list[str]) -> tuple[str, ...]:
    for api in apis:
        if api not in API_NAMES:
            raise BadInput(f"there is no API {api[:64]!r}; there are {', '.join(API_NAMES)}", param="apis")
    return tuple(apis)


def _time_us(when: int | str) -> int:
    """Microseconds of a Unix time in seconds, or of an ISO 8601 time (UTC unless it says otherwise)."""
    try:
        if isinstance(when, str):
            parsed = datetime.fromisoformat(when[:64])
            when = int((parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp())
        datetime.fromtimestamp(when, UTC)
    except (ValueError, OverflowError, OSError):
        raise BadInput("`expires_at` is a Unix time in seconds or an ISO 8601 time", param="expires_at") from None
    return when * 1_000_000


# --- bodies ----------------------------------------------------------------------------------------------------------


def _issued_reply(issued: IssuedKey) -> Reply:
    return json_reply(key_body(issued.record) | {"key": issued.key.text}, headers=NO_STORE)


def _limits_body(limits: Limits) -> dict[str, Any]:
    return {
        "requests_per_minute": limits.requests_per_minute,
        "tokens_per_minute": limits.tokens_per_minute,
        "concurrency": limits.concurrency,
        "budget": None if limits.budget_pico is None else format_amount(limits.budget_pico),
        "budget_period": limits.budget_period,
    }


def account_body(account: Account) -> dict[str, Any]:
    return {
        "id": account.id,
        "object": "account",
        "created_at": account.created_us // 1_000_000,
        "disabled_at": _seconds(account.disabled_us),
        **_limits_body(account),
    }


def key_body(key: ApiKey) -> dict[str, Any]:
    """Return the key's body without the key itself, which is no longer known, and without its hash."""
    return {
        "id": key.id,
        "object": "api_key",
        "account": key.account,
        "name": key.name,
        "role": key.role,
        "hint": f"…{key.hint}",
        "models": key.models,
        "apis": key.apis,
        "created_at": key.created_us // 1_000_000,
        "expires_at": _seconds(key.expires_us),
        "revoked_at": _seconds(key.revoked_us),
        "previous_until": _seconds(key.previous_until_us),
        **_limits_body(key),
    }


def _seconds(time_us: int | None) -> int | None:
    return None if time_us is None else time_us // 1_000_000
