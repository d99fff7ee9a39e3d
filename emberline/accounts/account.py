"""Accounts: the tenants of a server, with their limits. The core enforces limits; this module is their record."""

import re
from decimal import Decimal, InvalidOperation
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from emberline.protocol.errors import BadInput

LOCAL_ACCOUNT = "local"  # where neither the path nor a key names an account
PICO = 10**12  # an amount of money is an integer of 10⁻¹² units of the currency
MAX_INTEGER = (1 << 63) - 1  # of the store's columns
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")

BudgetPeriod = Literal["total", "day", "month"]  # days and months in UTC
Rate = Annotated[int, Meta(ge=1, le=MAX_INTEGER)]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What an account or a key may use. None: no limit. Of an account and its key, both limits apply."""

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


def parse_amount(text: str) -> int:
    """Pico-units in "12.50"; exact."""
    try:
        amount = Decimal(text) * PICO if len(text) <= 40 else Decimal("NaN")
    except InvalidOperation:
        amount = Decimal("NaN")
    if not amount.is_finite() or amount != amount.to_integral_value() or not 0 <= amount <= MAX_INTEGER:
        raise BadInput(
            f"{text[:40]!r} is not an amount such as 12.50, from 0 to {MAX_INTEGER // PICO:,}", param="budget"
        )
    return int(amount)


def format_amount(pico: int) -> str:
    """The exact amount, with at least two decimals."""
    whole, rest = divmod(pico, PICO)
    return f"{whole}.{f'{rest:012d}'.rstrip('0'):0<2}"
