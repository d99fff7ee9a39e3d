"""Events: what happened to queued work, written in the transaction that made it happen.

Numbers rise by account in the order of commits, so that a reader who has seen number n has seen all before it: the
account's row in `event_heads` is locked from its increment to the commit.
"""

import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from emberline.protocol.errors import BadInput, ErrorInfo
from emberline.store import Step, Value

EVENTS_CHANNEL = "events"  # notified after every commit that held event_statements
WORKERS_AI = "cf.workersAi.model."
WORKERS_AI_TYPES = tuple(f"{WORKERS_AI}batch.{end}" for end in ("queued", "succeeded", "failed"))
BATCH_TYPES = tuple(f"batch.{end}" for end in ("completed", "failed", "cancelled", "expired"))
RESPONSE_TYPES = tuple(f"response.{end}" for end in ("completed", "failed", "cancelled", "incomplete"))
TYPES = (*WORKERS_AI_TYPES, *BATCH_TYPES, *RESPONSE_TYPES)

Kind = Literal["openai", "anthropic", "workers_ai", "response"]

# The codes Workers AI's failure payload wants, by the error's kind; anything else failed in the model's execution.
_FAILURES = {"deadline_exceeded": (3007, 408), "cancelled": (3008, 408), "overloaded": (3040, 429)}
_EXECUTION_FAILED = (5001, 500)
_ENDINGS: Mapping[str, Mapping[str, str]] = {
    "openai": {end: f"batch.{end}" for end in ("completed", "failed", "cancelled", "expired")},
    "anthropic": {end: f"batch.{end}" for end in ("completed", "failed", "cancelled", "expired")},
    "workers_ai": {
        "queued": f"{WORKERS_AI}batch.queued",
        "completed": f"{WORKERS_AI}batch.succeeded",
        "failed": f"{WORKERS_AI}batch.failed",
        "cancelled": f"{WORKERS_AI}batch.failed",
        "expired": f"{WORKERS_AI}batch.failed",
    },
    "response": {
        "completed": "response.completed",
        "incomplete": "response.incomplete",
        "cancelled": "response.cancelled",
        "failed": "response.failed",
        "expired": "response.failed",
    },
}


class NewEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One that is about to happen. An account has one event of a type about a subject: telling it again is nothing."""

    account: str
    type: str
    subject: str  # the id of the batch or response
    model: str = ""
    data: dict[str, Any] = {}
    created_us: int


class Event(msgspec.Struct, frozen=True, kw_only=True):
    account: str
    number: int
    token: str
    type: str
    subject: str
    model: str
    data: dict[str, Any]
    created_us: int

    @property
    def id(self) -> str:
        """Unique for ever, sorted like the numbers, and tells its number: reading goes on from an id long removed."""
        return f"evt_{self.number:012x}{self.token}"


def batch_event(
    kind: Kind,
    status: str,
    *,
    account: str,
    batch_id: str,
    model: str = "",
    now_us: int,
    error: ErrorInfo | None = None,
) -> NewEvent | None:
    """The event that tells a batch's (or background response's) status; None where nobody is told of it."""
    name = _ENDINGS[kind].get(status)
    if name is None:
        return None
    data: dict[str, Any] = {"id": batch_id}
    if kind == "workers_ai":
        data = {"requestId": batch_id}
        if name.endswith(".failed"):
            data |= _failure(status, error)
    return NewEvent(account=account, type=name, subject=batch_id, model=model, data=data, created_us=now_us)


def _failure(status: str, error: ErrorInfo | None) -> dict[str, Any]:
    fallback = {"cancelled": "cancelled", "expired": "deadline_exceeded"}.get(status, "internal")
    internal_code, http_code = _FAILURES.get(error.kind if error else fallback, _EXECUTION_FAILED)
    message = error.message if error else f"the batch {'was ' if status == 'cancelled' else ''}{status}"
    return {"message": message, "internalCode": internal_code, "httpCode": http_code}


# --- writing ---------------------------------------------------------------------------------------------------------

_BUMP = """
    INSERT INTO event_heads (account, last) VALUES (?, 1)
    ON CONFLICT (account) DO UPDATE SET last = event_heads.last + 1
