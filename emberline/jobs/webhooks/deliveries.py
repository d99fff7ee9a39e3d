"""Deliveries: one row for each event that an endpoint is to get, and a log of every attempt at it.

A row that waits has state `pending` and a time before which nobody takes it. Taking one moves that time beyond the
attempt's end, so a process that dies in the middle gives its rows back by itself: the receiver then sees the same
`webhook-id` again. `attempts` counts takings and is also the fence: only the latest taker decides the row's fate.
"""

import itertools
from typing import Literal

import msgspec

from emberline.jobs.webhooks.endpoints import ENDPOINT_COLUMNS, WebhookEndpoint, endpoint_from_row, give_up_pending
from emberline.jobs.webhooks.events import EVENTS_CHANNEL, Event
from emberline.protocol.errors import BadInput, NotFound
from emberline.store import Database, Sql, Step, Value
from emberline.store.database import Row

LEASE_S = 60.0  # longer than an attempt can last
MAX_REPLAYED = 1000  # at once

DeliveryState = Literal["pending", "delivered", "failed"]


class DeliveryAttempt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One try, as it is logged. Neither status nor problem: its process ended before it could tell."""

    number: int
    started_us: int = 0
    took_us: int = 0
    status: int | None = None  # the receiver's answer
    problem: str = ""  # why there was none, or why it does not count

    @property
    def succeeded(self) -> bool:
        return self.status is not None and 200 <= self.status < 300


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    endpoint_id: str
    account: str
    event_number: int
    state: DeliveryState
    attempts: int
    base: int  # attempts made before the latest replay; the schedule counts from here
    ready_us: int
    created_us: int
    finished_us: int | None

    @property
    def n_made(self) -> int:
        return self.attempts - self.base


class ClaimedDelivery(msgspec.Struct, frozen=True):
    """A delivery that was taken, with all that sending it needs. No event: it was removed in the meantime."""

    delivery: Delivery
    endpoint: WebhookEndpoint
    event: Event | None


class DeliveryRecord(msgspec.Struct, frozen=True):
    """A delivery as its owner sees it."""

    delivery: Delivery
    event: Event | None
    attempts: list[DeliveryAttempt]


def _of(table: str, columns: str) -> str:
    return ", ".join(f"{table}.{name}" for name in columns.split(", "))


_COLUMNS = "id, endpoint_id, account, event_number, state, attempts, base, ready_us, created_us, finished_us"
EVENT_COLUMNS = "account, number, token, type, subject, model, data, created_us"
_NEXT_ENDPOINT = (
    "SELECT endpoint_id FROM deliveries WHERE state = 'pending' AND ready_us <= ?{busy} ORDER BY ready_us LIMIT 1"
)
_NEXT_READY = "SELECT MIN(ready_us) FROM deliveries WHERE state = 'pending'"
_TAKE_SOME = f"""
    UPDATE deliveries SET attempts = attempts + 1, ready_us = ? WHERE id IN (
        SELECT id FROM deliveries WHERE endpoint_id = ? AND state = 'pending' AND ready_us <= ?
        ORDER BY ready_us, event_number LIMIT ? {{lock}}
    ) RETURNING {_COLUMNS}
"""
# SQLite has one writer at a time; on PostgreSQL two takers pass each other by.
_TAKE = Sql(_TAKE_SOME.format(lock=""), postgres=_TAKE_SOME.format(lock="FOR UPDATE SKIP LOCKED"))
_LOG = """
    INSERT INTO delivery_attempts (delivery_id, number, started_us, took_us, status, problem)
    SELECT ?, ?, ?, ?, ?, ? WHERE EXISTS (SELECT 1 FROM deliveries WHERE id = ?) ON CONFLICT DO NOTHING
