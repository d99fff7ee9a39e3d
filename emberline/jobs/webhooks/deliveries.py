"""Deliveries: one row for each event that an endpoint is to receive, and a log of every attempt at it.

A waiting row has state `pending` and a visibility timeout, `ready_us`. Claiming it moves that time beyond the end of
the attempt, so the rows of a process that dies become visible again: delivery is at least once, and the receiver then
sees the same `webhook-id` again. `attempts` counts claims and is the fencing token: only the latest claim may finish
the row.
"""

import itertools
from collections.abc import Sequence
from typing import Literal

import msgspec

from emberline.jobs.webhooks.events import EVENT_COLUMNS, EVENTS_CHANNEL, Event, event_from_row
from emberline.jobs.webhooks.webhook_store import ENDPOINT_COLUMNS, WebhookEndpoint, fail_pending
from emberline.protocol.errors import BadInput, NotFound
from emberline.store import Database, Query, Sql, Value
from emberline.store.database import Row, decode_row

LEASE_S = 60.0  # longer than an attempt can last
MAX_REPLAYED = 1000  # at once

DeliveryState = Literal["pending", "delivered", "failed"]


class DeliveryAttempt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One logged attempt. Without status and problem: its process ended before it could write the outcome."""

    number: int
    started_us: int = 0
    took_us: int = 0
    status: int | None = None  # of the receiver's response
    problem: str = ""  # why there was no response, or why it does not count

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
    base: int  # attempts made before the latest replay; the retry schedule counts from here
    ready_us: int
    created_us: int
    finished_us: int | None


class ClaimedDelivery(msgspec.Struct, frozen=True):
    """A delivery with what sending it needs. Without an event: it was removed in the meantime."""

    delivery: Delivery
    endpoint: WebhookEndpoint
    event: Event | None
    traceparent: str = ""  # of the request that submitted the event's subject


class DeliveryRecord(msgspec.Struct, frozen=True):
    """A delivery as its owner sees it."""

    delivery: Delivery
    event: Event | None
    attempts: list[DeliveryAttempt]


def _columns(table: str, columns: str) -> str:
    return ", ".join(f"{table}.{name}" for name in columns.split(", "))


_COLUMNS = ", ".join(Delivery.__struct_fields__)
_ATTEMPT_COLUMNS = ", ".join(DeliveryAttempt.__struct_fields__)
_NEXT_ENDPOINT = (
    "SELECT endpoint_id, account FROM deliveries WHERE state = 'pending' AND ready_us <= ?{others} "
    "ORDER BY ready_us LIMIT 1"
)
_NEXT_READY = "SELECT MIN(ready_us) FROM deliveries WHERE state = 'pending' AND ready_us > ?"
_CLAIM_SOME = f"""
    UPDATE deliveries SET attempts = attempts + 1, ready_us = ? WHERE id IN (
        SELECT id FROM deliveries WHERE endpoint_id = ? AND state = 'pending' AND ready_us <= ?
        ORDER BY ready_us, event_number LIMIT ? {{lock}}
    ) RETURNING {_COLUMNS}
"""
# SQLite has one writer at a time; on PostgreSQL concurrent claims skip each other's rows.
_CLAIM = Sql(_CLAIM_SOME.format(lock=""), postgres=_CLAIM_SOME.format(lock="FOR UPDATE SKIP LOCKED"))
_LOG_ATTEMPT = f"""
    INSERT INTO delivery_attempts (delivery_id, {_ATTEMPT_COLUMNS})
    SELECT ?, ?, ?, ?, ?, ? WHERE EXISTS (SELECT 1 FROM deliveries WHERE id = ?) ON CONFLICT DO NOTHING
