"""The usage ledger: rows are written once, durably, and never changed."""

from typing import Literal

import msgspec

from emberline.store import Database, Query

UsageStatus = Literal["finished", "failed", "cancelled"]


class UsageRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Immutable, one per accepted request, keyed by the request's id. Times are Unix time in microseconds."""

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


_COLUMNS = (
    "id, account, key_id, model, model_version, class, input_tokens, cached_by_tier, output_tokens, reasoning_tokens, "
    "status, created_us, first_token_us, finished_us, price_version"
)
_INSERT = f"INSERT INTO usage ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"
_SELECT = f"SELECT {_COLUMNS} FROM usage WHERE id = ?"


def insert_usage(row: UsageRow) -> Query:
    """What records a row, for those who do so in a transaction of their own."""
    return Query(
        _INSERT,
        (
            row.id,
            row.account,
            row.key_id,
            row.model,
            row.model_version,
            row.priority,
            row.input_tokens,
            msgspec.json.encode(row.cached_by_tier).decode(),
            row.output_tokens,
            row.reasoning_tokens,
            row.status,
            row.created_us,
            row.first_token_us,
            row.finished_us,
            row.price_version,
        ),
    )


class UsageLedger:
    def __init__(self, store: Database) -> None:
        self._store = store

    async def record(self, row: UsageRow) -> None:
        """Return once the row is durable. The first row of an id stands; recording it again changes nothing."""
        await self._store.write(*insert_usage(row))

    async def find(self, request_id: str) -> UsageRow | None:
        rows = await self._store.read(_SELECT, (request_id,))
        if not rows:
            return None
        fields = dict(zip(UsageRow.__struct_fields__, rows[0], strict=True))
        fields["cached_by_tier"] = msgspec.json.decode(str(fields["cached_by_tier"]))
        return msgspec.convert(fields, UsageRow)