"""
_DELIVERED = "UPDATE deliveries SET state = 'delivered', finished_us = ? WHERE id = ? AND attempts = ? RETURNING id"
_AGAIN = "UPDATE deliveries SET ready_us = ? WHERE id = ? AND attempts = ? AND state = 'pending' RETURNING id"
_FAILED = (
    "UPDATE deliveries SET state = 'failed', finished_us = ? WHERE id = ? AND attempts = ? AND state = 'pending' "
    "RETURNING id"
)
_WELL = "UPDATE webhook_endpoints SET failing_since_us = NULL WHERE id = ? AND failing_since_us IS NOT NULL"
_ILL = "UPDATE webhook_endpoints SET failing_since_us = ? WHERE id = ? AND failing_since_us IS NULL"
_DISABLE = (
    "UPDATE webhook_endpoints SET enabled = 0, disabled_reason = ?, modified_us = ? "
    "WHERE id = ? AND enabled = 1{still} RETURNING id"
)
_STILL_FAILING = " AND failing_since_us <= ?"
_ATTEMPT_COLUMNS = "number, started_us, took_us, status, problem"
# One statement, so that a delivery and its attempts are of the same moment.
_LOGGED = f"""
    SELECT {_of("delivery", _COLUMNS)}, {_of("event", EVENT_COLUMNS)}, {_of("attempt", _ATTEMPT_COLUMNS)}
    FROM (SELECT {_COLUMNS} FROM deliveries WHERE {{where}} ORDER BY event_number DESC LIMIT ?) AS delivery
    LEFT JOIN events AS event ON event.account = delivery.account AND event.number = delivery.event_number
    LEFT JOIN delivery_attempts AS attempt ON attempt.delivery_id = delivery.id
    ORDER BY delivery.event_number DESC, attempt.number