"""
_DELIVERED = "UPDATE deliveries SET state = 'delivered', finished_us = ? WHERE id = ? AND attempts = ? RETURNING id"
_RETRY = "UPDATE deliveries SET ready_us = ? WHERE id = ? AND attempts = ? AND state = 'pending' RETURNING id"
_FAILED = (
    "UPDATE deliveries SET state = 'failed', finished_us = ? WHERE id = ? AND attempts = ? AND state = 'pending' "
    "RETURNING id"
)
_HEALTHY = "UPDATE webhook_endpoints SET failing_since_us = NULL WHERE id = ? AND failing_since_us IS NOT NULL"
_FAILING = "UPDATE webhook_endpoints SET failing_since_us = ? WHERE id = ? AND failing_since_us IS NULL"
_DISABLE = (
    "UPDATE webhook_endpoints SET enabled = 0, disabled_reason = ?, modified_us = ? "
    "WHERE id = ? AND enabled = 1{condition} RETURNING id"
)
# One statement, so that a delivery and its attempts are of one snapshot.
_RECORDS = f"""
    SELECT {_columns("delivery", _COLUMNS)}, {_columns("event", EVENT_COLUMNS)}, {_columns("attempt", _ATTEMPT_COLUMNS)}
    FROM (SELECT {_COLUMNS} FROM deliveries WHERE {{where}} ORDER BY event_number DESC LIMIT ?) AS delivery
    LEFT JOIN events AS event ON event.account = delivery.account AND event.number = delivery.event_number
    LEFT JOIN delivery_attempts AS attempt ON attempt.delivery_id = delivery.id
    ORDER BY delivery.event_number DESC, attempt.number
