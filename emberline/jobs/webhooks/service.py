"""The events side of queued work, put together: endpoints and their deliveries, the feed, and who sends and tidies."""

import asyncio
import logging

import msgspec

from emberline.accounts.secret import Secret
from emberline.jobs.webhooks.deliverer import DISABLE_AFTER_DAYS, TIMEOUT_S, Deliverer
from emberline.jobs.webhooks.deliveries import Deliveries
from emberline.jobs.webhooks.egress_policy import EgressPolicy, Resolve
from emberline.jobs.webhooks.endpoints import WebhookEndpoints
from emberline.jobs.webhooks.event_feed import ChannelListener, EventFeed
from emberline.jobs.webhooks.events import EVENTS_CHANNEL
from emberline.protocol.errors import EmberlineError
from emberline.store import Database

RETENTION_DAYS = 30
POLL_S = 1.0  # the backstop: other processes' events are seen this soon where the store cannot wake us
TIDY_INTERVAL_S = 3600.0
_DAY_US = 86_400 * 1_000_000

log = logging.getLogger("emberline.jobs")


class WebhookSettings(msgspec.Struct, frozen=True, kw_only=True):
    allow: tuple[str, ...] = ()  # ranges inside the network that webhooks may reach
    timeout_s: float = TIMEOUT_S
    disable_after_days: float = DISABLE_AFTER_DAYS
    retention_days: float = RETENTION_DAYS
    poll_s: float = POLL_S


class WebhookService:
    """Every process that answers about events has one; those that also deliver were opened so."""

    def __init__(self, db: Database, secret: Secret, settings: WebhookSettings, resolve: Resolve | None = None) -> None:
        reach = EgressPolicy(settings.allow, resolve)
        self._db = db
        self._retention_us = int(settings.retention_days * _DAY_US)
        self._bell = ChannelListener(db, EVENTS_CHANNEL, settings.poll_s)
        self._own_bell = ChannelListener(
            db, EVENTS_CHANNEL, settings.poll_s
        )  # it rings at every delivery's end: not for readers
        self._tidying: asyncio.Task[None] | None = None
        self.endpoints = WebhookEndpoints(db, secret, reach)
        self.deliveries = Deliveries(db)
        self.feed = EventFeed(db, self._bell)
        self.deliverer = Deliverer(
            db,
            secret,
            reach,
            self._own_bell,
            timeout_s=settings.timeout_s,
            disable_after_days=settings.disable_after_days,
        )

    def deliver(self) -> None:
        """Send what is due, and tidy up, from now on."""
        self.deliverer.start()
        self._tidying = asyncio.create_task(self._keep_tidy())

    async def close(self) -> None:
        """Readers that wait are let go, attempts that run may end; the store stays open."""
        self.feed.end()
        if self._tidying is not None:
            self._tidying.cancel()
            await asyncio.gather(self._tidying, return_exceptions=True)
        await self.deliverer.close()
        await self._bell.close()
        await self._own_bell.close()

    async def tidy(self) -> None:
        """Remove what is older than the retention."""
        before_us = self._db.now_us() - self._retention_us
        await self.deliveries.remove_before(before_us)
        await self._db.write("DELETE FROM events WHERE created_us < ?", (before_us,))

    async def _keep_tidy(self) -> None:
        while True:
            try:
                await self.tidy()
            except EmberlineError as error:  # the next round may find the store well again
                log.error("old events were not removed: %s", error.message)
            await asyncio.sleep(TIDY_INTERVAL_S)
