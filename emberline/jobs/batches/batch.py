"""A batch: lines that were submitted together, and how far they have come."""

import secrets
import uuid
from typing import Any, Literal

import msgspec

from emberline.protocol.errors import ErrorInfo
from emberline.store import Value

BatchKind = Literal["openai", "anthropic", "workers_ai", "response"]
BatchStatus = Literal[
    "incoming",  # lines are still being written by `submit`; nobody is shown it
    "validating",  # lines are still being read from its file
    "in_progress",
    "cancelling",
    "completed",
    "failed",
    "expired",
    "cancelled",
]
_PREFIX = {"openai": "batch_", "anthropic": "msgbatch_", "response": "resp_"}


class BatchCounts(msgspec.Struct, frozen=True):
    """Lines by how they ended; dead ones count as failed."""

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
    model: str = ""  # empty: the lines differ
    id: str = ""  # empty: a fresh one
    window_s: float = 86_400.0
    metadata: dict[str, Any] = {}
    attributes: dict[str, Any] = {}  # the dialect's own
    input_file_id: str = ""

    def __post_init__(self) -> None:
        self.id = self.id or new_batch_id(self.kind)


class Batch(msgspec.Struct, kw_only=True):
    """As it was when it was read. Times are Unix time in microseconds; a state's is None until it was reached."""

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
    input_tokens: int  # of the lines that succeeded
    output_tokens: int
    cached_tokens: int  # of the input
    reasoning_tokens: int  # of the output
    loader: str
    metadata: dict[str, Any]
    attributes: dict[str, Any]
    errors: list[ErrorInfo]  # why it failed as a whole
    input_file_id: str
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
    def n_loaded(self) -> int:
        """Lines that are there already; a loader that takes over skips so many of the file."""
        return self.counts.total

    @property
    def ended(self) -> bool:
        return self.status in ("completed", "failed", "expired", "cancelled")

    @property
    def ended_us(self) -> int | None:
        stamps = (self.completed_us, self.failed_us, self.expired_us, self.cancelled_us)
        return next((stamp for stamp in stamps if stamp is not None), None)


COLUMNS = (
    "id, account, key_id, kind, endpoint, model, status, total, completed, failed, cancelled, expired, n_released, "
    "n_bytes, input_tokens, output_tokens, cached_tokens, reasoning_tokens, loader, metadata, attributes, errors, "
    "input_file_id, input_blob, created_us, deadline_us, in_progress_us, finalizing_us, completed_us, failed_us, "
    "expired_us, cancelling_us, cancelled_us, expires_us"
)
_NAMES = COLUMNS.split(", ")
_JSON = ("metadata", "attributes", "errors")


def new_batch_id(kind: str) -> str:
    """Random, in the form that the dialect's clients know."""
    if kind == "workers_ai":
        return str(uuid.uuid4())
    return _PREFIX[kind] + secrets.token_hex(16)


def batch_from_row(row: tuple[Value, ...]) -> Batch:
    fields: dict[str, Any] = dict(zip(_NAMES, row, strict=True))
    fields["counts"] = {name: fields.pop(name) for name in BatchCounts.__struct_fields__}
    for name in _JSON:
        fields[name] = msgspec.json.decode(fields[name])
    return msgspec.convert(fields, Batch)
