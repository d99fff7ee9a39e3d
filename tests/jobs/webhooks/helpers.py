"""Helpers of the webhook tests: a webhook service on a real store whose clock tests can move."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from emberline.accounts.secret import Secret
from emberline.jobs.webhooks.deliveries import DeliveryRecord
from emberline.jobs.webhooks.events import EVENTS_CHANNEL, batch_event, event_statements
from emberline.jobs.webhooks.service import WebhookService, WebhookSettings
from emberline.jobs.webhooks.webhook_store import EndpointUpdate, WebhookEndpoint
from emberline.net.egress_policy import Resolve
from emberline.store import Database

SECRET = Secret("7" * 64)
LOOPBACK = ("127.0.0.0/8",)


class ShiftedClock:
    """A database whose clock stands still, except that tests move it."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._began_us = db.now_us()
        self.ahead_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)

    def now_us(self) -> int:
        return self._began_us + int(self.ahead_s * 1e6)

    async def advance(self, seconds: float) -> None:
        """Move the clock and wake the deliverers of this database."""
        self.ahead_s += seconds
        await self._db.notify(EVENTS_CHANNEL)

    async def skip_to(self, log: list[DeliveryRecord]) -> None:
        """Move to the next due delivery, unless an attempt is running: its lease must not end."""
        waiting = [item for item in log if item.delivery.state == "pending"]
        if all(a.status or a.problem for item in waiting for a in item.attempts) and waiting:
            due_us = min(item.delivery.ready_us for item in waiting)
            await self.advance(max(0.0, (due_us - self.now_us()) / 1e6 + 0.001))


@asynccontextmanager
async def webhook_service(
    db: Database, *, deliver: bool = True, resolve: Resolve | None = None, **settings: Any
) -> AsyncIterator[WebhookService]:
    settings = {"allow": LOOPBACK, "poll_s": 0.1, "timeout_s": 30.0} | settings
    webhooks = WebhookService(db, SECRET, WebhookSettings(**settings), resolve)
    if deliver:
        webhooks.deliver()
    try:
        yield webhooks
    finally:
        await webhooks.close()


async def create_endpoint(
    webhooks: WebhookService, url: str, types: Sequence[str] = ("*",), account: str = "acme"
) -> WebhookEndpoint:
    return await webhooks.endpoints.create(account, "standard", EndpointUpdate(url=url, types=types))


async def emit_event(
    db: Database, batch_id: str, status: str = "completed", account: str = "acme", **about: Any
) -> None:
    """Write the event of a batch that reaches a status, as the queue does."""
    kind = about.pop("kind", "openai")
    event = batch_event(kind, status, account=account, batch_id=batch_id, now_us=db.now_us(), **about)
    assert event is not None
    await db.transaction(event_statements(event))
    await db.notify(EVENTS_CHANNEL)


async def delivery_records(webhooks: WebhookService, endpoint: WebhookEndpoint) -> list[DeliveryRecord]:
    """The endpoint's deliveries, oldest first."""
    return (await webhooks.deliveries.records(endpoint, None, None, 100))[::-1]


async def wait_for_records(
    webhooks: WebhookService, endpoint: WebhookEndpoint, ready: Callable[[list[DeliveryRecord]], bool]
) -> list[DeliveryRecord]:
    """The records as soon as `ready` accepts them."""
    async with asyncio.timeout(60):
        while not ready(found := await delivery_records(webhooks, endpoint)):
            await asyncio.sleep(0.02)
    return found


async def wait_for_counts(webhooks: WebhookService, **expected: int) -> None:
    """The deliverer counts an attempt after it has written it down."""
    async with asyncio.timeout(60):
        while any(webhooks.deliverer.counts[name] != n for name, n in expected.items()):
            await asyncio.sleep(0.02)