"""
_ALL_FAILED = (
    "id IN (SELECT id FROM deliveries WHERE endpoint_id = ? AND state = 'failed' ORDER BY event_number LIMIT ?)"
)
_REPLAY = "UPDATE deliveries SET state = 'pending', base = attempts, ready_us = ?, finished_us = NULL WHERE {which}"


class Deliveries:
    def __init__(self, db: Database) -> None:
        self._db = db

    # --- for the deliverer -------------------------------------------------------------------------------------------

    async def next_endpoint(self, busy: list[str]) -> str | None:
        """The endpoint, none of the busy ones, whose delivery has waited longest."""
        marks = f" AND endpoint_id NOT IN ({', '.join('?' for _ in busy)})" if busy else ""
        rows = await self._db.read(_NEXT_ENDPOINT.format(busy=marks), (self._db.now_us(), *busy))
        return str(rows[0][0]) if rows else None

    async def next_ready_us(self) -> int | None:
        ((ready_us,),) = await self._db.read(_NEXT_READY)
        return None if ready_us is None else int(ready_us)

    async def take(self, endpoint_id: str, limit: int) -> list[ClaimedDelivery]:
        """At most `limit` deliveries that are due, ours until the lease ends."""
        now_us = self._db.now_us()
        until_us = now_us + int(LEASE_S * 1e6)
        rows = await self._db.write(_TAKE, (until_us, endpoint_id, now_us, limit))
        if not rows:
            return []
        found = await self._db.read(f"SELECT {ENDPOINT_COLUMNS} FROM webhook_endpoints WHERE id = ?", (endpoint_id,))
        if not found:  # deleted while the event was written
            await self._db.write("DELETE FROM deliveries WHERE endpoint_id = ?", (endpoint_id,))
            return []
        endpoint = endpoint_from_row(found[0])
        taken = sorted((_delivery(row) for row in rows), key=lambda delivery: delivery.event_number)
        return [ClaimedDelivery(delivery, endpoint, await self._event(delivery)) for delivery in taken]

    async def succeeded(self, errand: ClaimedDelivery, attempt: DeliveryAttempt) -> None:
        delivery = errand.delivery
        done = (self._db.now_us(), delivery.id, delivery.attempts)
        await self._db.transaction(
            [_log(delivery, attempt), Step(_DELIVERED, done), Step(_WELL, (errand.endpoint.id,))]
        )

    async def failed(self, errand: ClaimedDelivery, attempt: DeliveryAttempt, delay_s: float | None) -> bool:
        """Try again after `delay_s`, or never (None). True: that was never."""
        now_us, delivery = self._db.now_us(), errand.delivery
        if delay_s is None:
            fate = Step(_FAILED, (now_us, delivery.id, delivery.attempts))
        else:
            fate = Step(_AGAIN, (now_us + int(delay_s * 1e6), delivery.id, delivery.attempts))
        outcomes = await self._db.transaction([_log(delivery, attempt), fate, Step(_ILL, (now_us, errand.endpoint.id))])
        return delay_s is None and bool(outcomes[1])

    async def disable(self, errand: ClaimedDelivery, reason: str, failing_since_us: int | None = None) -> bool:
        """Whether it was enabled until now, and (where given) fails since then. What waits for it has failed."""
        now_us, endpoint_id = self._db.now_us(), errand.endpoint.id
        still, since = ("", ()) if failing_since_us is None else (_STILL_FAILING, (failing_since_us,))
        disable = Step(_DISABLE.format(still=still), (reason, now_us, endpoint_id, *since))
        outcomes = await self._db.transaction([disable, give_up_pending(endpoint_id, now_us)])
        return bool(outcomes[0])

    async def count_pending(self) -> int:
        ((n,),) = await self._db.read("SELECT COUNT(*) FROM deliveries WHERE state = 'pending'")
        return int(n or 0)

    # --- for the endpoint's owner ------------------------------------------------------------------------------------

    async def log(
        self, endpoint: WebhookEndpoint, state: DeliveryState | None, before: int | None, limit: int
    ) -> list[DeliveryRecord]:
        """The endpoint's deliveries, the latest events first; `before` an event's number."""
        conditions, params = ["endpoint_id = ?"], list[Value]([endpoint.id])
        if state is not None:
            conditions.append("state = ?")
            params.append(state)
        if before is not None:
            conditions.append("event_number < ?")
            params.append(before)
        rows = await self._db.read(_LOGGED.format(where=" AND ".join(conditions)), (*params, limit))
        return [_logged(list(group)) for _, group in itertools.groupby(rows, key=lambda row: row[0])]

    async def replay(self, endpoint: WebhookEndpoint, delivery_id: str | None = None) -> int:
        """Send one again, whatever became of it, or all that failed; the schedule begins anew. How many those are."""
        if not endpoint.enabled:
            raise BadInput("the endpoint is disabled: enable it first", param="enabled")
        which, params = _ALL_FAILED, tuple[Value, ...]((endpoint.id, MAX_REPLAYED))
        if delivery_id is not None:
            which, params = "id = ? AND endpoint_id = ?", (delivery_id, endpoint.id)
        rows = await self._db.write(_REPLAY.format(which=which) + " RETURNING id", (self._db.now_us(), *params))
        if delivery_id is not None and not rows:
            raise NotFound(f"there is no delivery {delivery_id[:80]!r} of this endpoint", param="delivery_id")
        await self._db.notify(EVENTS_CHANNEL)
        return len(rows)

    async def remove_before(self, before_us: int) -> None:
        """Retention: whatever became of them."""
        old = "SELECT id FROM deliveries WHERE created_us < ?"
        await self._db.transaction(
            [
                Step(f"DELETE FROM delivery_attempts WHERE delivery_id IN ({old})", (before_us,)),
                Step("DELETE FROM deliveries WHERE created_us < ?", (before_us,)),
            ]
        )

    async def _event(self, delivery: Delivery) -> Event | None:
        query = f"SELECT {EVENT_COLUMNS} FROM events WHERE account = ? AND number = ?"
        rows = await self._db.read(query, (delivery.account, delivery.event_number))
        return event_from_row(rows[0]) if rows else None


def event_from_row(row: Row) -> Event:
    fields = dict(zip(EVENT_COLUMNS.split(", "), row, strict=True))
    return msgspec.convert({**fields, "data": msgspec.json.decode(str(fields["data"]))}, Event)


def _delivery(row: Row) -> Delivery:
    return msgspec.convert(dict(zip(_COLUMNS.split(", "), row, strict=True)), Delivery)


def _logged(rows: list[Row]) -> DeliveryRecord:
    """One delivery, from a row for each of its attempts: also one that was begun and of which nothing was written."""
    n_own, n_event = len(_COLUMNS.split(", ")), len(EVENT_COLUMNS.split(", "))
    delivery, event = _delivery(rows[0][:n_own]), rows[0][n_own : n_own + n_event]
    names = _ATTEMPT_COLUMNS.split(", ")
    written = [dict(zip(names, row[n_own + n_event :], strict=True)) for row in rows]
    known = {
        fields["number"]: msgspec.convert(fields, DeliveryAttempt) for fields in written if fields["number"] is not None
    }
    attempts = [known.get(number, DeliveryAttempt(number=number)) for number in range(1, delivery.attempts + 1)]
    return DeliveryRecord(delivery, None if event[0] is None else event_from_row(event), attempts)


def _log(delivery: Delivery, attempt: DeliveryAttempt) -> Step:
    row = (attempt.started_us, attempt.took_us, attempt.status, attempt.problem)
    return Step(_LOG, (delivery.id, attempt.number, *row, delivery.id))
