"""A usage row: what one request has used and what it costs."""

from hashlib import blake2b
from typing import Literal

import msgspec

from emberline.protocol.price import Price
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
    price_version: str = ""  # of the model's price when the request was accepted; empty: it had none
    images: int = 0
    audio_ms: int = 0
    api: str = ""  # "chat", "messages", "run", …
    session: str = ""  # a digest of the client's session id
    cost_pico: int | None = None  # 10⁻¹² of the currency; None: no price, which is not zero
    discount_pico: int = 0  # what cached input would have cost more
    lease: str = ""  # of its budgets, in which its cost was reserved

    @property
    def cached_tokens(self) -> int:
        return sum(self.cached_by_tier.values())

    def priced(self, price: Price, is_billed: bool | None = None) -> "UsageRow":
        """The row with the cost of what was computed, or with a cost of 0 where it is not billed. By default only a
        failed request is not: the failure is ours, unless the caller knows that the request caused it."""
        if is_billed is None:
            is_billed = self.status != "failed"
        cached_tokens = min(self.cached_tokens, self.input_tokens)
        return msgspec.structs.replace(
            self,
            price_version=price.version,
            cost_pico=self._cost_pico(price) if is_billed else 0,
            discount_pico=price.cached_discount_pico(self.priority, cached_tokens) if is_billed else 0,
        )

    def _cost_pico(self, price: Price) -> int:
        return price.cost_pico(
            self.priority,
            input_tokens=self.input_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=self.output_tokens,
            images=self.images,
            audio_ms=self.audio_ms,
        )


COLUMNS = ", ".join(UsageRow.__struct_fields__).replace("priority", "class")
_PLACEHOLDERS = ", ".join("?" * (len(UsageRow.__struct_fields__) + 1))
_INSERT = f"INSERT INTO usage ({COLUMNS}, cached_tokens) VALUES ({_PLACEHOLDERS}) ON CONFLICT DO NOTHING"


def session_digest(affinity: str | None) -> str:
    """Of a session id, so that a row tells which session it belongs to and not what the client calls it."""
    return "" if affinity is None else blake2b(affinity.encode("utf-8", "replace"), digest_size=8).hexdigest()


def insert_usage(row: UsageRow) -> Query:
    """The statement that records a row, for a transaction of the caller. The first row of an id stands."""
    values = msgspec.structs.asdict(row)
    values["cached_by_tier"] = msgspec.json.encode(row.cached_by_tier).decode()
    return Query(_INSERT, (*values.values(), row.cached_tokens))