"""
_ALL_FAILED = (
    "id IN (SELECT id FROM deliveries WHERE endpoint_id = ? AND state = 'failed' ORDER BY event_number LIMIT ?)"
)
_REPLAY = (
    "UPDATE deliveries SET state = 'pending', base = attempts, ready_us = ?, finished_us = NULL WHERE {which} "
    "RETURNING id"
)


_TRACEPARENT = "SELECT traceparent FROM batches WHERE id = ?"


class Deliveries:
    def __init__(self, db: Database) -> None:
        self._db = db

    # --- for the deliverer -------------------------------------------------------------------------------------------

    async def next_endpoint(self, endpoints: Sequence[str], accounts: Sequence[str]) -> tuple[str, str] | None:
        """The endpoint with the delivery that has been due longest, and its account, outside of those given."""
        given = (("endpoint_id", endpoints), ("account", accounts))
        others = "".join(f" AND {column} NOT IN ({', '.join('?' * len(ids))})" for column, ids in given if ids)
        rows = await self._db.read(_NEXT_ENDPOINT.format(others=others), (self._db.now_us(), *endpoints, *accounts))
        return (str(rows[0][0]), str(rows[0][1])) if rows else None

    async def next_ready_us(self, after_us: int) -> int | None:
        """When the next delivery becomes due after `after_us`. Returns None if none will."""
        ((ready_us,),) = await self._db.read(_NEXT_READY, (after_us,))
        return None if ready_us is None else int(ready_us)

    async def claim(self, endpoint_id: str, limit: int) -> list[ClaimedDelivery]:
        """At most `limit` due deliveries, leased to the caller for LEASE_S."""
        now_us = self._db.now_us()
        rows = await self._db.write(_CLAIM, (now_us + int(LEASE_S * 1e6), endpoint_id, now_us, limit))
        if not rows:
            return []
        found = await self._db.read(f"SELECT {ENDPOINT_COLUMNS} FROM webhook_endpoints WHERE id = ?", (endpoint_id,))
        if not found:  # deleted while the event was written
            await self._db.write("DELETE FROM deliveries WHERE endpoint_id = ?", (endpoint_id,))
            return []
        endpoint = decode_row(WebhookEndpoint, ENDPOINT_COLUMNS, found[0])
        claimed = sorted((_delivery(row) for row in rows), key=lambda delivery: delivery.event_number)
        return [await self._with_event(delivery, endpoint) for delivery in claimed]

    async def _with_event(self, delivery: Delivery, endpoint: WebhookEndpoint) -> ClaimedDelivery:
        event = await self._event(delivery)
        rows = await self._db.read(_TRACEPARENT, (event.subject,)) if event is not None else []
        return ClaimedDelivery(delivery, endpoint, event, str(rows[0][0]) if rows else "")

    async def succeeded(self, claimed: ClaimedDelivery, attempt: DeliveryAttempt) -> None:
        delivery = claimed.delivery
        done = Query(_DELIVERED, (self._db.now_us(), delivery.id, delivery.attempts))
        await self._db.transaction([_log(delivery, attempt), done, Query(_HEALTHY, (claimed.endpoint.id,))])

    async def failed(self, claimed: ClaimedDelivery, attempt: DeliveryAttempt, delay_s: float | None) -> bool:
        """Retry after `delay_s`; None gives the delivery up. Returns whether it was given up."""
        now_us, delivery = self._db.now_us(), claimed.delivery
        if delay_s is None:
            update = Query(_FAILED, (now_us, delivery.id, delivery.attempts))
        else:
            update = Query(_RETRY, (now_us + int(delay_s * 1e6), delivery.id, delivery.attempts))
        failing = Query(_FAILING, (now_us, claimed.endpoint.id))
        outcomes = await self._db.transaction([_log(delivery, attempt), update, failing])
        return delay_s is None and bool(outcomes[1])

    async def disable(self, claimed: ClaimedDelivery, reason: str, failing_since_us: int | None = None) -> bool:
        """Disable the endpoint (if it still fails since then) and fail what is pending; whether it was enabled."""
        now_us, endpoint_id = self._db.now_us(), claimed.endpoint.id
        condition, since = ("", ()) if failing_since_us is None else (" AND failing_since_us <= ?", (failing_since_us,))
        disable = Query(_DISABLE.format(condition=condition), (reason, now_us, endpoint_id, *since))
        outcomes = await self._db.transaction([disable, fail_pending(endpoint_id, now_us)])
        return bool(outcomes[0])

    async def count_pending(self) -> int:
        ((n,),) = await self._db.read("SELECT COUNT(*) FROM deliveries WHERE state = 'pending'")
        return int(n or 0)

    # --- for the endpoint's owner ------------------------------------------------------------------------------------

    async def records(
        self, endpoint: WebhookEndpoint, state: DeliveryState | None, before: int | None, limit: int
    ) -> list[DeliveryRecord]:
        """The endpoint's deliveries, newest event first; before: an event's number."""
        conditions, params = ["endpoint_id = ?"], list[Value]([endpoint.id])
        if state is not None:
            conditions.append("state = ?")
            params.append(state)
        if before is not None:
            conditions.append("event_number < ?")
            params.append(before)
        rows = await self._db.report(_RECORDS.format(where=" AND ".join(conditions)), (*params, limit))
        return [_record(list(group)) for _, group in itertools.groupby(rows, key=lambda row: row[0])]

    async def replay(self, endpoint: WebhookEndpoint, delivery_id: str | None = None) -> int:
        """Send one delivery again, whatever its state, or all that failed; the retry schedule starts over."""
        if not endpoint.enabled:
            raise BadInput("the endpoint is disabled: enable it first", param="enabled")
        which, params = _ALL_FAILED, tuple[Value, ...]((endpoint.id, MAX_REPLAYED))
        if delivery_id is not None:
            which, params = "id = ? AND endpoint_id = ?", (delivery_id, endpoint.id)
        rows = await self._db.write(_REPLAY.format(which=which), (self._db.now_us(), *params))
        if delivery_id is not None and not rows:
            raise NotFound(f"there is no delivery {delivery_id[:80]!r} of this endpoint", param="delivery_id")
        await self._db.notify(EVENTS_CHANNEL)
        return len(rows)

    async def remove_before(self, before_us: int) -> None:
        """Retention: remove deliveries in any state."""
        old = "SELECT id FROM deliveries WHERE created_us < ?"
        attempts = Query(f"DELETE FROM delivery_attempts WHERE delivery_id IN ({old})", (before_us,))
        await self._db.transaction([attempts, Query("DELETE FROM deliveries WHERE created_us < ?", (before_us,))])

    async def _event(self, delivery: Delivery) -> Event | None:
        query = f"SELECT {EVENT_COLUMNS} FROM events WHERE account = ? AND number = ?"
        rows = await self._db.read(query, (delivery.account, delivery.event_number))
        return event_from_row(rows[0]) if rows else None


def _delivery(row: Row) -> Delivery:
    return decode_row(Delivery, _COLUMNS, row)


def _record(rows: list[Row]) -> DeliveryRecord:
    """One delivery from a row per logged attempt; an attempt without a row gets an empty entry."""
    n_own, n_event = len(Delivery.__struct_fields__), len(Event.__struct_fields__)
    delivery, event = _delivery(rows[0][:n_own]), rows[0][n_own : n_own + n_event]
    logged = [row[n_own + n_event :] for row in rows]
    known = {row[0]: decode_row(DeliveryAttempt, _ATTEMPT_COLUMNS, row) for row in logged if row[0] is not None}
    attempts = [known.get(number, DeliveryAttempt(number=number)) for number in range(1, delivery.attempts + 1)]
    return DeliveryRecord(delivery, None if event[0] is None else event_from_row(event), attempts)


def _log(delivery: Delivery, attempt: DeliveryAttempt) -> Query:
    return Query(_LOG_ATTEMPT, (delivery.id, *msgspec.structs.astuple(attempt), delivery.id))