"""
_INSERT = """
    INSERT INTO events (account, number, token, type, subject, model, data, created_us)
    SELECT account, last, ?, ?, ?, ?, ?, ? FROM event_heads WHERE account = ? AND {when}
    ON CONFLICT DO NOTHING
"""
# A delivery for each endpoint that wants it. `token` tells whether the insert before did anything.
_FAN_OUT = """
    INSERT INTO deliveries (id, endpoint_id, account, event_number, state, attempts, base, ready_us, created_us)
    SELECT 'dlv_' || substr(endpoint.id, 4) || event.token, endpoint.id, event.account, event.number,
        'pending', 0, 0, event.created_us, event.created_us
    FROM event_heads AS head
    JOIN events AS event ON event.account = head.account AND event.number = head.last
    JOIN webhook_endpoints AS endpoint ON endpoint.account = event.account
    WHERE head.account = ? AND event.token = ? AND endpoint.enabled = 1
        AND (endpoint.types = '*' OR endpoint.types LIKE '%,' || event.type || ',%')
        AND (endpoint.model = '' OR endpoint.model = event.model)
    ON CONFLICT DO NOTHING
"""


def event_statements(event: NewEvent, when: str = "", params: Sequence[Value] = ()) -> list[Step]:
    """What to append to the transaction that makes the event true. Rerunning it writes no second event.

    `when` (with its `params`) is an SQL condition that holds only if the transaction really made the change.
    """
    assert event.type in TYPES
    token = secrets.token_hex(8)
    data = msgspec.json.encode(event.data).decode()
    own = (token, event.type, event.subject, event.model, data, event.created_us, event.account)
    return [
        Step(_BUMP, (event.account,)),
        Step(_INSERT.format(when=when or "1 = 1"), (*own, *params)),
        Step(_FAN_OUT, (event.account, token)),
    ]


# --- telling ---------------------------------------------------------------------------------------------------------


def cursor_number(event_id: str) -> int:
    """The number an event's id tells; "0" is before the first."""
    if event_id == "0":
        return 0
    digits = event_id[4:16]
    if not event_id.startswith("evt_") or len(event_id) < 16:
        raise BadInput(f"{event_id[:80]!r} is not an event's id", param="after")
    try:
        return int(digits, 16)
    except ValueError:
        raise BadInput(f"{event_id[:80]!r} is not an event's id", param="after") from None


def event_object(event: Event) -> dict[str, Any]:
    """The event as lists and streams show it, and webhooks of OpenAI's kind."""
    data = event.data
    if event.type.startswith(WORKERS_AI):
        data = {"source": _source(event), "payload": event.data}
    created_at = event.created_us // 1_000_000
    return {"id": event.id, "object": "event", "created_at": created_at, "type": event.type, "data": data}


def webhook_body(event: Event, endpoint_id: str) -> bytes:
    """The bytes a receiver gets, the same at every attempt: Workers AI's events in its documented form."""
    if not event.type.startswith(WORKERS_AI):
        return msgspec.json.encode(event_object(event))
    return msgspec.json.encode(
        {
            "type": event.type,
            "source": _source(event),
            "payload": event.data,
            "metadata": {
                "accountId": event.account,
                "eventSubscriptionId": endpoint_id,
                "eventSchemaVersion": 1,
                "eventTimestamp": timestamp(event.created_us),
            },
        }
    )


def _source(event: Event) -> dict[str, str]:
    return {"type": "workersAi.model", "modelName": event.model}


def timestamp(at_us: int) -> str:
    """2025-05-01T02:48:57.132Z"""
    return datetime.fromtimestamp(at_us / 1e6, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
