"""Event desks on a real store, with a clock that tests can move."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from emberline.accounts.secret import Secret
from emberline.jobs.webhooks.deliveries import DeliveryRecord
from emberline.jobs.webhooks.egress_policy import Resolve
from emberline.jobs.webhooks.endpoints import EndpointUpdate, WebhookEndpoint
from emberline.jobs.webhooks.events import EVENTS_CHANNEL, batch_event, event_statements
from emberline.jobs.webhooks.service import WebhookService, WebhookSettings
from emberline.store import Database

SECRET = Secret("7" * 64)
LOOPBACK = ("127.0.0.0/8",)


class Moved:
    """A database whose clock is ahead by what the test says."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self.ahead_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)

    def now_us(self) -> int:
        return self._db.now_us() + int(self.ahead_s * 1e6)

    def skip_to(self, log: list[DeliveryRecord]) -> None:
        """To when the first of the deliveries is due again, unless one is under way: its lease must not end."""
        waiting = [item for item in log if item.delivery.state == "pending"]
        if all(a.status or a.problem for item in waiting for a in item.attempts) and waiting:
            due_us = min(item.delivery.ready_us for item in waiting)
            self.ahead_s += max(0.0, (due_us - self.now_us()) / 1e6)


@asynccontextmanager
async def desk_on(
    db: Database, *, deliver: bool = True, resolve: Resolve | None = None, **settings: Any
) -> AsyncIterator[WebhookService]:
    settings = {"allow": LOOPBACK, "poll_s": 0.1, "timeout_s": 1.0} | settings
    desk = WebhookService(db, SECRET, WebhookSettings(**settings), resolve)
    if deliver:
        desk.deliver()
    try:
        yield desk
    finally:
        await desk.close()


async def endpoint_at(
    desk: WebhookService, url: str, types: Sequence[str] = ("*",), account: str = "acme"
) -> WebhookEndpoint:
    return await desk.endpoints.create(account, "standard", EndpointUpdate(url=url, types=types))


async def happen(db: Database, batch_id: str, status: str = "completed", account: str = "acme", **about: Any) -> None:
    """A batch reaches a status, as the queue would tell it."""
    kind = about.pop("kind", "openai")
    event = batch_event(kind, status, account=account, batch_id=batch_id, now_us=db.now_us(), **about)
    assert event is not None
    await db.transaction(event_statements(event))
    await db.notify(EVENTS_CHANNEL)


async def log_of(desk: WebhookService, endpoint: WebhookEndpoint) -> list[DeliveryRecord]:
    """Oldest first."""
    return (await desk.deliveries.records(endpoint, None, None, 100))[::-1]


async def log_when(
    desk: WebhookService, endpoint: WebhookEndpoint, ready: Callable[[list[DeliveryRecord]], bool]
) -> list[DeliveryRecord]:
    """The log as soon as it says something."""
    async with asyncio.timeout(10):
        while not ready(found := await log_of(desk, endpoint)):
            await asyncio.sleep(0.02)
    return found
