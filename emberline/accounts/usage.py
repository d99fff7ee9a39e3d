"""One request's usage, as it is kept for ever."""

from typing import Literal

import msgspec

Status = Literal["finished", "failed", "cancelled"]


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
    status: Status
    created_us: int
    first_token_us: int | None = None
    finished_us: int
    price_version: str = ""

    @property
    def cached_tokens(self) -> int:
        return sum(self.cached_by_tier.values())
