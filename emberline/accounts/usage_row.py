"""A usage row: what one request has used and what it costs."""

from hashlib import blake2b
from typing import Literal

import msgspec

from emberline.protocol.events import Usage
from emberline.protocol.price import UNITS, Price
from emberline.protocol.route_request import RouteRequest
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
    compute_ms: int = 0  # of a predictor
    predictions: int = 0
    device_ms: int = 0  # its part of the time of the workers that had it, times their devices; 0 for upstream servers

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
        counts: dict[str, int] = {}
        for unit in UNITS.values():
            counts[unit.counted] = getattr(self, unit.counted)
        return price.cost_pico(
            self.priority,
            input_tokens=self.input_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=self.output_tokens,
            **counts,
        )


def usage_row(
    request: RouteRequest,
    usage: Usage,
    status: UsageStatus,
    finished_us: int,
    first_token_us: int | None = None,
    lease: str = "",
) -> UsageRow:
    """The row of a request that has ended, without its cost. `lease` is that of its budgets."""
    return UsageRow(
        id=request.id,
        account=request.account,
        key_id=request.key_id,
        model=request.model,
        model_version=request.model_version,
        priority=request.priority,
        input_tokens=usage.prompt_tokens,
        cached_by_tier=usage.cached_by_tier,
        output_tokens=usage.completion_tokens,
        reasoning_tokens=usage.reasoning_tokens,
        status=status,
        created_us=request.created_us,
        first_token_us=first_token_us,
        finished_us=finished_us,
        images=usage.images or (request.images if usage.prompt_tokens else 0),
        audio_ms=usage.audio_ms,
        compute_ms=usage.compute_ms,
        predictions=usage.predictions,
        api=request.api,
        session="" if request.affinity is None else session_digest(request.affinity),
        lease=lease,
    )


COLUMNS = ", ".join(UsageRow.__struct_fields__).replace("priority", "class")
_PLACEHOLDERS = ", ".join("?" * (len(UsageRow.__struct_fields__) + 1))
_INSERT = f"INSERT INTO usage ({COLUMNS}, cached_tokens) VALUES ({_PLACEHOLDERS}) ON CONFLICT DO NOTHING"


def session_digest(affinity: str | None) -> str:
    """Digest of a session id, so that a row tells its session and not what the client calls it."""
    return "" if affinity is None else blake2b(affinity.encode("utf-8", "replace"), digest_size=8).hexdigest()


def insert_usage(row: UsageRow) -> Query:
    """The statement that records a row, for a transaction of the caller. The first row of an id stands."""
    values = msgspec.structs.asdict(row)
    values["cached_by_tier"] = msgspec.json.encode(row.cached_by_tier).decode()
    return Query(_INSERT, (*values.values(), row.cached_tokens))
