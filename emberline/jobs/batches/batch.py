"""A batch: jobs that were submitted together, their counts and status."""

import secrets
import uuid
from typing import Any, Literal

import msgspec

from emberline.protocol.errors import ErrorInfo
from emberline.store.database import Row

BatchKind = Literal["openai", "anthropic", "workers_ai", "response"]
BatchStatus = Literal[
    "incoming",  # `submit` is still inserting jobs; not visible
    "validating",  # jobs are still being loaded from its file
    "in_progress",
    "cancelling",
    "completed",
    "failed",
    "expired",
    "cancelled",
]
_ID_PREFIX = {"openai": "batch_", "anthropic": "msgbatch_", "response": "resp_"}


class BatchCounts(msgspec.Struct, frozen=True):
    """Jobs by outcome; dead letters count as failed."""

    total: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    expired: int = 0

    @property
    def ended(self) -> int:
        return self.completed + self.failed + self.cancelled + self.expired

    @property
    def left(self) -> int:
        return self.total - self.ended


class NewBatch(msgspec.Struct, kw_only=True):
    account: str
    key_id: str = ""
    kind: BatchKind
    endpoint: str = ""
    model: str = ""  # empty: the jobs' models differ
    id: str = ""  # empty: a new one is generated
    window_s: float = 86_400.0
    metadata: dict[str, Any] = {}
    attributes: dict[str, Any] = {}  # specific to the API it came from
    input_file_id: str = ""
    traceparent: str = ""  # of the request that submits it

    def __post_init__(self) -> None:
        self.id = self.id or new_batch_id(self.kind)


class Batch(msgspec.Struct, kw_only=True):
    """A snapshot. Times are Unix time in microseconds; that of a status is None until it is reached."""

    id: str
    account: str
    key_id: str
    kind: BatchKind
    endpoint: str
    model: str
    status: BatchStatus
    counts: BatchCounts
    n_released: int
    n_bytes: int
    input_tokens: int  # of the jobs that succeeded
    output_tokens: int
    cached_tokens: int  # of the input
    reasoning_tokens: int  # of the output
    loader: str
    metadata: dict[str, Any]
    attributes: dict[str, Any]
    errors: list[ErrorInfo]  # why it failed as a whole
    input_file_id: str
    traceparent: str
    input_blob: str | None
    created_us: int
    deadline_us: int
    in_progress_us: int | None
    finalizing_us: int | None
    completed_us: int | None
    failed_us: int | None
    expired_us: int | None
    cancelling_us: int | None
    cancelled_us: int | None
    expires_us: int | None

    @property
    def ended(self) -> bool:
        return self.status in ("completed", "failed", "expired", "cancelled")

    @property
    def ended_us(self) -> int | None:
        stamps = (self.completed_us, self.failed_us, self.expired_us, self.cancelled_us)
        return next((stamp for stamp in stamps if stamp is not None), None)


_FIELDS = [field for field in Batch.__struct_fields__ if field != "counts"] + list(BatchCounts.__struct_fields__)
COLUMNS = ", ".join(_FIELDS)


def new_batch_id(kind: str) -> str:
    """A random id in the form that the API's clients know."""
    if kind == "workers_ai":
        return str(uuid.uuid4())
    return _ID_PREFIX[kind] + secrets.token_hex(16)


def batch_from_row(row: Row) -> Batch:
    fields: dict[str, Any] = dict(zip(_FIELDS, row, strict=True))
    fields["counts"] = {name: fields.pop(name) for name in BatchCounts.__struct_fields__}
    for name in ("metadata", "attributes", "errors"):
        fields[name] = msgspec.json.decode(fields[name])
    return msgspec.convert(fields, Batch)
