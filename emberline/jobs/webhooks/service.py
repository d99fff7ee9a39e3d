"""Webhooks put together: endpoints and their deliveries, the event feed, the deliverer, and retention."""

import asyncio
import logging

import msgspec

from emberline.accounts.secret import Secret
from emberline.jobs.webhooks.deliverer import DISABLE_AFTER_DAYS, MAX_IN_FLIGHT, TIMEOUT_S, Deliverer
from emberline.jobs.webhooks.deliveries import Deliveries
from emberline.jobs.webhooks.events import EventFeed
from emberline.jobs.webhooks.webhook_store import WebhookEndpoints
from emberline.net.egress_policy import EgressPolicy, Resolve
from emberline.net.periodic import every, stop
from emberline.store import Database

RETENTION_DAYS = 30
POLL_S = 1.0  # how soon events of other processes are seen where the store cannot notify across processes
PURGE_INTERVAL_S = 3600.0
_DAY_US = 86_400 * 1_000_000

log = logging.getLogger("emberline.jobs")


class WebhookSettings(msgspec.Struct, frozen=True, kw_only=True):
    allow: tuple[str, ...] = ()  # private address ranges that webhooks may reach
    timeout_s: float = TIMEOUT_S
    disable_after_days: float = DISABLE_AFTER_DAYS
    retention_days: float = RETENTION_DAYS
    poll_s: float = POLL_S
    max_in_flight: int = MAX_IN_FLIGHT  # delivery attempts at the same time


class WebhookService:
    """Every process that serves the event APIs has one; only those that call `deliver` send deliveries."""

    def __init__(self, db: Database, secret: Secret, settings: WebhookSettings, resolve: Resolve | None = None) -> None:
        egress = EgressPolicy(settings.allow, resolve)
        self._db = db
        self._retention_us = int(settings.retention_days * _DAY_US)
        self._purging: asyncio.Task[None] | None = None
        self.endpoints = WebhookEndpoints(db, secret, egress)
        self.deliveries = Deliveries(db)
        self.feed = EventFeed(db, settings.poll_s)
        self.deliverer = Deliverer(
            db,
            secret,
            egress,
            poll_s=settings.poll_s,
            timeout_s=settings.timeout_s,
            disable_after_days=settings.disable_after_days,
            max_in_flight=settings.max_in_flight,
        )

    def deliver(self) -> None:
        """Start sending due deliveries and removing old ones."""
        self.deliverer.start()
        self._purging = asyncio.create_task(
            every(PURGE_INTERVAL_S, self.purge_expired, log, "old events were not removed", at_once=True)
        )

    async def close(self) -> None:
        """Release waiting readers and let running attempts finish; the store stays open."""
        self.feed.end()
        await stop(self._purging)
        await self.deliverer.close()

    async def purge_expired(self) -> None:
        """Remove events and deliveries older than the retention."""
        before_us = self._db.now_us() - self._retention_us
        await self.deliveries.remove_before(before_us)
        await self._db.write("DELETE FROM events WHERE created_us < ?", (before_us,))
