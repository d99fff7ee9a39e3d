"""Accounts: the tenants of a server, with their limits. The core enforces limits; this module is their record."""

import re
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from emberline.protocol.errors import BadInput
from emberline.protocol.price import PICO, parse_amount

LOCAL_ACCOUNT = "local"  # where neither the path nor a key names an account
OWN_ACCOUNT = "me"  # in a path: the key's own account
MAX_INTEGER = (1 << 63) - 1  # of the store's columns
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")

BudgetPeriod = Literal["total", "day", "month"]  # days and months in UTC
Rate = Annotated[int, Meta(ge=1, le=MAX_INTEGER)]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of an account or a key. None means no limit. The limits of both apply to a request."""

    requests_per_minute: Rate | None = None
    tokens_per_minute: Rate | None = None
    concurrency: Rate | None = None  # requests in flight
    budget_pico: Annotated[int, Meta(ge=0, le=MAX_INTEGER)] | None = None  # per `budget_period`
    budget_period: BudgetPeriod = "total"


class Account(Limits, frozen=True, kw_only=True):
    id: str  # the {ACCOUNT_ID} of the URL
    disabled_us: int | None = None  # since when: its keys are refused and its queued jobs fail
    created_us: int
    version: int = 0  # of the directory, when it last changed


ACCOUNT_COLUMNS = ", ".join(Account.__struct_fields__)


def check_account_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise BadInput(
            "account names are 1 to 64 letters, digits, - and _, and begin with a letter or digit", param="account"
        )
    return name


def parse_budget(text: str) -> int:
    """Pico-units in "12.50"; exact."""
    try:
        amount_pico = parse_amount(text, PICO)
    except BadInput as error:
        raise BadInput(error.message, param="budget") from None
    if amount_pico > MAX_INTEGER:
        raise BadInput(f"{text[:40]!r} is more than a budget can be, {MAX_INTEGER // PICO:,}", param="budget")
    return amount_pico
