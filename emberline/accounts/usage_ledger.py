"""The usage ledger: one immutable row per accepted request."""

from typing import Literal

import msgspec

from emberline.store import Database, Query

UsageStatus = Literal["finished", "failed", "cancelled"]


class UsageRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Keyed by the request's id. Times are Unix time in microseconds."""

    id: str
    account: str
    key_id: str = ""
    model: str
    model_version: str  # fingerprint of the weights
    priority: str = "default"  # priority, default, flex or batch
    input_tokens: int = 0
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


_COLUMNS = ", ".join(UsageRow.__struct_fields__).replace("priority", "class")
_PLACEHOLDERS = ", ".join("?" * len(UsageRow.__struct_fields__))
_INSERT = f"INSERT INTO usage ({_COLUMNS}) VALUES ({_PLACEHOLDERS}) ON CONFLICT DO NOTHING"
_SELECT = f"SELECT {_COLUMNS} FROM usage WHERE id = ?"


def insert_usage(row: UsageRow) -> Query:
    """The statement that records a row, for a transaction of the caller."""
    values = msgspec.structs.asdict(row)
    values["cached_by_tier"] = msgspec.json.encode(row.cached_by_tier).decode()
    return Query(_INSERT, tuple(values.values()))


class UsageLedger:
    def __init__(self, store: Database) -> None:
        self._store = store

    async def record(self, row: UsageRow) -> None:
        """Return once the row is durable. Recording a second row of the same id changes nothing."""
        await self._store.write(*insert_usage(row))

    async def find(self, request_id: str) -> UsageRow | None:
        rows = await self._store.read(_SELECT, (request_id,))
        if not rows:
            return None
        fields = dict(zip(UsageRow.__struct_fields__, rows[0], strict=True))
        fields["cached_by_tier"] = msgspec.json.decode(str(fields["cached_by_tier"]))
        return msgspec.convert(fields, UsageRow)
