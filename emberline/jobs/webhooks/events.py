"""Events: what happened to queued work, written in the transaction that made it happen, and read in order.

Event numbers increase per account in commit order, so a reader that has seen number n has seen all before it: the
account's row in `event_heads` is locked from its increment to the commit.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from weakref import WeakSet

import msgspec

from emberline.jobs.batches.batch import BatchKind
from emberline.protocol.errors import BadInput, ErrorInfo
from emberline.store import Database, Query, Value
from emberline.store.database import Row
from emberline.store.notifications import Subscription

EVENTS_CHANNEL = "events"  # notified after every commit that contained event_statements
MAX_PAGE = 100
WORKERS_AI = "cf.workersAi.model."
WORKERS_AI_TYPES = tuple(f"{WORKERS_AI}batch.{end}" for end in ("queued", "succeeded", "failed"))
BATCH_TYPES = tuple(f"batch.{end}" for end in ("completed", "failed", "cancelled", "expired"))
RESPONSE_TYPES = tuple(f"response.{end}" for end in ("completed", "failed", "cancelled", "incomplete"))
TYPES = (*WORKERS_AI_TYPES, *BATCH_TYPES, *RESPONSE_TYPES)

# The codes in Workers AI's failure payload by the error's kind; anything else failed in the model's execution.
_FAILURE_CODES = {"deadline_exceeded": (3007, 408), "cancelled": (3008, 408), "overloaded": (3040, 429)}
_EXECUTION_FAILED = (5001, 500)
_BATCH_TYPE_OF = {name.rpartition(".")[2]: name for name in BATCH_TYPES}
_TYPE_OF: Mapping[BatchKind, Mapping[str, str]] = {  # by kind of batch and its status
    "openai": _BATCH_TYPE_OF,
    "anthropic": _BATCH_TYPE_OF,
    "workers_ai": {
        "queued": f"{WORKERS_AI}batch.queued",
        "completed": f"{WORKERS_AI}batch.succeeded",
        **dict.fromkeys(("failed", "cancelled", "expired"), f"{WORKERS_AI}batch.failed"),
    },
    "response": {name.rpartition(".")[2]: name for name in RESPONSE_TYPES} | {"expired": "response.failed"},
}


class NewEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event to be written. An account has one event of a type per subject; a second one is ignored."""

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
        """Unique, sorted like the numbers, and contains its number: a cursor stays valid after its event is removed."""
        return f"evt_{self.number:012x}{self.token}"


EVENT_COLUMNS = ", ".join(Event.__struct_fields__)


def event_from_row(row: Row) -> Event:
    fields = dict(zip(Event.__struct_fields__, row, strict=True))
    return msgspec.convert({**fields, "data": msgspec.json.decode(str(fields["data"]))}, Event)


def batch_event(
    kind: BatchKind,
    status: str,
    *,
    account: str,
    batch_id: str,
    model: str = "",
    now_us: int,
    error: ErrorInfo | None = None,
) -> NewEvent | None:
    """The event for a batch's (or background response's) new status; None where the API has none for it."""
    name = _TYPE_OF[kind].get(status)
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
    internal_code, http_code = _FAILURE_CODES.get(error.kind if error else fallback, _EXECUTION_FAILED)
    message = error.message if error else f"the batch {'was ' if status == 'cancelled' else ''}{status}"
    return {"message": message, "internalCode": internal_code, "httpCode": http_code}


# --- writing ---------------------------------------------------------------------------------------------------------

_INCREMENT = """
    INSERT INTO event_heads (account, last) VALUES (?, 1)
    ON CONFLICT (account) DO UPDATE SET last = event_heads.last + 1
"""
_INSERT = """
    INSERT INTO events (account, number, token, type, subject, model, data, created_us)
    SELECT account, last, ?, ?, ?, ?, ?, ? FROM event_heads WHERE account = ? AND {condition}
    ON CONFLICT DO NOTHING
"""
# One delivery per subscribed endpoint. The token shows whether the insert before did anything.
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


def event_statements(event: NewEvent, condition: str = "1 = 1", params: Sequence[Value] = ()) -> list[Query]:
    """Statements to append to the transaction that makes the event true. Repeating them writes no second event.

    condition: SQL (with its `params`) that holds only if the transaction really made the change.
    """
    assert event.type in TYPES
    token = secrets.token_hex(8)
    data = msgspec.json.encode(event.data).decode()
    row = (token, event.type, event.subject, event.model, data, event.created_us, event.account)
    return [
        Query(_INCREMENT, (event.account,)),
        Query(_INSERT.format(condition=condition), (*row, *params)),
        Query(_FAN_OUT, (event.account, token)),
    ]


# --- reading ---------------------------------------------------------------------------------------------------------

_AFTER = f"SELECT {EVENT_COLUMNS} FROM events WHERE account = ? AND number > ? ORDER BY number LIMIT ?"
_LAST = "SELECT last FROM event_heads WHERE account = ?"


class EventFeed:
    """An account's events after a cursor, and long polling for more."""

    def __init__(self, db: Database, poll_s: float) -> None:
        self.ended = False  # the process is stopping: long polls return at once
        self._db = db
        self._poll_s = poll_s  # where the store cannot notify across processes
        self._waiting: WeakSet[Subscription] = WeakSet()

    def end(self) -> None:
        self.ended = True
        for subscription in self._waiting:
            subscription.put()

    async def last_number(self, account: str) -> int:
        """The cursor of a reader that wants only events from now on."""
        rows = await self._db.read(_LAST, (account,))
        return int(rows[0][0] or 0) if rows else 0

    async def page(self, account: str, after: int, limit: int = MAX_PAGE) -> list[Event]:
        return [event_from_row(row) for row in await self._db.read(_AFTER, (account, after, limit))]

    async def wait(self, account: str, after: int, wait_s: float, limit: int = MAX_PAGE) -> list[Event]:
        """The events after the cursor as soon as there are any; none after `wait_s` or when the feed ends."""
        notifications = self._db.listen(EVENTS_CHANNEL, self._poll_s)
        self._waiting.add(notifications)
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + wait_s
        while not (events := await self.page(account, after, limit)):
            if self.ended or loop.time() >= give_up_s:
                break
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(give_up_s):
                    await anext(notifications)
        return events


def cursor_number(event_id: str) -> int:
    """The number in an event's id; "0" is the cursor before the first event."""
    if event_id == "0":
        return 0
    try:
        if not event_id.startswith("evt_") or len(event_id) < 16:
            raise ValueError
        return int(event_id[4:16], 16)
    except ValueError:
        raise BadInput(f"{event_id[:80]!r} is not an event's id", param="after") from None


def event_object(event: Event) -> dict[str, Any]:
    """The event as lists and streams show it, and webhooks in OpenAI's form."""
    data = event.data
    if event.type.startswith(WORKERS_AI):
        data = {"source": _source(event), "payload": event.data}
    created_at = event.created_us // 1_000_000
    return {"id": event.id, "object": "event", "created_at": created_at, "type": event.type, "data": data}


def webhook_body(event: Event, endpoint_id: str) -> bytes:
    """The body of a delivery, the same at every attempt; Workers AI's events have its documented form."""
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
