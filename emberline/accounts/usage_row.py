"""A usage row: what one request has used."""

from typing import Literal

import msgspec

from emberline.store import Query

UsageStatus = Literal["finished", "failed", "cancelled"]


class UsageRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Keyed by the request's id. Times are Unix time in microseconds."""

    id: str
    account: str
    key_id: str = ""
    model: str
    model_version: str  # fingerprint of the weights
    priority: str = "default"  # priority, default, flex or batch
    input_tokens: int = 0  # of the prompt, once it is computed
    cached_by_tier: dict[str, int] = {}
    output_tokens: int = 0
    reasoning_tokens: int = 0
    status: UsageStatus
    created_us: int
    first_token_us: int | None = None
    finished_us: int
    price_version: str = ""

    @property
    def cached_tokens(self) -> int:
        return sum(self.cached_by_tier.values())


COLUMNS = ", ".join(UsageRow.__struct_fields__).replace("priority", "class")
_PLACEHOLDERS = ", ".join("?" * len(UsageRow.__struct_fields__))
_INSERT = f"INSERT INTO usage ({COLUMNS}) VALUES ({_PLACEHOLDERS}) ON CONFLICT DO NOTHING"


def insert_usage(row: UsageRow) -> Query:
    """The statement that records a row, for a transaction of the caller. The first row of an id stands."""
    values = msgspec.structs.asdict(row)
    values["cached_by_tier"] = msgspec.json.encode(row.cached_by_tier).decode()
    return Query(_INSERT, tuple(values.values()))
